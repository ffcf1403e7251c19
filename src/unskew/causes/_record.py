"""Record causes: the numbers are right and stand in the wrong place."""

from collections.abc import Iterable

import numpy as np

from unskew.causes._base import CLIP_NATS, Cause, Facts, Gap, Intervention, Parameter, Reading, Side
from unskew.trace import SEGMENT_PROMPT, Trace

__all__ = ["FilledLogp", "PromptInMask", "Retokenized", "RowOrder", "Shift", "SyntheticEos", "shift"]

_ANY: frozenset[Side] = frozenset({"rollout", "trainer", "record"})


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


class PromptInMask(Cause):
    """The loss mask covers the prompt (methods 11)."""

    id = "record.prompt-in-mask"
    says = "the loss mask covers prompt tokens, which the policy did not sample"
    sides = frozenset({"record"})
    kind = "lint"
    screens_on = "masked tokens of segment 0, or responses that begin with their own prompt inside the mask"
    refute = "no token of the mask belongs to the prompt"
    remedy = "cut the mask to the sampled tokens (segment 1)"
    settings = ()
    planted = "record"

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, rows=_prompt_into_response)

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        if trace.has("segment_ids"):
            bad = trace.mask & (trace.tokens("segment_ids") == SEGMENT_PROMPT)
            how = "their segment is 0 (prompt)"
        elif trace.has("prompt_ids"):
            bad = np.zeros(trace.n_tokens, bool)
            ids = trace.tokens("response_ids")
            for start, stop, prompt in zip(trace.cu_seqlens[:-1], trace.cu_seqlens[1:], trace.ragged("prompt_ids"), strict=True):
                if 1 < len(prompt) <= stop - start and np.array_equal(ids[start : start + len(prompt)], prompt):
                    bad[start : start + len(prompt)] = trace.mask[start : start + len(prompt)]
            how = "the response begins with its own prompt"
        else:
            return
        rows = np.unique(trace.row_of_token[bad])
        if len(rows) > 0.1 * len(trace):
            yield Reading(
                self.id, "record", "error",
                (f"{int(bad.sum())} of {int(trace.mask.sum())} masked tokens in {len(rows)} rows are prompt: {how}",),
                {"tokens": int(bad.sum())}, np.flatnonzero(bad), bad,
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


class Retokenized(Cause):
    """Ids differ from the sampled ids, same text (methods 17)."""

    id = "record.retokenized"
    says = "the trainer scored other token ids than the engine sampled: exact up to a point in each row, wrong from there"
    sides = frozenset({"record"})
    kind = "lint"
    screens_on = "in each row |d| is at its floor before an onset and far above it from there on; onsets differ by row"
    refute = "tokens before and after the onset differ alike"
    remedy = "pass token ids from the engine to the trainer; never decode and encode again"
    settings = ("rollout.return_token_ids",)

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        if not (trace.has("old_logp") and trace.has("rollout_logp")):
            return
        gap = np.abs(trace.tokens("old_logp").astype(np.float64) - trace.tokens("rollout_logp"))
        wrong = trace.mask & (gap > 0.02)
        onsets, clean_before = [], []
        for start, stop in zip(trace.cu_seqlens[:-1], trace.cu_seqlens[1:], strict=True):
            hits = np.flatnonzero(wrong[start:stop])
            after = stop - start - (hits[0] if len(hits) else 0)
            if len(hits) > 2 and hits[0] > 2 and after > 4 and len(hits) > 0.3 * after:
                onsets.append(int(hits[0]))
                clean_before.append(float(gap[start : start + hits[0]].max()))
        if len(onsets) > 0.5 * len(trace) and len(set(onsets)) > 2 and np.median(clean_before) < 1e-3:
            first = trace.cu_seqlens[:-1][: len(onsets)] + np.asarray(onsets)
            yield Reading(
                self.id, "record", "error",
                (f"{len(onsets)} of {len(trace)} rows agree within {max(clean_before):.1g} nat up to an onset at tokens "
                 f"{min(onsets)}–{max(onsets)} and disagree from there",),
                {"onset": int(np.median(onsets))}, first,
            )  # fmt: skip


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


def _with(values: np.ndarray, where: np.ndarray | slice, value: float) -> np.ndarray:
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


def _prompt_into_response(trace: Trace) -> Trace:
    """Rows whose response is the full row, with log-prob 0 on the prompt and the mask over all of it."""
    rows = trace.table.to_pylist()
    for row in rows:
        n = len(row["prompt_ids"])
        row["response_ids"] = row["prompt_ids"] + row["response_ids"]
        for name in ("rollout_logp", "old_logp", "entropy", "noise_scale"):
            if row.get(name) is not None:
                row[name] = [0.0] * n + row[name]
        row.pop("mask", None)
    return Trace.from_rows(rows, path=trace.path)
