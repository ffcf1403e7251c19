"""A trace measured: overall and in slices, in one pass, with flat memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unskew._errors import UnskewError
from unskew.measure._figures import Figure, Mismatch, compute, share_outside
from unskew.measure._state import MismatchState
from unskew.trace import Trace, iter_read, lint

__all__ = ["Measurement", "measure", "measure_path", "slices_of"]

_COLUMNS = (
    "id",
    "group_id",
    "mask",
    "segment_ids",
    "entropy",
    "noise_scale",
    "selection",
    "sampled",
    "weight_version",
    "old_version",
    "advantage",
    "logp",
)
_SLICED = ("turn_ids", "source", "finish_reason")  # fmt: skip
_ENTROPIES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, np.inf)
_MOST = 16
"""Labels of a slice shown at most."""
_PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of all usable rows and of slices.

    Args:
        overall: all tokens of the loss.
        slices: by kind ("position", "probability", "entropy", "length", "segment", "turn", "last_token", "version",
            "version_lag", "environment", "finish_reason"), then by label.
        factors: where `logp` is there, ρ_θ = π_θ/μ taken apart: "mismatch" (π_old/μ), "update" (π_θ/π_old), "total".
        n_rows, n_excluded: rows read, and those that fail lint.
        counts: lint codes and in how many rows each was found.
        notes: what was withheld or not read.
        against: the column that stood for the trainer.
    """

    overall: Mismatch
    slices: Mapping[str, Mapping[str, Mismatch]]
    factors: Mapping[str, Mismatch]
    n_rows: int
    n_excluded: int
    counts: Mapping[str, int]
    notes: tuple[str, ...]
    against: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema_version": 1, "against": self.against, "n_rows": self.n_rows, "n_excluded": self.n_excluded,
            "lint": dict(self.counts), "notes": list(self.notes), "overall": self.overall.to_dict(),
            "slices": {kind: {label: m.to_dict() for label, m in parts.items()} for kind, parts in self.slices.items()},
            "factors": {name: m.to_dict() for name, m in self.factors.items()},
        }  # fmt: skip


def measure(trace: Trace, *, old: str = "old_logp", slices: bool = True, clip: tuple[float, float] = (0.8, 1.2)) -> Measurement:
    """Measure a trace in memory: rows that fail lint are counted and left out.

    Args:
        trace: rows as read.
        old: column that stands for the trainer: "old_logp", "prefill_logp" or "logp".
        slices: also by position, probability and what else the trace has columns for.
        clip: bounds of ρ whose outside is counted as `share_outside`.

    Raises:
        UnskewError: no usable row, or no such column.
    """
    return _measure([trace], old, slices, clip)


def measure_path(
    path: str | Path, *, old: str = "old_logp", slices: bool = False, clip: tuple[float, float] = (0.8, 1.2)
) -> Measurement:
    """Measure a trace on disk piece by piece, as `measure`, with memory that does not grow with it."""
    return _measure(iter_read(path, columns={old, *_COLUMNS, *(_SLICED if slices else ())}), old, slices, clip)


def _measure(pieces: Iterable[Trace], old: str, slices: bool, clip: tuple[float, float]) -> Measurement:
    if not 0 <= clip[0] < clip[1]:
        raise UnskewError(
            f"clip bounds {clip[0]:g}, {clip[1]:g}", hint="give two ratios that rise, such as 0.8 and 1.2", exit_code=2
        )
    total = uniform = MismatchState.empty()
    parts: dict[str, dict[str, MismatchState]] = {}
    factors: dict[str, MismatchState] = {}
    n_rows = n_excluded = 0
    counts: dict[str, int] = {}
    selected, first = False, None
    for piece in pieces:
        report = lint(piece)
        first = first or next((f for f in report.findings if f.severity == "error"), None)
        n_rows += len(report.excluded)
        n_excluded += int(report.excluded.sum())
        for code, count in report.counts.items():
            counts[code] = counts.get(code, 0) + count
        piece = piece.select(~report.excluded) if report.excluded.any() else piece
        if not len(piece):
            continue
        if not piece.has(old):
            raise UnskewError(
                f"{piece.path}: no {old}, so there is nothing to compare rollout_logp with",
                hint="fill it with `unskew score TRACE --model DIR`, or run `unskew diagnose TRACE --model DIR`",
            )
        state = _state(piece, old, piece.mask)
        fair = _uniform(piece)
        if fair.all():
            uniform = uniform.merge(state) if selected else uniform
        else:
            uniform, selected = uniform if selected else total, True
            if fair.any():
                uniform = uniform.merge(_state(piece.select(fair), old, piece.select(fair).mask))
        total = total.merge(state)
        for name, a, b in _FACTORS if old == "old_logp" and piece.has("logp") else ():
            factors[name] = factors.get(name, MismatchState.empty()).merge(_pair(piece, a, b))
        for kind, label, where in slices_of(piece) if slices else ():
            have = parts.setdefault(kind, {})
            have[label] = have.get(label, MismatchState.empty()).merge(_state(piece, old, piece.mask & where))
    if n_excluded == n_rows:
        why = f": row {first.row} {first.column}: {first.says}" if first else ""
        raise UnskewError(f"none of {n_rows} rows is usable{why}", hint="run `unskew lint` for every row and reason")
    notes, overall = [], compute(total)
    if selected:
        notes.append("mean_ratio, kappa and calibration are over the rows kept without looking at reward or gap")
        why = "" if uniform.n_tokens else "rows were selected by reward, length or gap"
        kept = compute(uniform, withhold=why)
        names = ("mean_ratio", "mean_ratio_z", "kappa", "calibration", "calibration_z")
        overall = Mismatch({**overall.figures, **{name: kept.figures[name] for name in names if name in kept.figures}})
    figures = {
        kind: {label: compute(s) for label, s in sorted(have.items(), key=_by_bound) if s.n_tokens}
        for kind, have in parts.items()
    }
    overall = Mismatch({**overall.figures, "share_outside": share_outside(total, *clip)})
    taken_apart = {
        name: Mismatch({**compute(state).figures, "share_outside": share_outside(state, *clip)})
        for name, state in factors.items()
    }
    if factors:
        taken_apart["total"] = Mismatch({**taken_apart["total"].figures, "correlation": _correlation(factors)})
    return Measurement(overall, figures, taken_apart, n_rows, n_excluded, counts, tuple(notes), old)


_FACTORS = (("mismatch", "rollout_logp", "old_logp"), ("update", "old_logp", "logp"), ("total", "rollout_logp", "logp"))


def _pair(trace: Trace, a: str, b: str) -> MismatchState:
    """log b − log a over the tokens where all three log-probs are finite."""
    known = np.isfinite(trace.tokens("rollout_logp")) & np.isfinite(trace.tokens("old_logp")) & np.isfinite(trace.tokens("logp"))
    return MismatchState.from_packed(
        trace.tokens(a), trace.tokens(b), mask=trace.mask & known, cu_seqlens=trace.cu_seqlens,
        advantage=trace.tokens("advantage") if trace.has("advantage") else None,
    )  # fmt: skip


def _correlation(factors: Mapping[str, MismatchState]) -> Figure:
    """Correlation of mismatch and update over tokens: Var(total) = Var(mismatch) + Var(update) + 2 Cov."""
    n = factors["total"].n_tokens
    if not n:
        return Figure(None, "1", 0, why="no token to measure")
    variance = {name: float(s.sums[2] / n - (s.sums[0] / n) ** 2) for name, s in factors.items()}
    scale = np.sqrt(max(variance["mismatch"] * variance["update"], 0.0))
    if not scale > 0:
        return Figure(None, "1", n, why="mismatch or update is the same at every token")
    return Figure(float((variance["total"] - variance["mismatch"] - variance["update"]) / 2 / scale), "1", n)


def slices_of(trace: Trace) -> Iterator[tuple[str, str, np.ndarray]]:
    """(kind, label, tokens (N,) bool) of every slice that the trace has the columns for."""
    position, top = trace.position, int(trace.lengths.max(initial=1))
    edges = [0, 1, *(2**k for k in range(1, max(top - 1, 1).bit_length() + 1))]
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        yield "position", f"{low}–{high - 1}" if high > low + 1 else f"{low}", (position >= low) & (position < high)
    with np.errstate(invalid="ignore", over="ignore"):
        p = np.exp(trace.tokens("rollout_logp"))
    for low, high in zip(_PROBABILITIES[:-1], _PROBABILITIES[1:], strict=True):
        yield "probability", f"{low:g}–{high:g}", (p >= low) & (p < high if high < 1 else p >= low)
    if trace.has("entropy"):
        entropy = trace.tokens("entropy")
        for low, high in zip(_ENTROPIES[:-1], _ENTROPIES[1:], strict=True):
            yield "entropy", f"{low:g}–{high:g}", (entropy >= low) & (entropy < high)
    length = trace.lengths[trace.row_of_token]
    for low, high in zip(edges[1:-1], edges[2:], strict=True):
        if (inside := (length >= low) & (length < high)).any():
            yield "length", f"{low}–{high - 1}", inside
    last = np.zeros(trace.n_tokens, bool)
    last[trace.cu_seqlens[1:][trace.lengths > 0] - 1] = True
    yield "last_token", "last", last
    yield "last_token", "others", ~last
    if trace.has("segment_ids"):
        names = ("prompt", "sampled", "tool or user", "template", "padding", "forced")
        for value, name in enumerate(names):
            yield "segment", f"{value} {name}", trace.tokens("segment_ids") == value
    if trace.has("weight_version") and "old_version" in trace.columns:
        now = np.array([np.nan if v is None else v for v in trace.rows("old_version")], np.float64)
        lag = now[trace.row_of_token] - trace.tokens("weight_version")
        for value in np.unique(lag[np.isfinite(lag)])[:_MOST]:
            yield "version_lag", f"{int(value)}", lag == value
    for kind, column in (("turn", "turn_ids"), ("version", "weight_version")):
        if trace.has(column):
            values = trace.tokens(column).astype(np.float64)
            for value in np.unique(values[np.isfinite(values)])[:_MOST]:
                yield kind, f"{int(value)}", values == value
    for kind, labels in (("environment", _environments(trace)), ("finish_reason", trace.rows("finish_reason"))):
        known = list(dict.fromkeys(label for label in labels if label is not None))[:_MOST]
        for label in known:
            yield kind, str(label), np.array([other == label for other in labels], bool)[trace.row_of_token]


def _environments(trace: Trace) -> list[str | None]:
    """Engine, version and dtype of each row's source, in words."""
    keys = ("engine", "engine_version", "dtype", "kv_dtype")
    return [" ".join(str(source[k]) for k in keys if source.get(k)) if source else None for source in trace.rows("source")]


def _by_bound(item: tuple[str, Any]) -> tuple[float, str]:
    head = item[0].replace("–", " ").partition(" ")[0]
    return (float(head) if head.replace(".", "", 1).isdigit() else 0.0, item[0])


def _state(trace: Trace, old: str, mask: np.ndarray) -> MismatchState:
    groups = trace.rows("group_id") if trace.has("group_id") else None
    return MismatchState.from_packed(
        trace.tokens("rollout_logp"), trace.tokens(old), mask=mask, cu_seqlens=trace.cu_seqlens,
        entropy=trace.tokens("entropy") if trace.has("entropy") and old == "old_logp" else None,
        noise_scale=trace.tokens("noise_scale") if trace.has("noise_scale") else None,
        advantage=trace.tokens("advantage") if trace.has("advantage") else None,
        group_ids=None if groups is None else np.asarray(groups), probabilities=True,
    )  # fmt: skip


def _uniform(trace: Trace) -> np.ndarray:
    selection, sampled = trace.rows("selection"), trace.rows("sampled")
    return np.array([s not in ("reward", "length") and w != "worst" for s, w in zip(selection, sampled, strict=True)], bool)
