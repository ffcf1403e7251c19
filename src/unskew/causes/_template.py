"""Template causes: the two sides read different prompts."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from unskew.causes._base import Cause, Facts, Gap, Intervention, Parameter, Side
from unskew.score import Inputs
from unskew.trace import Trace

__all__ = ["Bos", "History", "Prompt"]

Messages = list[dict[str, Any]]

_BOTH: frozenset[Side] = frozenset({"rollout", "trainer"})
_DEFAULT_SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class Bos(Cause):
    """One BOS more or less in the prompt (methods 20)."""

    id = "template.bos"
    says = "one side's prompt begins with a BOS token that the other side's lacks"
    sides = _BOTH
    screens_on = "the gap is largest at the first response tokens and decays; prompt lengths differ by one"
    refute = "scoring with the BOS toggled leaves the gap as large as before"
    remedy = "send token ids to the engine; apply the chat template once, and tokenize its text without special tokens"
    settings = ("rollout.prompt_ids", "rollout.add_bos")
    needs_model = True
    planted = "rollout"

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, inputs=_toggled_bos)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.counterfactual.facts.bos_id is not None:
            yield self.intervene()


class _Rerendered(Cause):
    """The prompt rendered from the recorded messages in another way, one of a few."""

    sides = _BOTH
    needs_model = True
    costly = True
    fitted = 1
    planted = "rollout"
    ways: ClassVar[tuple[str, ...]]

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"prompt": str(rng.choice(self.ways))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, dict(parameters), inputs=_Rendered(str(parameters["prompt"])))

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        facts, trace = gap.counterfactual.facts, gap.trace
        if getattr(facts.tokenizer, "chat_template", None) is None or not any(trace.rows("messages")):
            return
        seen = {_key(trace.contexts())}
        for way in ("template", *self.ways):
            prompts = _Rendered(way).prompts(trace.contexts(), trace, facts)
            if _key(prompts) not in seen:
                seen.add(_key(prompts))
                yield self.intervene(prompt=way)


class Prompt(_Rerendered):
    """Another chat template or system prompt (methods 19)."""

    id = "template.prompt"
    says = "one side's prompt is rendered by another chat template or with another system prompt"
    screens_on = "the gap is largest at the first response tokens and decays; scoring after the other prompt removes it"
    refute = "no other rendering of the messages brings the clean scorer nearer to the recorded log-probs"
    remedy = "render the prompt once and pass its token ids to both sides; compare the two templates on the same messages"
    settings = ("rollout.prompt_ids", "rollout.chat_template")
    ways = ("no-generation-prompt", "no-template", "no-system", "default-system", "doubled")


class History(_Rerendered):
    """Earlier turns rendered differently on the two sides."""

    id = "template.history"
    says = "one side's prompt holds other earlier turns: thinking stripped, or turns dropped"
    screens_on = "only rows with earlier turns disagree; scoring after the shortened history removes the gap"
    refute = "no shortened history brings the clean scorer nearer to the recorded log-probs"
    remedy = "append the sampled ids of each turn to the ids of the history; never render earlier turns again"
    settings = ("rollout.prompt_ids", "rollout.chat_template")
    plants_on = "conversations"
    ways = ("thinking-stripped", "oldest-dropped", "last-turn")


@dataclass(frozen=True, slots=True)
class _Rendered:
    """Prompts rendered again from the recorded messages; rows without messages keep theirs."""

    way: str

    def __call__(self, inputs: Inputs, trace: Trace, facts: Facts) -> Inputs:
        return replace(inputs, prompts=self.prompts(inputs.prompts, trace, facts))

    def prompts(self, before: Iterable[np.ndarray], trace: Trace, facts: Facts) -> list[np.ndarray]:
        return [
            prompt if text is None else np.asarray(_WAYS[self.way](facts.tokenizer, json.loads(text)), np.int64)
            for prompt, text in zip(before, trace.rows("messages"), strict=True)
        ]


def _template(tokenizer: Any, messages: Messages, *, generate: bool = True) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)


def _doubled(tokenizer: Any, messages: Messages) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return _template(tokenizer, [{"role": "user", "content": text}])


def _without_thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": _THINKING.sub("", message["content"])} if message["role"] == "assistant" else message


def _turns(messages: Messages, keep: slice) -> Messages:
    """System messages and some of the turns, each from one user message to before the next."""
    turns: list[Messages] = []
    for message in messages:
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    system = [m for m in messages if m["role"] == "system"]
    return [*system, *(m for turn in turns[keep] for m in turn if m["role"] != "system")]


def _leading(messages: Messages) -> Messages:
    return messages if messages and messages[0]["role"] == "system" else [_DEFAULT_SYSTEM, *messages]


_WAYS: Mapping[str, Callable[[Any, Messages], list[int]]] = {
    "template": _template,
    "no-generation-prompt": lambda tokenizer, messages: _template(tokenizer, messages, generate=False),
    "no-template": lambda tokenizer, messages: tokenizer.encode("\n".join(m["content"] for m in messages)),
    "no-system": lambda tokenizer, messages: _template(tokenizer, [m for m in messages if m["role"] != "system"]),
    "default-system": lambda tokenizer, messages: _template(tokenizer, _leading(messages)),
    "doubled": _doubled,
    "thinking-stripped": lambda tokenizer, messages: _template(tokenizer, [_without_thinking(m) for m in messages]),
    "oldest-dropped": lambda tokenizer, messages: _template(tokenizer, _turns(messages, slice(1, None)) or messages),
    "last-turn": lambda tokenizer, messages: _template(tokenizer, _turns(messages, slice(-1, None))),
}
"""From tokenizer and messages to prompt ids."""


def _key(prompts: Iterable[np.ndarray]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, prompt)) for prompt in prompts)


def _toggled_bos(inputs: Inputs, _: Trace, facts: Facts) -> Inputs:
    """Prompts without the BOS that they begin with, or with the one that they lack."""
    return replace(inputs, prompts=[_toggled(np.asarray(prompt), facts.bos_id) for prompt in inputs.prompts])


def _toggled(prompt: np.ndarray, bos_id: int | None) -> np.ndarray:
    if not len(prompt) or bos_id is None:
        return prompt
    if len(prompt) > 1 and prompt[0] == bos_id:
        return prompt[1:]
    return np.concatenate([[bos_id], prompt]).astype(np.int64)
