"""The clean scorer under interventions: what a side would have recorded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from unskew._errors import UnskewError
from unskew.causes import Intervention
from unskew.score import SamplingTransform
from unskew.trace import Trace

if TYPE_CHECKING:
    from unskew.score import HeadStates, HFScorer, TokenScores

__all__ = ["ModelCounterfactual", "RecordCounterfactual"]


class RecordCounterfactual:
    """Without a model the other side's log-probs stand for the clean scorer; only `logp` changes can be asked.

    Args:
        trace: the usable rows.
        clean: log-probs of the other side, float64 (N,).
    """

    scorers: frozenset[str] = frozenset()
    trainer_temperature = 1.0
    affordable = 1 << 20
    forwards = 0

    def __init__(self, trace: Trace, clean: np.ndarray) -> None:
        self._trace, self._clean = trace, clean

    def predict(self, hypotheses: Sequence[Sequence[Intervention]], *, tokens: np.ndarray | None = None) -> np.ndarray:
        """Log-probs each hypothesis would have recorded, float64 (K, N)."""
        return np.stack([recorded(self._clean, hypothesis, self._trace) for hypothesis in hypotheses])


class ModelCounterfactual:
    """The clean scorer, an HF model in fp32, and the other scorers it can be replaced with.

    Each scorer's body runs once; hypotheses that share a scorer share one pass over the logits. "head-of:older:1" is the
    clean body under the head of that checkpoint.

    Args:
        trace: the usable rows.
        load: from a scorer's name ("" clean, "older:1", "base", "bfloat16", "float16") to the scorer; the names.
        bos_id: id of BOS, or None where the tokenizer has none.
        trainer_temperature: temperature the trainer scores at.
    """

    def __init__(
        self,
        trace: Trace,
        load: Mapping[str, "Callable[[], HFScorer]"],
        *,
        bos_id: int | None,
        trainer_temperature: float,
    ) -> None:
        self.trainer_temperature = trainer_temperature
        self.forwards = 0
        self._trace, self._load, self._bos_id = trace, load, bos_id
        self._prompts = trace.contexts()
        self._responses = np.split(trace.tokens("response_ids"), trace.cu_seqlens[1:-1])
        self._routing = trace.rows("routed_experts") if trace.has("routed_experts") else None
        self._states: dict[tuple[str, ...], HeadStates] = {}
        self.scorers = frozenset(name for name in load if name and name not in ("bfloat16", "float16"))
        self.scorers |= {f"head-of:{name}" for name in self.scorers if name.startswith("older:")}
        self.scorers |= {"bos"} if bos_id is not None else set()
        self.scorers |= {"routing"} if self._routing is not None else set()

    def scores(self, scorer: str = "") -> "TokenScores":
        """Log-probs, entropy and noise scale at the trainer's temperature, each float64 (N,)."""
        return self._at((scorer,) if scorer else ()).scores(self._transform(()))

    def alone(self, rows: Sequence[int]) -> np.ndarray:
        """Log-probs of some rows scored one at a time: the clean scorer in another batch shape."""
        scorer = self._load[""]()
        parts = [scorer.forward([self._prompts[row]], [self._responses[row]]) for row in rows]
        self.forwards += len(parts)
        return np.concatenate([states.logp([self._transform(())])[0] for states in parts])

    @property
    def affordable(self) -> int:
        """Tokens that a parameter can be fitted on: those whose logits hold 2^23 numbers, at least 192."""
        return max(192, (1 << 23) // self._at(()).vocab_size)

    def predict(self, hypotheses: Sequence[Sequence[Intervention]], *, tokens: np.ndarray | None = None) -> np.ndarray:
        """Log-probs each hypothesis would have recorded, float64 (K, N); NaN outside `tokens` where they are given."""
        keys = [tuple(sorted({i.scorer for i in hypothesis if i.scorer})) for hypothesis in hypotheses]
        transforms = [self._transform(hypothesis) for hypothesis in hypotheses]
        out = np.empty((len(hypotheses), self._trace.n_tokens))
        for key in set(keys):
            members = [i for i, other in enumerate(keys) if other == key]
            unique = list(dict.fromkeys(transforms[i] for i in members))
            logp = dict(zip(unique, self._at(key).logp(unique, tokens=tokens), strict=True))
            for i in members:
                out[i] = recorded(logp[transforms[i]], hypotheses[i], self._trace)
        return out

    def _transform(self, hypothesis: Sequence[Intervention]) -> SamplingTransform:
        transform = SamplingTransform(temperature=self.trainer_temperature)
        for intervention in hypothesis:
            transform = replace(transform, **intervention.sampling)
        return transform

    def _at(self, key: tuple[str, ...]) -> "HeadStates":
        if key not in self._states:
            self._states[key] = self._new(key)
        return self._states[key]

    def _new(self, key: tuple[str, ...]) -> "HeadStates":
        heads = [name for name in key if name.startswith("head-of:")]
        models = [name for name in key if name in self._load]
        if len(heads) + len(models) > 1:
            raise UnskewError(f"one hypothesis names two models: {heads + models}", exit_code=2)
        if heads:
            body = tuple(name for name in key if name not in heads)
            return self._at(body).under(self._load[heads[0].removeprefix("head-of:")]().head)
        prompts = [self._toggle_bos(ids) for ids in self._prompts] if "bos" in key else self._prompts
        self.forwards += 1
        return self._load[models[0] if models else ""]().forward(
            prompts, self._responses, routed_experts=self._routing if "routing" in key else None
        )

    def _toggle_bos(self, prompt: np.ndarray) -> np.ndarray:
        if not len(prompt) or self._bos_id is None:
            return prompt
        if len(prompt) > 1 and prompt[0] == self._bos_id:
            return prompt[1:]
        return np.concatenate([[self._bos_id], prompt]).astype(np.int64)


def recorded(logp: np.ndarray, hypothesis: Sequence[Intervention], trace: Trace) -> np.ndarray:
    """Log-probs as the hypothesis records them: each `logp` change in the order of its stage, float64 (N,)."""
    for intervention in sorted(hypothesis, key=lambda i: i.stage):
        if intervention.logp is not None:
            logp = intervention.logp(logp, trace)
    return logp
