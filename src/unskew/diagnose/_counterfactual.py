"""The clean scorer under interventions: what a side would have recorded."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from unskew._errors import UnskewError
from unskew.causes import Facts, Intervention
from unskew.score import HEAD_NAMES, Edit, Inputs, SamplingTransform
from unskew.trace import Trace

if TYPE_CHECKING:
    from unskew.score import HeadStates, HFScorer, TokenScores

__all__ = ["ModelCounterfactual", "RecordCounterfactual", "recorded"]


class RecordCounterfactual:
    """Without a model the other side's log-probs stand for the clean scorer; only `logp` changes can be asked.

    Args:
        trace: the usable rows.
        clean: log-probs of the other side, float64 (N,).
    """

    scorers: frozenset[str] = frozenset()
    has_model = False
    trainer_temperature = 1.0
    affordable = 1 << 20
    forwards = 0.0
    facts = Facts()

    def __init__(self, trace: Trace, clean: np.ndarray) -> None:
        self._trace, self._clean = trace, clean

    def edits(self, name: str) -> bool:
        """No model, no edits."""
        return False

    def tensors(self) -> tuple[str, ...]:
        """No model, no tensors."""
        return ()

    def probabilities(self, hypothesis: Sequence[Intervention], tokens: np.ndarray) -> np.ndarray:
        """No model, no probabilities."""
        raise TypeError("probabilities need a model")

    def predict(self, hypotheses: Sequence[Sequence[Intervention]], *, tokens: np.ndarray | None = None) -> np.ndarray:
        """Log-probs each hypothesis would have recorded, float64 (K, N)."""
        return np.stack([recorded(self._clean, hypothesis, self._trace) for hypothesis in hypotheses])


class ModelCounterfactual:
    """The clean scorer, an HF model in fp32, and what it would say with other weights, arithmetic or inputs.

    Each body runs once for the rows that are asked for; hypotheses that share it share one pass over the logits.

    Args:
        trace: the usable rows.
        load: from a scorer's name ("" clean, "older:1", "base", "bfloat16", "float16") to the scorer; the names.
        facts: of the model's ids; those of the clean scorer by default.
        trainer_temperature: temperature the trainer scores at.
    """

    has_model = True

    def __init__(
        self,
        trace: Trace,
        load: Mapping[str, "Callable[[], HFScorer]"],
        *,
        facts: Facts | None = None,
        trainer_temperature: float = 1.0,
    ) -> None:
        self.trainer_temperature = trainer_temperature
        self.forwards = 0.0
        self._trace, self._load = trace, load
        responses = np.split(trace.tokens("response_ids"), trace.cu_seqlens[1:-1])
        self._inputs = Inputs(trace.contexts(), responses)
        self._states: dict[_Body, list[tuple[np.ndarray, HeadStates]]] = {}
        self.scorers = frozenset(name for name in load if name and name not in ("bfloat16", "float16"))
        clean = load[""]()
        self.facts = facts or Facts.of(clean.tokenizer, clean.eos_ids)

    def scores(self, scorer: str = "") -> "TokenScores":
        """Log-probs, entropy and noise scale of a scorer at the trainer's temperature, each float64 (N,)."""
        return self._whole(_Body(scorer)).scores(self._transform(()))

    def alone(self, rows: Sequence[int], hypothesis: Sequence[Intervention] = ()) -> np.ndarray:
        """Log-probs under a hypothesis of some rows scored one at a time: another batch shape; NaN elsewhere, float64 (N,)."""
        body, out = _Body.of(hypothesis), np.full(self._trace.n_tokens, np.nan)
        head = [edit for i in hypothesis for edit in i.edits if edit.name in HEAD_NAMES]
        for row in rows:
            states = self._new(body, np.array([row]))
            states = states.mapped(self._load[""]().model, head) if head else states
            out[slice(*self._trace.cu_seqlens[row : row + 2])] = states.logp([self._transform(hypothesis)])[0]
        return recorded(out, hypothesis, self._trace)

    @property
    def affordable(self) -> int:
        """Tokens that a parameter can be fitted on: those whose logits hold 2^23 numbers, at least 192."""
        return max(192, (1 << 23) // self._load[""]().vocab_size)

    def edits(self, name: str) -> bool:
        """Whether this model has a place for an edit."""
        return self._load[""]().takes(name)

    def tensors(self) -> tuple[str, ...]:
        """Names of the groups of tensors of the model: the embedding, each layer, the head."""
        return self._load[""]().tensor_groups

    def predict(self, hypotheses: Sequence[Sequence[Intervention]], *, tokens: np.ndarray | None = None) -> np.ndarray:
        """Log-probs each hypothesis would have recorded, float64 (K, N); NaN outside `tokens` where they are given."""
        bodies = [_Body.of(hypothesis) for hypothesis in hypotheses]
        heads = [tuple(sorted((e for i in h for e in i.edits if e.name in HEAD_NAMES), key=str)) for h in hypotheses]
        transforms = [self._transform(hypothesis) for hypothesis in hypotheses]
        out = np.full((len(hypotheses), self._trace.n_tokens), np.nan)
        for body, head in dict.fromkeys(zip(bodies, heads, strict=True)):
            members = [i for i, pair in enumerate(zip(bodies, heads, strict=True)) if pair == (body, head)]
            unique = list(dict.fromkeys(transforms[i] for i in members))
            place, states = self._at(body, tokens)
            if head:
                states = states.mapped(self._load[""]().model, head)
            local = None if tokens is None else np.flatnonzero(np.isin(place, tokens))
            found = np.full((len(unique), self._trace.n_tokens), np.nan)
            found[:, place] = states.logp(unique, tokens=local)
            logp = dict(zip(unique, found, strict=True))
            for i in members:
                out[i] = recorded(logp[transforms[i]], hypotheses[i], self._trace)
        return out

    def probabilities(self, hypothesis: Sequence[Intervention], tokens: np.ndarray) -> np.ndarray:
        """Probability of every id at some tokens (sorted) under a hypothesis, float32 (n, V)."""
        place, states = self._at(_Body.of(hypothesis), tokens)
        head = [edit for i in hypothesis for edit in i.edits if edit.name in HEAD_NAMES]
        states = states.mapped(self._load[""]().model, head) if head else states
        return states.probabilities(self._transform(hypothesis), tokens=np.flatnonzero(np.isin(place, tokens)))

    def _transform(self, hypothesis: Sequence[Intervention]) -> SamplingTransform:
        transform = SamplingTransform(temperature=self.trainer_temperature)
        for intervention in hypothesis:
            transform = replace(transform, **intervention.sampling)
        return transform

    def _whole(self, body: "_Body") -> "HeadStates":
        return self._at(body, None)[1]

    def _at(self, body: "_Body", tokens: np.ndarray | None) -> "tuple[np.ndarray, HeadStates]":
        """(token indices, states) of a body, of all rows or at least of those that hold the tokens."""
        n, row_of_token = len(self._trace), self._trace.row_of_token
        rows = np.arange(n) if tokens is None else np.unique(row_of_token[tokens])
        for known, states in self._states.get(body, ()):
            if np.isin(rows, known).all():
                return np.flatnonzero(np.isin(row_of_token, known)), states
        rows = np.arange(n) if 2 * len(rows) > n or body == _Body() else rows
        if body.scorer.startswith("of:") and body.scorer.endswith(":head"):
            other = self._load[body.scorer.removeprefix("of:").removesuffix(":head")]()
            place, states = self._at(replace(body, scorer=""), tokens)
            return place, states.under(other.head)
        states = self._new(body, rows)
        self._states.setdefault(body, []).append((rows, states))
        return np.flatnonzero(np.isin(row_of_token, rows)), states

    def _new(self, body: "_Body", rows: np.ndarray) -> "HeadStates":
        inputs = self._inputs
        for rewrite in body.inputs:
            inputs = rewrite(inputs, self._trace, self.facts)
        self._count(rows)

        def some(values: Any) -> Any:
            return None if values is None else [values[row] for row in rows]

        older, _, groups = body.scorer.removeprefix("of:").rpartition(":") if body.scorer.startswith("of:") else ("", "", "")
        scorer = self._load[body.scorer if not older else ""]()
        with scorer.with_tensors_of(self._load[older](), groups.split(",")) if older else nullcontext():
            states = scorer.forward(
                some(inputs.prompts), some(inputs.responses), positions=some(inputs.positions),
                routed_experts=some(inputs.routed_experts),
                cached=None if inputs.cached is None else (some(inputs.cached[0]), self._load[inputs.cached[1]]()),
                edits=body.edits, cache_bytes=1 << 29 if body == _Body() else 1 << 25,
            )  # fmt: skip
            if older and "head" in groups.split(","):
                states = states.under(scorer.frozen_head())
        return states

    def _count(self, rows: np.ndarray) -> None:
        self.forwards += float(self._trace.lengths[rows].sum()) / max(self._trace.n_tokens, 1)


@dataclass(frozen=True, slots=True)
class _Body:
    """What decides on the hidden states: weights, arithmetic, inputs."""

    scorer: str = ""
    edits: tuple[Edit, ...] = ()
    inputs: tuple[Callable[..., Inputs], ...] = ()

    @classmethod
    def of(cls, hypothesis: Sequence[Intervention]) -> "_Body":
        scorers = sorted({i.scorer for i in hypothesis if i.scorer})
        if len(scorers) > 1:
            raise UnskewError(f"one hypothesis names two models: {scorers}", exit_code=2)
        edits = sorted({e for i in hypothesis for e in i.edits if e.name not in HEAD_NAMES}, key=str)
        return cls("".join(scorers), tuple(edits), tuple(i.inputs for i in hypothesis if i.inputs is not None))


def recorded(logp: np.ndarray, hypothesis: Sequence[Intervention], trace: Trace) -> np.ndarray:
    """Log-probs as the hypothesis records them: each `logp` change in the order of its stage, float64 (N,)."""
    for intervention in sorted(hypothesis, key=lambda i: i.stage):
        if intervention.logp is not None:
            logp = intervention.logp(logp, trace)
    return logp
