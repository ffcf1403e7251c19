"""From a trace and, where there is one, a model to a verdict."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from unskew.causes import CAUSES, CLIP_NATS, Facts, Gap, Intervention, Reading
from unskew.diagnose._counterfactual import ModelCounterfactual, RecordCounterfactual
from unskew.diagnose._floor import ABOVE, FEW_TOKENS, SEARCH, SideFloor, dtype_name, logit_noise, side_floor
from unskew.diagnose._noise import MeasuredNoise, TableNoise
from unskew.diagnose._search import alike, search, shapley
from unskew.diagnose._verdict import Verdict
from unskew.diagnose._words import write_verdict
from unskew.measure import MismatchState
from unskew.score import Edit
from unskew.trace import Trace, lint, usable

if TYPE_CHECKING:
    from unskew.score import HFScorer

__all__ = ["Findings", "SideResult", "diagnose", "override"]

UNRELATED = 0.5
"""Correlation of recorded with predicted probabilities below which a stream is not of this model."""

Scorers = Mapping[str, "Callable[[], HFScorer]"]


@dataclass(frozen=True, eq=False)
class SideResult:
    """One side after the search: the gap under its causes, its floor, and the noise that is left.

    `sign` is +1 where the recorded stream is the rollout's, −1 where it is the trainer's; `before` and `left` are σ̂ in
    nats, `tail` the robust σ̂ of what is left (equal to it for light tails), `correlation` that of the recorded with the
    predicted probabilities (NaN where one of them does not vary), `rivals` by cause the ids that the data cannot tell it from.
    """

    gap: Gap
    sign: int
    floor: SideFloor
    before: float
    left: float
    tail: float
    correlation: float
    dtype_noise: Mapping[str, float]
    rivals: Mapping[str, tuple[str, ...]]

    @property
    def at_floor(self) -> bool:
        """Whether what is left is within the range of the floor."""
        return not self.left > ABOVE * self.floor.sigma

    @property
    def unrelated(self) -> bool:
        """Whether more of what was recorded is not of this model than is: then no cause on it stands."""
        return self.gap.side != "record" and not self.at_floor and self.correlation < UNRELATED


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything that a verdict is written from.

    `shares` (K,), `intervals` (K, 2) belong to `interventions` = (side, intervention) in the same order; `floor_share`
    is the part of the gap within the floor. `notes` are what could not be checked: {"what", "why", "next"}.
    """

    trace: Trace
    sides: tuple[SideResult, ...]
    rollout: np.ndarray
    trainer: np.ndarray
    keep: np.ndarray
    noise_scale: np.ndarray
    interventions: tuple[tuple[str, Intervention], ...]
    shares: np.ndarray
    intervals: np.ndarray
    readings: tuple[Reading, ...]
    state: MismatchState
    notes: tuple[Mapping[str, str], ...]
    with_model: bool
    n_excluded: int
    cost: Mapping[str, Any]

    @cached_property
    def gap_noise(self) -> float:
        """σ̂ of the whole gap, nats."""
        d = np.where(self.keep, self.trainer - self.rollout, 0.0)
        return logit_noise(d[self.keep], self.noise_scale[self.keep])

    @property
    def floor_noise(self) -> float:
        """Floor of the whole gap: each side's, added, nats."""
        return sum(side.floor.sigma for side in self.sides)

    @property
    def unrelated(self) -> bool:
        """Whether this model predicts neither side, so that nothing can be said of them."""
        return all(side.unrelated for side in self.sides)

    def shared(self, k: int) -> bool:
        """Whether intervention k is on both sides alike, so that engine and trainer agree and only the model given differs."""
        side, intervention = self.interventions[k]
        twins = [other for name, other in self.interventions if name != side and other.cause == intervention.cause]
        of_model = CAUSES[intervention.cause].needs_model
        return self.at_floor and of_model and any(alike(intervention, twin) for twin in twins)

    @property
    def at_floor(self) -> bool:
        """Whether the whole gap is within the range of the floor."""
        return not self.gap_noise > ABOVE * self.floor_noise


def diagnose(
    trace: Trace,
    scorers: Scorers | None = None,
    *,
    bos_id: int | None = None,
    decode: Callable[[int], str] | None = None,
    framework: str | None = None,
    max_tokens: int = 8192,
) -> Verdict:
    """Whether engine and trainer disagree above the noise floor, why, and what to change.

    Args:
        trace: rows as recorded; rows that fail lint are counted and left out.
        scorers: from a name to a function that loads it: "" the model in fp32, "bfloat16" and "float16" the same
            model in that dtype, "older:1", … older checkpoints, newest first, "base" without the adapter. None: the
            record alone is read, and `old_logp` stands for the clean scorer.
        bos_id: id of BOS, to test a BOS too many or missing.
        decode: token id to text, for evidence.
        framework: whose settings the fixes name; None for all known.
        max_tokens: tokens used at most; whole sequences are drawn evenly from the trace.

    Raises:
        UnskewError: no usable row, or neither a model nor `old_logp`.
    """
    started = time.perf_counter()
    found = _find(trace, scorers, bos_id=bos_id, max_tokens=max_tokens)
    return write_verdict(found, decode=decode, framework=framework, seconds=time.perf_counter() - started)


def override(trace: Trace, facts: Mapping[str, Any]) -> Trace:
    """The trace with declared facts replaced, such as {"trainer.temperature": 1.0}."""
    for name, value in facts.items():
        group, key = name.split(".", 1)
        trace = trace.with_rows(**{group: [{**(old or {}), key: value} for old in trace.rows(group)]})
    return trace


def _find(trace: Trace, scorers: Scorers | None, *, bos_id: int | None, max_tokens: int) -> Findings:
    total = len(trace)
    malformed = lint(trace).malformed
    trace = usable(trace)[0] if malformed.all() else trace.select(~malformed)
    clean = scorers[""]() if scorers else None
    facts = Facts.of(clean.tokenizer, clean.eos_ids) if clean else Facts()
    facts = facts if bos_id is None else replace(facts, bos_id=bos_id)
    readings = [reading for cause in CAUSES.values() for reading in cause.read(trace, facts)]
    dropped = np.zeros(trace.n_tokens, bool)
    for reading in readings:
        if reading.drop is not None:
            dropped |= reading.drop
    if dropped.any():
        trace = trace.with_tokens(mask=trace.mask & ~dropped)
    trace, _ = usable(trace)
    if not scorers and not trace.has("old_logp"):
        raise _needs_trainer(trace)
    notes: list[Mapping[str, str]] = []
    trace, temperature = _one_temperature(trace, notes)
    n_usable = len(trace)
    trace = _plan(trace, max_tokens)
    streams = _with_model(trace, scorers, facts, temperature) if scorers else _record_alone(trace)
    rollout, trainer, clean = streams.rollout, streams.trainer, streams.clean
    keep = trace.mask & np.isfinite(rollout) & np.isfinite(trainer) & np.isfinite(clean)
    # Rounding noise grows as the noise scale, down to a twentieth of a nat's worth where a token is certain.
    gap = Gap(
        trace=trace, side="rollout" if scorers else "record", recorded=rollout, clean=clean, keep=keep,
        weight=1.0 / (streams.noise_scale**2 + 0.05**2), block=_blocks(trace, keep), counterfactual=streams.counterfactual, accepted=(), predicted=clean,
        entropy=streams.entropy, uniform=_uniform(trace)[trace.row_of_token],
    )  # fmt: skip
    sides = [_side(gap, streams, sign=1)]
    if scorers and trace.has("old_logp"):
        sides.append(_side(replace(gap, side="trainer", recorded=trainer), streams, sign=-1))
    elif not scorers and not sides[0].at_floor:
        back = replace(
            gap, recorded=trainer, clean=rollout, predicted=rollout, counterfactual=RecordCounterfactual(trace, rollout)
        )
        sides = [min(sides[0], _side(back, streams, sign=-1), key=lambda side: side.left)]
    shares, intervals = _shares(sides, trainer - rollout, gap)
    found = Findings(
        trace=trace, sides=tuple(sides), rollout=rollout, trainer=trainer, keep=keep, noise_scale=streams.noise_scale,
        interventions=tuple((side.gap.side, i) for side in sides for i in side.gap.accepted), shares=shares, intervals=intervals,
        readings=(), notes=tuple(notes), with_model=bool(scorers), n_excluded=total - n_usable,
        state=MismatchState.from_packed(
            rollout, trainer, mask=keep, cu_seqlens=trace.cu_seqlens, entropy=streams.entropy, noise_scale=streams.noise_scale
        ),
        cost={"forward_passes": streams.counterfactual.forwards, "tokens": trace.n_tokens},
    )  # fmt: skip
    return replace(found, readings=tuple(_keep_readings(found, readings)))


@dataclass(frozen=True, eq=False)
class _Streams:
    """What the sides are compared by: all float64 (N,)."""

    rollout: np.ndarray
    trainer: np.ndarray
    clean: np.ndarray
    entropy: np.ndarray | None
    noise_scale: np.ndarray
    counterfactual: ModelCounterfactual | RecordCounterfactual
    noise: MeasuredNoise | TableNoise


def _with_model(trace: Trace, scorers: Scorers, facts: Facts, temperature: float) -> _Streams:
    counterfactual = ModelCounterfactual(trace, scorers, facts=facts, trainer_temperature=temperature)
    scores = counterfactual.scores()
    trainer = _column(trace, "old_logp") if trace.has("old_logp") else scores.logp
    noise = MeasuredNoise(counterfactual, scores.logp, scores.noise_scale, trace)
    return _Streams(
        _column(trace, "rollout_logp"), trainer, scores.logp, scores.entropy, scores.noise_scale, counterfactual, noise
    )


def _record_alone(trace: Trace) -> _Streams:
    old = _column(trace, "old_logp")
    scale = _column(trace, "noise_scale") if trace.has("noise_scale") else -np.expm1(np.minimum(old, 0.0)) * 1.2
    entropy = _column(trace, "entropy") if trace.has("entropy") else None
    return _Streams(_column(trace, "rollout_logp"), old, old, entropy, scale, RecordCounterfactual(trace, old), TableNoise())


def _column(trace: Trace, name: str) -> np.ndarray:
    return trace.tokens(name).astype(np.float64)


def _keep_readings(found: Findings, readings: Sequence[Reading]) -> list[Reading]:
    """Readings that stand: a counterfactual overrules the record where it could ask, and a floor silences a gap's."""
    accepted = {intervention.cause for _, intervention in found.interventions}
    kept = []
    for reading in readings:
        asked = found.with_model and CAUSES[reading.cause].needs_model and reading.severity != "info"
        if reading.cause in accepted or asked or (reading.declared and found.at_floor):
            continue
        kept.append(reading)
    if found.at_floor and not accepted and not found.unrelated:
        kept += [reading for cause in CAUSES.values() for reading in cause.at_floor(found.sides[0].gap)]
    return kept


def _side(gap: Gap, streams: _Streams, *, sign: int) -> SideResult:
    groups = {"rollout": ("source",), "trainer": ("trainer",), "record": ("source", "trainer")}[gap.side]
    declared = [_one(gap.trace.setting(name, "dtype")) for name in groups]
    use, scale, noise = gap.keep, streams.noise_scale, streams.noise

    def left(gap: Gap) -> float:
        return logit_noise(gap.residual[use], scale[use])

    known = [dtype_name(dtype) for dtype in declared]
    limit = SEARCH * sum(noise.of(dtype or "float32") for dtype in known)
    own: dict[frozenset[Edit], float] = {frozenset(): 0.0}

    def rounding(gap: Gap) -> frozenset[Edit]:
        return frozenset(edit for i in gap.accepted for edit in i.edits if edit.rounds)

    def at_floor(gap: Gap) -> bool:
        now = left(gap)
        if now > limit and rounding(gap) not in own:
            own[rounding(gap)] = noise.under(gap.accepted)
        return not now > max(limit, SEARCH * own.get(rounding(gap), 0.0))

    before, rivals = left(gap), {}
    if np.count_nonzero(use) >= FEW_TOKENS:
        gap, rivals = search(gap, at_floor)
    after = left(gap)
    measured = noise.measured(after, known)
    floors = [side_floor(dtype, measured, after) for dtype in declared]
    sigma = max(sum(floor.sigma for floor in floors), own.get(rounding(gap), 0.0))
    floor = replace(max(floors, key=lambda floor: floor.sigma), sigma=sigma)
    significant = use & (scale > 0.05)
    ratio = gap.residual[significant] / scale[significant]
    tail = float(np.median(np.abs(ratio)) * 1.4826) if len(ratio) else float("nan")
    correlation = _correlation(np.exp(gap.recorded[use]), np.exp(gap.predicted[use]))
    side = SideResult(gap, sign, floor, before, after, tail, correlation, measured, rivals)
    return replace(side, gap=gap.under(()), left=before) if side.unrelated else side


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.any() or not np.ptp(x[finite]) or not np.ptp(y[finite]):
        return float("nan")
    return float(np.corrcoef(x[finite], y[finite])[0, 1])


def _shares(sides: Sequence[SideResult], d: np.ndarray, gap: Gap) -> tuple[np.ndarray, np.ndarray]:
    """Shapley share of each accepted intervention in the held-out, noise-weighted d², with a 95 % interval (K, 2)."""
    owners = [(s, i) for s, side in enumerate(sides) for i in range(len(side.gap.accepted))]
    if not owners:
        return np.zeros(0), np.zeros((0, 2))
    use = gap.keep & ~gap.fit
    block, weight = gap.block, gap.weight
    moves: list[dict[frozenset[int], np.ndarray]] = []
    for side in sides:
        subsets = list(
            chain.from_iterable(combinations(range(len(side.gap.accepted)), k) for k in range(len(side.gap.accepted) + 1))
        )
        predicted = side.gap.counterfactual.predict([[side.gap.accepted[k] for k in subset] for subset in subsets])
        moves.append({frozenset(c): side.sign * (p - side.gap.clean) for c, p in zip(subsets, predicted, strict=True)})

    def losses(coalition: frozenset[int]) -> np.ndarray:
        left = d
        for s, move in enumerate(moves):
            left = left + move[frozenset(owners[k][1] for k in coalition if owners[k][0] == s)]
        clipped = np.where(np.isnan(left), 0.0, np.minimum(np.abs(left), CLIP_NATS))
        return np.bincount(block, np.where(use, clipped**2 * weight, 0.0))

    players = range(len(owners))
    coalitions = [frozenset(c) for c in chain.from_iterable(combinations(players, k) for k in range(len(owners) + 1))]
    table = {coalition: losses(coalition) for coalition in coalitions}
    blocks = np.flatnonzero(np.bincount(block, use))
    draws = np.random.default_rng(0).choice(blocks, (400, len(blocks)))
    totals = {c: np.concatenate([[loss[blocks].sum()], loss[draws].sum(axis=1)]) for c, loss in table.items()}
    bare = np.maximum(totals[frozenset()], 1e-300)
    values = {c: 1.0 - total / bare for c, total in totals.items()}
    shares = shapley(values, len(owners))
    return shares[:, 0], np.quantile(shares[:, 1:], (0.025, 0.975), axis=1).T


def _blocks(trace: Trace, keep: np.ndarray) -> np.ndarray:
    """The sequences, or where fewer than 8 hold tokens of the loss their runs of 8 positions; int64 (N,).

    Numbered at random: rows that alternate between two kinds must not all be fitted on, or all be held out.
    """
    key = trace.row_of_token.astype(np.int64)
    if len(np.unique(key[keep])) < 8:
        key = (key << 32) + trace.position // 8
    known = np.unique(key[keep])
    order = np.random.default_rng(0).permutation(len(known))
    return np.append(order, len(known))[np.searchsorted(known, key)]


def _one(values: Sequence[Any]) -> Any:
    """The one declared value; None where none or several are."""
    declared = {value for value in values if value is not None}
    return declared.pop() if len(declared) == 1 else None


def _one_temperature(trace: Trace, notes: list[Mapping[str, str]]) -> tuple[Trace, float]:
    """Rows of the most frequent trainer temperature, and that temperature."""
    sampled = [value or 1.0 for value in trace.setting("sampling", "temperature")]
    declared = [value or other for value, other in zip(trace.setting("trainer", "temperature"), sampled, strict=True)]
    temperature, count = Counter(declared).most_common(1)[0]
    if count < len(trace):
        notes.append({
            "what": f"{len(trace) - count} rows at other trainer temperatures than {temperature:g}",
            "why": "one diagnosis scores at one temperature",
            "next": "diagnose them as a trace of their own",
        })  # fmt: skip
        trace = trace.select(np.asarray(declared) == temperature)
    return trace, float(temperature)


def _plan(trace: Trace, max_tokens: int) -> Trace:
    """Whole sequences drawn evenly, in trace order, up to `max_tokens`."""
    if trace.n_tokens <= max_tokens:
        return trace
    order = np.random.default_rng(0).permutation(len(trace))
    count = max(2, int(np.searchsorted(np.cumsum(trace.lengths[order]), max_tokens, side="right")))
    return trace.select(np.sort(order[:count]))


def _uniform(trace: Trace) -> np.ndarray:
    selection, sampled = trace.rows("selection"), trace.rows("sampled")
    return np.array([s in (None, "none", "unknown") and w != "worst" for s, w in zip(selection, sampled, strict=True)], bool)


def _needs_trainer(trace: Trace) -> Exception:
    from unskew._errors import UnskewError

    return UnskewError(
        f"{trace.path}: there is no old_logp and no model, so nothing to compare rollout_logp with",
        hint="give --model DIR (the checkpoint that sampled), or record old_logp",
    )
