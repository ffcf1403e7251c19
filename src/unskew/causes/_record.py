"""Record causes: the numbers are right and stand in the wrong place."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unskew.causes._base import CLIP_NATS, Cause, Facts, Gap, Intervention, Parameter, Reading, Side
from unskew.score import Inputs
from unskew.trace import Trace

__all__ = ["ChunkBoundary", "FilledLogp", "LogpUnit", "RowOrder", "RowPairing", "Shift", "SyntheticEos", "WrongToken", "shift"]

_ANY: frozenset[Side] = frozenset({"rollout", "trainer", "record"})
_UNITS = {"bits": 1 / np.log(2), "base 10": 1 / np.log(10)}
_PAIRINGS, _PAIRING_TOKENS = 64, 24
"""Rows whose prompts are tried, nearest first, and tokens that they are tried on."""


class Shift(Cause):
    """Log-probs off by a constant number of positions (methods 10)."""

    id = "record.shift"
    says = "one side's log-probs stand at other positions than their tokens"
    sides = _ANY
    screens_on = "correlation of the two streams is near 0 at lag 0 and near 1 at another lag"
    refute = "no lag other than 0 raises the correlation"
    remedy = "align log-probs with the tokens they predict: logits at position t − 1 score token t"
    settings = ()
    symmetric = True
    planted = "trainer"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"lag": int(rng.choice([-1, 1]))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        lag = int(parameters["lag"])
        return Intervention(self.id, {"lag": lag}, logp=lambda logp, trace: shift(logp, trace.cu_seqlens, lag), stage=1)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        best = min((lag for lag in range(-3, 4) if lag), key=lambda lag: self._distance(gap, lag))
        if self._distance(gap, best) < 0.7 * self._distance(gap, 0):
            yield self.intervene(lag=best)

    @staticmethod
    def _distance(gap: Gap, lag: int) -> float:
        moved = shift(gap.predicted, gap.trace.cu_seqlens, lag)
        use = gap.keep & np.isfinite(moved)
        return float(np.minimum(np.abs(gap.recorded[use] - moved[use]), 5.0).mean()) if use.any() else np.inf


class SyntheticEos(Cause):
    """A last token that the policy did not sample, with a placeholder log-prob (methods 15)."""

    id = "record.synthetic-eos"
    says = "the last token of the responses was appended by the framework, not sampled, and its log-prob is a placeholder"
    sides = _ANY
    screens_on = "the gap sits on the last token, where the recorded value is the same constant in every row"
    refute = "the last tokens' recorded log-probs vary from row to row"
    remedy = "leave appended EOS tokens out of the loss mask (segment 5, forced)"
    settings = ()
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"value": 0.0}

    def intervene(self, **parameters: Parameter) -> Intervention:
        value = float(parameters["value"])

        def fill(logp: np.ndarray, trace: Trace) -> np.ndarray:
            return _with(logp, trace.cu_seqlens[1:][trace.lengths > 0] - 1, value)

        return Intervention(self.id, {"value": value}, logp=fill, sampled=_with_eos, stage=2)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        last = gap.trace.cu_seqlens[1:][gap.trace.lengths > 0] - 1
        last = last[gap.keep[last]]
        value, share = _mode(gap.recorded[last])
        wrong = np.abs(gap.residual[last]) >= CLIP_NATS
        if share > 0.9 and len(last) > 1 and wrong.mean() > 0.2:
            yield self.intervene(value=value)


class FilledLogp(Cause):
    """Placeholders among the log-probs (methods 9)."""

    id = "record.filled-logp"
    says = "some log-probs are placeholders (one constant, −inf or NaN), not numbers the engine computed"
    sides = _ANY
    screens_on = "one value repeats exactly at tokens where the other side is far from it"
    refute = "the repeated value agrees with the other side's log-probs"
    remedy = "request the log-prob of every sampled token; fail instead of filling a missing one"
    settings = ("rollout.logprobs",)
    fitted = 2
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"value": 0.0, "every": int(rng.integers(5, 25))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        value, every = float(parameters["value"]), int(parameters.get("every", 0))
        if every:
            return Intervention(
                self.id,
                {"value": value},
                logp=lambda logp, trace: _with(logp, slice(None, None, every), value),
                stage=2,
            )
        raise TypeError("record.filled-logp is planted with `every`; a gap proposes where the placeholders stand")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        wrong = gap.keep & (np.abs(gap.residual) >= CLIP_NATS)
        value, _ = _mode(gap.recorded[wrong])
        where = gap.keep & (gap.recorded == value)
        ends = np.zeros(len(where), bool)
        ends[gap.trace.cu_seqlens[1:][gap.trace.lengths > 0] - 1] = True
        found = where & wrong
        if found.sum() >= 3 and found.sum() > 0.3 * where.sum() and (found & ~ends).sum() > 0.2 * found.sum():
            yield Intervention(
                self.id, {"value": value, "share": round(float(where.mean()), 5)},
                logp=lambda logp, _: np.where(where, value, logp), stage=2,
            )  # fmt: skip

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        sides: tuple[tuple[str, Side], ...] = (("rollout_logp", "rollout"), ("old_logp", "trainer"))
        for column, side in sides:
            if not trace.has(column):
                continue
            values = trace.tokens(column)
            bad = trace.mask & (~np.isfinite(values) | (values <= -999))
            if bad.any():
                kinds = {
                    "NaN": np.isnan(values),
                    "inf": np.isinf(values),
                    "≤ −999": np.isfinite(values) & (values <= -999),
                }
                counts = ", ".join(f"{int((bad & kind).sum())} × {name}" for name, kind in kinds.items() if (bad & kind).any())
                share = float(bad.sum() / max(trace.mask.sum(), 1))
                yield Reading(
                    self.id, side, "error", (f"{column}: {counts} among {int(trace.mask.sum())} tokens of the loss",),
                    {"share": round(share, 5)}, np.flatnonzero(bad), bad,
                )  # fmt: skip


class RowOrder(Cause):
    """Rows permuted between the two passes (methods 21)."""

    id = "record.row-order"
    says = "rows were permuted between the two passes: a row matches another row's log-probs, not its own"
    sides = _ANY
    screens_on = "each row is nearest to another row of the batch, and those form a permutation"
    refute = "every row is nearest to its own partner"
    remedy = "undo the sort of dynamic batching before joining log-probs to rows; join by id, not by position"
    settings = ("trainer.dynamic_batch",)
    symmetric = True
    fitted = 2
    planted = "trainer"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"step": int(rng.integers(1, 6))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        step = int(parameters["step"])

        def permute(logp: np.ndarray, trace: Trace) -> np.ndarray:
            return _take_rows(logp, trace.cu_seqlens, np.roll(np.arange(len(trace)), step))

        return Intervention(self.id, {"step": step}, logp=permute, stage=1)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        n = min(len(gap.trace), 256)
        if n < 3:
            return
        own = _row_distance(gap, np.arange(n), np.arange(n))
        if np.nanmedian(own) < 0.05:
            return
        distance = np.stack([_row_distance(gap, np.arange(n), np.full(n, row)) for row in range(n)], axis=1)
        best = np.nanargmin(np.where(np.isnan(distance), np.inf, distance), axis=1)
        moved = best != np.arange(n)
        if (
            moved.mean() < 0.3
            or len(np.unique(best)) < 0.9 * n
            or np.median(distance[np.arange(n), best]) > 0.3 * np.nanmedian(own)
        ):
            return
        order = np.concatenate([best, np.arange(n, len(gap.trace))])
        yield Intervention(
            self.id, {"rows_moved": int(moved.sum())},
            logp=lambda logp, trace: _take_rows(logp, trace.cu_seqlens, order), stage=1,
        )  # fmt: skip


class WrongToken(Cause):
    """The log-prob of the likeliest token instead of the sampled one."""

    id = "record.wrong-token-logp"
    says = "the recorded log-probs are those of the likeliest token, not of the sampled one"
    sides = _ANY
    screens_on = "recorded log-probs exceed the clean ones wherever another token than the likeliest was sampled"
    refute = "a recorded log-prob below that of the likeliest token"
    remedy = "look the sampled token's id up among the returned log-probs; the first entry is the likeliest one"
    settings = ("rollout.logprobs",)
    needs_model = True
    planted = "rollout"

    def switches(self, **parameters: Parameter) -> dict[str, Any]:
        return {}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, sampling={"likeliest": True})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        yield self.intervene()


class LogpUnit(Cause):
    """Log-probs in another unit: base 2 or 10, another sign (methods 22)."""

    id = "record.logp-unit"
    says = "one side's log-probs are in another unit than nats: another base, another sign, or probabilities"
    sides = _ANY
    screens_on = "the gap is in proportion to the log-prob, with no intercept"
    refute = "recorded log-probs divided by the factor differ from the clean scorer's"
    remedy = "use the natural logarithm, keep its sign, and do not exponentiate"
    settings = ()
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"unit": str(rng.choice(["bits", "base 10"]))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        factor = _UNITS[str(parameters["unit"])]
        return Intervention(self.id, dict(parameters), logp=lambda logp, _: logp * factor)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        use = gap.keep & np.isfinite(gap.predicted)
        recorded, predicted = gap.recorded[use], gap.predicted[use]
        if (predicted**2).sum() > 0:
            slope = float((recorded * predicted).sum() / (predicted**2).sum())
            for unit, factor in _UNITS.items():
                if abs(slope - factor) < 0.1 * abs(factor):
                    yield self.intervene(unit=unit)


class ChunkBoundary(Cause):
    """Wrong log-probs at one residue of a fixed period of positions."""

    id = "record.chunk-boundary"
    says = "log-probs are wrong at a fixed period of positions: labels were rolled inside each chunk of a split sequence"
    sides = _ANY
    screens_on = (
        "tokens with a large gap stand at one residue of the position modulo a period, and nearly all tokens there are wrong"
    )
    refute = "tokens at the boundaries agree, or large gaps stand elsewhere too"
    remedy = "roll the labels before the sequence is split over ranks, or exchange the token at the boundary"
    settings = ("trainer.context_parallel",)
    symmetric = True
    fitted = 2
    planted = "trainer"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"period": int(rng.choice([8, 16, 32])), "offset": 0}

    def intervene(self, **parameters: Parameter) -> Intervention:
        period, offset = int(parameters["period"]), int(parameters["offset"])

        def rolled(logp: np.ndarray, trace: Trace) -> np.ndarray:
            at = np.flatnonzero(_absolute(trace) % period == offset)
            return _with(logp, at, logp[np.maximum(at - period, 0)] - 1.0)

        return Intervention(self.id, dict(parameters), logp=rolled, stage=1)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        size = np.abs(gap.residual)
        wrong = gap.keep & (size > max(0.05, 10 * float(np.median(size[gap.keep]))) if gap.keep.any() else gap.keep)
        if not 3 <= wrong.sum() < 0.3 * gap.keep.sum():
            return
        for position in (_absolute(gap.trace), gap.trace.position):
            for period in range(int(position.max()) // 2, 3, -1):
                bad = np.bincount(position[wrong] % period, minlength=period)
                offset = int(np.argmax(bad))
                here = gap.keep & (position % period == offset)
                if bad[offset] > 0.8 * wrong.sum() and wrong[here].mean() > 0.8 and len(np.unique(position[here & wrong])) > 1:
                    yield Intervention(
                        self.id, {"period": period, "offset": offset}, stage=1,
                        logp=lambda logp, _, here=here: np.where(here, np.nan, logp),
                    )  # fmt: skip
                    return


class RowPairing(Cause):
    """Responses scored under other rows' prompts."""

    id = "record.row-pairing"
    says = "responses were scored under another row's prompt"
    sides = _ANY
    screens_on = "a large gap that is largest at the first tokens; another row's prompt reproduces the recorded log-probs"
    refute = "no other row's prompt brings the clean scorer nearer to the recorded log-probs"
    remedy = "join prompts and responses by id; repeat prompts in the order in which the engine returns its samples"
    settings = ("trainer.dynamic_batch",)
    needs_model = True
    costly = True
    fitted = 1
    planted = "trainer"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"step": int(rng.integers(1, 6))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, dict(parameters), inputs=_Paired(int(parameters["step"])))

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        n = len(gap.trace)
        tokens = gap.screened
        if n < 3 or not len(tokens) or np.abs(gap.residual[tokens]).mean() < 0.05:
            return
        first = tokens[gap.trace.row_of_token[tokens] == gap.trace.row_of_token[tokens[0]]][:_PAIRING_TOKENS]
        steps = sorted(range(1, n), key=lambda step: min(step, n - step))[:_PAIRINGS]
        pairs = [self.intervene(step=step) for step in steps]
        losses = gap.loss(gap.counterfactual.predict([(*gap.accepted, pair) for pair in pairs], tokens=first))[:, first].sum(
            axis=1
        )
        if losses.min() < 0.5 * gap.loss(gap.predicted)[first].sum():
            yield pairs[int(np.argmin(losses))]


@dataclass(frozen=True, slots=True)
class _Paired:
    """Prompts rolled over the rows."""

    step: int

    def __call__(self, inputs: Inputs, _: Trace, __: Facts) -> Inputs:
        n = len(inputs.prompts)
        return replace(inputs, prompts=[inputs.prompts[(row - self.step) % n] for row in range(n)])


def shift(values: np.ndarray, cu_seqlens: np.ndarray, lag: int) -> np.ndarray:
    """Each token gets the value `lag` positions later in its sequence; NaN where there is none. Shape (N,).

    Example:
        >>> shift(np.array([1.0, 2.0, 3.0]), np.array([0, 3]), 1).tolist()
        [2.0, 3.0, nan]
    """
    index = np.arange(len(values)) + lag
    row = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    inside = (index >= cu_seqlens[row]) & (index < cu_seqlens[row + 1])
    return np.where(inside, values[np.clip(index, 0, max(len(values) - 1, 0))], np.nan)


def _with(values: np.ndarray, where: np.ndarray | slice, value: float | np.ndarray) -> np.ndarray:
    out = values.copy()
    out[where] = value
    return out


def _mode(values: np.ndarray) -> tuple[float, float]:
    """The most frequent exact value and its share; (nan, 0) of nothing."""
    if not len(values):
        return float("nan"), 0.0
    unique, counts = np.unique(values, return_counts=True)
    top = int(np.argmax(counts))
    return float(unique[top]), float(counts[top] / len(values))


def _take_rows(logp: np.ndarray, cu_seqlens: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Row i gets the values of row order[i], cut to its length, padded with 0."""
    out = np.zeros_like(logp)
    for row, other in enumerate(order):
        n = min(np.diff(cu_seqlens)[[row, other]])
        out[cu_seqlens[row] : cu_seqlens[row] + n] = logp[cu_seqlens[other] : cu_seqlens[other] + n]
    return out


def _row_distance(gap: Gap, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Mean |recorded of a row − predicted of another| over their common length, clipped at 5 nats."""
    cu, out = gap.trace.cu_seqlens, np.full(len(rows), np.nan)
    for i, (row, other) in enumerate(zip(rows, others, strict=True)):
        n = int(min(cu[row + 1] - cu[row], cu[other + 1] - cu[other]))
        a, b = slice(cu[row], cu[row] + n), slice(cu[other], cu[other] + n)
        use = gap.keep[a]
        if use.any():
            out[i] = np.minimum(np.abs(gap.recorded[a][use] - gap.predicted[b][use]), 5.0).mean()
    return out


def _with_eos(trace: Trace, facts: Facts) -> Trace:
    """Rows with one EOS more that nobody sampled."""
    rows = trace.table.to_pylist()
    for row in rows:
        row["response_ids"] = [*row["response_ids"], facts.eos_ids[0]]
        row["rollout_logp"] = [*row["rollout_logp"], 0.0]
    return Trace.from_rows(rows, path=trace.path)


def _absolute(trace: Trace) -> np.ndarray:
    """Position of each token in prompt and response, int64 (N,)."""
    start = (
        np.array([len(context) for context in trace.contexts()], np.int64)
        if trace.has("prompt_ids")
        else np.zeros(len(trace), np.int64)
    )
    return trace.position + start[trace.row_of_token]
