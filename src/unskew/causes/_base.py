"""An intervention, a cause, and the gap that causes are asked about."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from unskew.score import HEAD_NAMES, Edit, Inputs
from unskew.trace import Trace

__all__ = [
    "CLIP_NATS",
    "Cause",
    "Counterfactual",
    "Facts",
    "Gap",
    "Intervention",
    "Parameter",
    "Reading",
    "mean_and_z",
]

Side = Literal["rollout", "trainer", "record"]
Severity = Literal["info", "warn", "error"]
Parameter = float | int | str

_SCREEN_TOKENS, _SCREEN_ROWS, _SCREEN_SHARE = 128, 3, 1 / 40

CLIP_NATS = 0.5
"""A token's gap counts at most this many nats in a loss: rounding moves a few tokens out of a truncated support."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the model's ids: BOS, padding, those that end a response, the tokenizer; None or () where it is not."""

    bos_id: int | None = None
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    tokenizer: Any = None

    @classmethod
    def of(cls, tokenizer: Any, ends: Iterable[int] = ()) -> "Facts":
        """The facts that a tokenizer holds; none of None. `ends`: further ids that end a response."""
        bos, eos, pad = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
        return cls(bos, pad, tuple(sorted({*ends, *(() if eos is None else (eos,))})), tokenizer)


Rewrite = Callable[[Inputs, Trace, Facts], Inputs]
"""Other inputs of a forward pass than those recorded; a frozen value, since passes are kept by it."""


@dataclass(frozen=True, slots=True)
class Intervention:
    """One named, composable change to how log-probs are computed or recorded.

    The lab plants it, a counterfactual applies it to the clean scorer, a fix is its inverse. Where several are
    composed, `scorer` comes first, then `sampling`, then the `logp` of each in the order of `stage`.

    Args:
        cause: id of the cause it belongs to.
        parameters: what was chosen or fitted, by name.
        scorer: whose weights compute the log-probs: "" the clean scorer's, else a name the counterfactual knows
            ("older:1", "base", "bfloat16"; "of:older:1:lm_head" the clean ones but for those tensors).
        edits: changes to the arithmetic of that model.
        inputs: other inputs than those recorded.
        sampling: fields of `SamplingTransform` that it sets.
        logp: from the log-probs (N,) as computed to the log-probs as recorded.
        sampled: from the rows as the engine sampled them to those that the trainer reads (the lab only).
        rows: from the rows as both sides scored them to the rows as recorded (the lab only).
        stage: order among `logp` changes: 0 values, 1 alignment, 2 placeholders, 3 storage.
    """

    cause: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    scorer: str = ""
    edits: tuple[Edit, ...] = ()
    inputs: Rewrite | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logp: Callable[[np.ndarray, Trace], np.ndarray] | None = None
    sampled: "Callable[[Trace, Facts], Trace] | None" = None
    rows: Callable[[Trace], Trace] | None = None
    stage: int = 0

    @property
    def needs_body(self) -> bool:
        """Whether it takes a forward pass of its own, not only another pass over the logits."""
        own = bool(self.scorer) and not self.scorer.endswith(":head")
        return own or self.inputs is not None or any(edit.name not in HEAD_NAMES for edit in self.edits)


class Counterfactual(Protocol):
    """The clean scorer under interventions."""

    @property
    def trainer_temperature(self) -> float:
        """Temperature that the trainer divides its logits by."""
        ...

    @property
    def scorers(self) -> frozenset[str]:
        """Names of the other scorers it can ask."""
        ...

    @property
    def has_model(self) -> bool:
        """Whether there is a model to score with; without one only `logp` changes can be asked."""
        ...

    @property
    def facts(self) -> Facts:
        """What is known of the model's ids."""
        ...

    def edits(self, name: str) -> bool:
        """Whether this model has a place for an edit."""
        ...

    def tensors(self) -> tuple[str, ...]:
        """Names of the groups of tensors of the model: the embedding, each layer, the head."""
        ...

    @property
    def affordable(self) -> int:
        """Tokens that a parameter can be fitted on: a few hundred where the vocabulary is large."""
        ...

    def probabilities(self, hypothesis: Sequence[Intervention], tokens: np.ndarray) -> np.ndarray:
        """Probability of every id at some tokens (sorted) under a hypothesis, float32 (n, V)."""
        ...

    def predict(self, hypotheses: Sequence[Sequence[Intervention]], *, tokens: np.ndarray | None = None) -> np.ndarray:
        """Log-probs each hypothesis would have recorded, float64 (K, N); NaN outside `tokens` where they are given."""
        ...


@dataclass(frozen=True, eq=False)
class Gap:
    """One side's gap: what was recorded against what the clean scorer predicts under the causes accepted so far.

    Args:
        trace: the usable rows.
        side: whose log-probs `recorded` are; "record" where no scorer can tell the two sides apart.
        recorded: log-probs as recorded, float64 (N,).
        clean: log-probs of the clean scorer, float64 (N,).
        keep: tokens in the loss with finite log-probs on both sides, bool (N,).
        weight: 1 / (expected noise variance), float64 (N,).
        block: number of the block of each token, 0, 1, …: sequences, or pieces of them where there are few; int64 (N,).
        counterfactual: the clean scorer under interventions.
        accepted: causes accepted so far.
        predicted: log-probs under `accepted`, float64 (N,).
        entropy: entropy of the distribution that `clean` is of, float64 (N,), where known.
        uniform: tokens of rows that were kept without looking at reward or gap, bool (N,).
    """

    trace: Trace
    side: Side
    recorded: np.ndarray
    clean: np.ndarray
    keep: np.ndarray
    weight: np.ndarray
    block: np.ndarray
    counterfactual: Counterfactual
    accepted: tuple[Intervention, ...]
    predicted: np.ndarray
    entropy: np.ndarray | None
    uniform: np.ndarray

    @property
    def fit(self) -> np.ndarray:
        """Tokens of the blocks that parameters are fitted on; the others are held out, bool (N,)."""
        return self.block % 2 == 0

    @property
    def residual(self) -> np.ndarray:
        """Recorded − predicted in nats, 0 outside `keep`, float64 (N,).

        A prediction of −inf counts as `CLIP_NATS`; one of NaN (a position that has none) counts nothing.
        """
        with np.errstate(invalid="ignore"):
            gap = np.where(np.isneginf(self.predicted), CLIP_NATS, self.recorded - self.predicted)
        return np.where(self.keep & ~np.isnan(self.predicted), gap, 0.0)

    def loss(self, predicted: np.ndarray) -> np.ndarray:
        """Noise-weighted squared gap of each token, clipped at `CLIP_NATS`, float64 (..., N).

        A prediction of −inf counts as `CLIP_NATS`; one of NaN (a position that has none) counts nothing.
        """
        with np.errstate(invalid="ignore"):
            gap = np.minimum(np.abs(self.recorded - predicted), CLIP_NATS)
        gap = np.where(np.isnan(predicted), 0.0, gap)
        return np.where(self.keep, gap**2 * self.weight, 0.0)

    @cached_property
    def screened(self) -> np.ndarray:
        """Tokens of the loss that a forward pass of their own is spent on first: whole fit sequences of all sizes of loss; sorted."""
        use = self.keep & self.fit
        rows = np.unique(self.trace.row_of_token[use])
        tokens = max(_SCREEN_TOKENS, int(self.keep.sum() * _SCREEN_SHARE))
        count = max(_SCREEN_ROWS, round(len(rows) * min(1.0, tokens / max(int(use.sum()), 1))))
        loss = np.bincount(self.trace.row_of_token, np.where(use, self.loss(self.predicted), 0.0), len(self.trace))[rows]
        rows = rows[np.argsort(loss, kind="stable")]
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int))] if len(rows) else rows
        return np.flatnonzero(use & np.isin(self.trace.row_of_token, rows))

    def some(self, among: np.ndarray) -> np.ndarray:
        """Evenly spaced tokens of the loss among these, sorted, no more than the counterfactual can afford."""
        index = np.flatnonzero(self.keep & among)
        if len(index) <= self.counterfactual.affordable:
            return index
        return index[np.linspace(0, len(index) - 1, self.counterfactual.affordable).astype(int)]

    def under(self, accepted: Sequence[Intervention]) -> "Gap":
        """The gap that is left once these interventions are accepted."""
        accepted = tuple(accepted)
        predicted = self.counterfactual.predict([accepted])[0] if accepted else self.clean
        return replace(self, accepted=accepted, predicted=predicted)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a cause reads off the record alone.

    `drop` marks tokens (N,) that must not enter the figures because of it; `says` is evidence in words, `tokens`
    indices of tokens that show it. `declared`: it follows from declared settings alone and stands only where the gap
    is above its floor. `explained`: share of the loss that it accounts for, where that was measured.
    """

    cause: str
    side: Side
    severity: Severity
    says: tuple[str, ...]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    drop: np.ndarray | None = None
    declared: bool = False
    explained: float | None = None


class Cause:
    """One thing that makes two engines disagree: what it says, how it is screened, planted, tested and fixed.

    A subclass gives the class attributes and any of `intervene`, `propose`, `read`.
    """

    id: ClassVar[str]
    says: ClassVar[str]
    sides: ClassVar[frozenset[Side]]
    kind: ClassVar[Literal["reproduced", "matched", "lint"]] = "reproduced"
    severity: ClassVar[Severity] = "error"
    screens_on: ClassVar[str]
    refute: ClassVar[str]
    remedy: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()
    needs_model: ClassVar[bool] = False
    """Whether `propose` asks for another scorer or sampling transform than the recorded ones."""
    costly: ClassVar[bool] = False
    """Whether `propose` spends forward passes of its own: asked only where cheaper causes leave a gap."""
    symmetric: ClassVar[bool] = False
    """Whether only a model can tell on which side it sits."""
    parameter: ClassVar[str | None] = None
    """The one continuous parameter of `intervene`, fitted over `grid`; None where there is none."""
    grid: ClassVar[Sequence[float]] = ()
    trades_with: ClassVar[frozenset[str]] = frozenset()
    """Causes whose parameter makes up for a wrong value of this one, so that both are fitted together."""
    fitted: ClassVar[int] = 0
    """Parameters that `propose` fits; of two causes that explain a gap equally well, the one with fewer is named."""
    planted: ClassVar[Side | None] = None
    """Side that the lab plants it on; None where the lab cannot plant it."""
    plants_in: ClassVar[str] = "dense"
    """Lab model that it is planted in."""
    plants_on: ClassVar[Literal["prompts", "conversations"]] = "prompts"
    """What the lab samples on: one question, or a question after earlier turns."""

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        """Parameters for the lab, from ranges that were fixed before the search was tuned."""
        return {}

    def switches(self, **parameters: Parameter) -> dict[str, Any]:
        """Settings of the lab's engine that plant it, and "trainer.temperature"; by default those of the intervention."""
        sampling = self.intervene(**parameters).sampling
        return {**sampling, "logprobs_mode": "processed"} if sampling else {}

    def intervene(self, **parameters: Parameter) -> Intervention:
        """The change itself, with its parameters."""
        raise TypeError(f"{self.id} is read off the record and cannot be applied to a scorer: {parameters}")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        """Interventions worth a counterfactual on this gap, continuous parameters fitted."""
        return ()

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        """What the record alone shows of this cause; `facts` say nothing where there is no model."""
        return ()

    def at_floor(self, gap: Gap) -> Iterable[Reading]:
        """What can be wrong although the gap is at its floor."""
        return ()


def mean_and_z(values: np.ndarray, cu_seqlens: np.ndarray, n: int) -> tuple[float, float]:
    """Mean over n tokens and its z from per-sequence sums, which are independent where tokens are not.

    Example:
        >>> mean_and_z(np.array([1.0, 1.0, 2.0, 0.0]), np.array([0, 2, 4]), 4)
        (1.0, inf)
    """
    sums = np.add.reduceat(np.append(values, 0.0), cu_seqlens[:-1])[: len(cu_seqlens) - 1]
    sums = np.where(np.diff(cu_seqlens) > 0, sums, 0.0)
    total, spread = float(sums.sum()), float(sums.std(ddof=1) * math.sqrt(len(sums))) if len(sums) > 1 else math.inf
    if not spread:
        return total / max(n, 1), math.copysign(math.inf, total) if total else 0.0
    return total / max(n, 1), total / spread
