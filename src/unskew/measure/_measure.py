"""A trace measured: overall and in slices, in one pass, with flat memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unskew._errors import UnskewError
from unskew.measure._figures import Mismatch, compute
from unskew.measure._state import MismatchState
from unskew.trace import Trace, iter_read, lint

__all__ = ["Measurement", "measure", "measure_path", "slices_of"]

_COLUMNS = (
    "id", "group_id", "mask", "segment_ids", "entropy", "noise_scale", "selection", "sampled", "weight_version", "old_version",
)  # fmt: skip
_PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of all usable rows and of slices.

    Args:
        overall: all tokens of the loss.
        slices: by kind ("position", "probability", "segment", "last_token", "version_lag"), then by label.
        n_rows, n_excluded: rows read, and those that fail lint.
        counts: lint codes and in how many rows each was found.
        notes: what was withheld or not read.
        against: the column that stood for the trainer.
    """

    overall: Mismatch
    slices: Mapping[str, Mapping[str, Mismatch]]
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
        }  # fmt: skip


def measure(trace: Trace, *, old: str = "old_logp", slices: bool = True) -> Measurement:
    """Measure a trace in memory: rows that fail lint are counted and left out.

    Args:
        trace: rows as read.
        old: column that stands for the trainer: "old_logp", "prefill_logp" or "logp".
        slices: also by position, probability, segment, last token and version lag.

    Raises:
        UnskewError: no usable row, or no such column.
    """
    return _measure([trace], old, slices)


def measure_path(path: str | Path, *, old: str = "old_logp", slices: bool = False) -> Measurement:
    """Measure a trace on disk piece by piece, as `measure`, with memory that does not grow with it."""
    return _measure(iter_read(path, columns={old, *_COLUMNS}), old, slices)


def _measure(pieces: Iterable[Trace], old: str, slices: bool) -> Measurement:
    total = uniform = MismatchState.empty()
    parts: dict[str, dict[str, MismatchState]] = {}
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
        total = total.merge(state)
        fair = _uniform(piece)
        selected |= not fair.all()
        if fair.all():
            uniform = uniform.merge(state)
        elif fair.any():
            uniform = uniform.merge(_state(piece.select(fair), old, piece.select(fair).mask))
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
    return Measurement(overall, figures, n_rows, n_excluded, counts, tuple(notes), old)


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
        for value in np.unique(lag[np.isfinite(lag)])[:16]:
            yield "version_lag", f"{int(value)}", lag == value


def _by_bound(item: tuple[str, Any]) -> tuple[float, str]:
    head = item[0].replace("–", " ").split()[0]
    return (float(head) if head.replace(".", "", 1).isdigit() else 0.0, item[0])


def _state(trace: Trace, old: str, mask: np.ndarray) -> MismatchState:
    groups = trace.rows("group_id") if trace.has("group_id") else None
    return MismatchState.from_packed(
        trace.tokens("rollout_logp"), trace.tokens(old), mask=mask, cu_seqlens=trace.cu_seqlens,
        entropy=trace.tokens("entropy") if trace.has("entropy") and old == "old_logp" else None,
        noise_scale=trace.tokens("noise_scale") if trace.has("noise_scale") else None,
        group_ids=None if groups is None else np.asarray(groups),
    )  # fmt: skip


def _uniform(trace: Trace) -> np.ndarray:
    selection, sampled = trace.rows("selection"), trace.rows("sampled")
    return np.array([s not in ("reward", "length") and w != "worst" for s, w in zip(selection, sampled, strict=True)], bool)
