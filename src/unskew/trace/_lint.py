"""What is wrong with the rows of a trace, found without a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unskew._errors import UnskewError
from unskew.trace._schema import LOGP_COLUMNS, TOKEN_COLUMNS
from unskew.trace._trace import Trace

__all__ = ["LintFinding", "LintReport", "lint", "usable"]

_LISTED = 20
_MALFORMED = ("empty-response", "length", "null")


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing wrong in one row: column, first token where it is seen (None: the whole row), and words."""

    code: str
    severity: Literal["info", "warn", "error"]
    row: int
    id: str | None
    column: str
    token: int | None
    says: str


@dataclass(frozen=True, slots=True, eq=False)
class LintReport:
    """All findings of a trace.

    Args:
        findings: at most 20 a code; `counts` has how many rows each code was found in.
        malformed: rows whose columns do not fit together, bool (B,).
        excluded: rows with an error, left out of every figure, bool (B,); contains `malformed`.
        notes: what the reader did not read.
    """

    findings: tuple[LintFinding, ...]
    counts: Mapping[str, int]
    malformed: np.ndarray
    excluded: np.ndarray
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema_version": 1, "n_rows": len(self.excluded), "n_excluded": int(self.excluded.sum()),
            "counts": dict(self.counts), "notes": list(self.notes),
            "findings": [
                {"code": f.code, "severity": f.severity, "row": f.row, "id": f.id, "column": f.column, "token": f.token, "says": f.says}
                for f in self.findings
            ],
        }  # fmt: skip


class _Lint:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.ids = trace, trace.rows("id")
        self.findings: list[LintFinding] = []
        self.counts: dict[str, int] = {}
        self.malformed = np.zeros(len(trace), bool)
        self.excluded = np.zeros(len(trace), bool)

    def rows(self, code: str, severity: Any, column: str, rows: np.ndarray, says: Any, tokens: np.ndarray | None = None) -> None:
        """Record a finding for each of these rows; `says` is words or a function of the row."""
        if not len(rows):
            return
        self.counts[code] = self.counts.get(code, 0) + len(rows)
        if severity == "error":
            self.excluded[rows] = True
        if code in _MALFORMED:
            self.malformed[rows] = True
        for k, row in enumerate(rows[:_LISTED]):
            token = None if tokens is None else int(tokens[k])
            words = says(int(row)) if callable(says) else says
            self.findings.append(LintFinding(code, severity, int(row), self.ids[row], column, token, words))

    def tokens(self, code: str, severity: Any, column: str, bad: np.ndarray, says: str, sound: Trace, index: np.ndarray) -> None:
        """Record rows with a bad token; `sound` holds the rows that fit together, `index` their rows in the trace."""
        where = np.flatnonzero(bad)
        rows, first = np.unique(sound.row_of_token[where], return_index=True)
        counts = np.bincount(sound.row_of_token[where], minlength=len(sound))
        number = {int(index[row]): int(counts[row]) for row in rows}
        self.rows(code, severity, column, index[rows], lambda row: f"{says} ({number[row]} tokens)", sound.position[where[first]])


def lint(trace: Trace, *, vocab_size: int | None = None) -> LintReport:
    """Check every row: lengths, values, ids, mask, settings.

    Errors exclude a row from figures; warnings and infos keep it. Nothing is changed or dropped.

    Args:
        trace: rows as read; token columns may have wrong lengths.
        vocab_size: ids at or above it are errors, where it is known.

    Example:
        >>> report = lint(Trace.from_rows([{"response_ids": [1, 2], "rollout_logp": [-0.5]}]))
        >>> report.findings[0].code, report.findings[0].says
        ('length', '1 values, response_ids has 2')
    """
    state = _Lint(trace)
    _shapes(state)
    index = np.flatnonzero(~state.malformed)
    sound = trace.select(index)
    if len(sound):
        _values(state, sound, index, vocab_size)
        _masks(state, sound, index)
        _settings(state)
    order = {"error": 0, "warn": 1, "info": 2}
    findings = sorted(state.findings, key=lambda f: (order[f.severity], f.code, f.row))
    return LintReport(tuple(findings), dict(sorted(state.counts.items())), state.malformed, state.excluded, trace.notes)


def usable(trace: Trace, *, vocab_size: int | None = None) -> tuple[Trace, LintReport]:
    """The rows without an error, and the report that names the others.

    Raises:
        UnskewError: no row is left.
    """
    report = lint(trace, vocab_size=vocab_size)
    if report.excluded.all():
        first = next(f for f in report.findings if f.severity == "error")
        raise UnskewError(
            f"{trace.path}: none of {len(trace)} rows is usable; row {first.row} {first.column}: {first.says}",
            hint="run `unskew lint` for every row and reason",
        )
    return trace.select(~report.excluded), report


def _shapes(state: _Lint) -> None:
    table = state.trace.table
    lengths = _lengths(table["response_ids"])
    state.rows("null", "error", "response_ids", np.flatnonzero(lengths < 0), "no response_ids")
    state.rows("empty-response", "error", "response_ids", np.flatnonzero(lengths == 0), "0 tokens")
    for name in table.column_names:
        if name in TOKEN_COLUMNS and name != "response_ids":
            own = _lengths(table[name])
            state.rows(
                "length", "error", name, np.flatnonzero((own >= 0) & (own != lengths) & (lengths >= 0)),
                lambda row, own=own: f"{own[row]} values, response_ids has {lengths[row]}",
            )  # fmt: skip
            if name == "rollout_logp":
                state.rows("null", "error", name, np.flatnonzero(own < 0), "no rollout_logp")
    ids = np.array([str(i) for i in state.ids])
    if "id" in table.column_names:
        unique, first, counts = np.unique(ids, return_index=True, return_counts=True)
        again = np.setdiff1d(np.flatnonzero(np.isin(ids, unique[counts > 1])), first)
        again = again[[state.ids[row] is not None for row in again]] if len(again) else again
        state.rows("duplicate-id", "warn", "id", again, "the same id as an earlier row")


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(column).fill_null(-1).to_numpy()


def _values(state: _Lint, sound: Trace, index: np.ndarray, vocab_size: int | None) -> None:
    ids = sound.tokens("response_ids")
    state.tokens("id-range", "error", "response_ids", ids < 0, "a negative id", sound, index)
    if vocab_size is not None:
        state.tokens("id-range", "error", "response_ids", ids >= vocab_size, f"an id ≥ the vocabulary size {vocab_size}", sound, index)
    for name in LOGP_COLUMNS:
        if not sound.has(name):
            continue
        values, mask = sound.tokens(name), sound.mask
        bad = ~np.isfinite(values)
        kinds = (("nan", np.isnan(values), "NaN"), ("inf", np.isinf(values), "infinite"))
        for kind, where, word in kinds:
            state.tokens(f"logp-{kind}", "error", name, where & mask, f"{word} at a token of the loss", sound, index)
        state.tokens("logp-outside", "info", name, bad & ~mask, "not finite outside the mask: harmless", sound, index)
        positive = mask & (values > 0) & ~bad
        state.tokens("logp-positive", "error", name, positive & (values > 1e-2), "a log-prob above 0", sound, index)
        state.tokens("logp-rounding", "info", name, positive & (values <= 1e-2), "above 0 by rounding", sound, index)
        state.tokens("logp-placeholder", "warn", name, mask & ~bad & (values <= -999), "≤ −999: a placeholder", sound, index)


def _masks(state: _Lint, sound: Trace, index: np.ndarray) -> None:
    if sound.has("mask"):
        values = sound.tokens("mask")
        state.tokens("mask-value", "error", "mask", (values != 0) & (values != 1), "neither 0 nor 1", sound, index)
    if sound.has("segment_ids"):
        values = sound.tokens("segment_ids")
        state.tokens("segment-value", "error", "segment_ids", (values < 0) | (values > 5), "not in 0…5", sound, index)
    kept = np.bincount(sound.row_of_token, sound.mask, len(sound))
    state.rows("mask-empty", "warn", "mask", index[kept == 0], "no token in the loss: contributes nothing")


def _settings(state: _Lint) -> None:
    trace = state.trace
    checks = (
        ("temperature", lambda v: v < 0, "below 0"), ("top_p", lambda v: not 0 < v <= 1, "not in (0, 1]"),
        ("min_p", lambda v: not 0 <= v <= 1, "not in [0, 1]"), ("repetition_penalty", lambda v: v <= 0, "not above 0"),
    )  # fmt: skip
    for name, bad, words in checks:
        values = trace.setting("sampling", name)
        rows = np.array([k for k, v in enumerate(values) if v is not None and bad(v)], np.int64)
        state.rows("sampling-range", "error", f"sampling.{name}", rows, lambda row, v=values, w=words: f"{v[row]}: {w}")


