"""What is wrong with a trace, row by row: everything is counted, and rows that cannot be trusted stay out of figures."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from unskew._errors import UnskewError
from unskew.trace._arrow import flatten, list_lengths, one_chunk
from unskew.trace._schema import LOGP_COLUMNS, TOKEN_COLUMNS
from unskew.trace._trace import Trace

__all__ = ["LintFinding", "LintReport", "lint", "usable"]

Severity = Literal["info", "warn", "error"]

_RANK: Mapping[Severity, int] = {"error": 0, "warn": 1, "info": 2}
_LISTED = 20
_PLACEHOLDER = -999.0
_ROUNDING, _SMALL = 1e-5, 1e-2
_NESTED_TOKEN_COLUMNS = ("topk_ids", "topk_logp", "sampling_mask")
_FINISHED = frozenset({
    "stop", "length", "eos", "eos_token", "stop_sequence", "max_tokens", "abort", "tool_calls", "function_call",
    "content_filter", "error", "repetition",
})  # fmt: skip
_PLAUSIBLE = {
    "temperature": ("at least 0", lambda x: x >= 0),
    "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
    "top_k": ("−1, 0 or positive", lambda x: x >= -1),
    "min_p": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("positive", lambda x: x > 0),
}


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing wrong with one row, or with the whole trace where `row` is None.

    `token` is the first token concerned, `n_tokens` how many are.
    """

    code: str
    severity: Severity
    says: str
    row: int | None = None
    id: str | None = None
    column: str | None = None
    token: int | None = None
    n_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LintReport:
    """What lint found in B rows.

    Args:
        findings: worst first, at most 20 rows a code and column.
        counts: how many rows each code was found in, all of them; 0 where it is about the whole trace.
        token_counts: the same in tokens, for the codes that are about tokens.
        severity: of each code.
        malformed: rows whose columns do not align, so that no figure can be computed from them, bool (B,).
        excluded: rows with an error, left out of every figure, bool (B,); contains `malformed`.
        n_tokens: response tokens of all rows.
    """

    findings: tuple[LintFinding, ...]
    counts: Mapping[str, int]
    token_counts: Mapping[str, int]
    severity: Mapping[str, Severity]
    malformed: np.ndarray
    excluded: np.ndarray
    n_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema_version": 1,
            "n_rows": len(self.excluded),
            "n_tokens": self.n_tokens,
            "n_excluded": int(self.excluded.sum()),
            "counts": dict(self.counts),
            "token_counts": dict(self.token_counts),
            "severity": dict(self.severity),
            "findings": [asdict(finding) for finding in self.findings],
        }


def usable(trace: Trace, *, vocab_size: int | None = None) -> tuple[Trace, LintReport]:
    """The rows without an error, and the report about all of them.

    Raises:
        UnskewError: no row is left.

    Example:
        >>> trace = Trace.from_rows([{"response_ids": [5], "rollout_logp": [-0.5]},
        ...                          {"response_ids": [6], "rollout_logp": [float("nan")]}])
        >>> kept, report = usable(trace)
        >>> len(kept), report.findings[0].code
        (1, 'logp-nan')
    """
    report = lint(trace, vocab_size=vocab_size)
    if report.excluded.all():
        first = next((f"; row {f.row}: {f.says}" for f in report.findings if f.severity == "error"), "")
        raise UnskewError(
            f"{trace.path}: none of {len(trace)} rows is usable{first}",
            hint="run `unskew lint` for every row and reason",
        )
    return (trace.select(~report.excluded) if report.excluded.any() else trace), report


def lint(trace: Trace, *, vocab_size: int | None = None) -> LintReport:
    """Check every row of a trace.

    Args:
        trace: as read; lengths may be wrong, values missing or not finite.
        vocab_size: ids must be below it; without it only negative ids are found.

    Example:
        >>> trace = Trace.from_rows([{"id": "a", "response_ids": [5, 6], "rollout_logp": [-0.5]}])
        >>> report = lint(trace)
        >>> report.findings[0].says, report.excluded.tolist()
        ('rollout_logp has 1 values, response_ids 2', [True])
    """
    found = _Findings(trace)
    _whole_trace(trace, found)
    malformed = _shapes(trace, found)
    good = trace.select(~malformed) if malformed.any() else trace
    if len(good):
        found.index = np.flatnonzero(~malformed)
        _log_probs(good, found)
        _ids(good, found, vocab_size)
        _masks(good, found)
        found.index = np.arange(len(trace))
    _settings(trace, found)
    codes = sorted(found.counts, key=lambda code: (_RANK[found.severity[code]], code))
    return LintReport(
        findings=tuple(sorted(found.listed, key=lambda f: (_RANK[f.severity], f.code, f.row or 0))),
        counts={code: found.counts[code] for code in codes},
        token_counts={code: found.token_counts[code] for code in codes if found.token_counts[code]},
        severity={code: found.severity[code] for code in codes},
        malformed=malformed,
        excluded=found.excluded,
        n_tokens=trace.n_tokens,
    )


@dataclass(eq=False)
class _Findings:
    """Collects findings; `index` maps rows of the part under inspection to rows of the trace."""

    trace: Trace
    listed: list[LintFinding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    token_counts: Counter[str] = field(default_factory=Counter)
    severity: dict[str, Severity] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.excluded = np.zeros(len(self.trace), bool)
        self.index = np.arange(len(self.trace))
        self._ids = self.trace.rows("id")

    def whole(self, code: str, severity: Severity, says: str, column: str | None = None) -> None:
        self.listed.append(LintFinding(code, severity, says, column=column))
        self._count(code, severity, 0, 0)

    def _count(self, code: str, severity: Severity, rows: int, tokens: int) -> None:
        self.severity[code] = min(severity, self.severity.get(code, severity), key=lambda level: _RANK[level])
        self.counts[code] += rows
        self.token_counts[code] += tokens

    def rows(self, code: str, severity: Severity, rows: np.ndarray, says: Any, column: str | None = None) -> None:
        """Rows (indices) with a finding; `says` is a text or a function of the row."""
        self._add(code, severity, rows, np.zeros(len(rows), int), says, column, [None] * len(rows))

    def tokens(
        self, code: str, severity: Severity, part: Trace, bad: np.ndarray, values: np.ndarray, says: str, column: str
    ) -> None:
        """Tokens (bool over the tokens of `part`) with a finding; `says` is followed by the first value."""
        where = np.flatnonzero(bad)
        if len(where) == 0:
            return
        rows, first, count = np.unique(part.row_of_token[where], return_index=True, return_counts=True)
        at = where[first]
        value = dict(zip(rows.tolist(), values[at].tolist(), strict=True))
        positions = part.position[at].tolist()
        self._add(code, severity, rows, count, lambda row: f"{says} ({value[row]:g})", column, positions)

    def _add(
        self, code: str, severity: Severity, rows: np.ndarray, n_tokens: np.ndarray, says: Any, column: str | None,
        positions: list[int | None],
    ) -> None:  # fmt: skip
        if len(rows) == 0:
            return
        self._count(code, severity, len(rows), int(n_tokens.sum()))
        if severity == "error":
            self.excluded[self.index[rows]] = True
        for k, row in enumerate(rows[:_LISTED].tolist()):
            there = int(self.index[row])
            text = says if isinstance(says, str) else says(row)
            self.listed.append(LintFinding(code, severity, text, there, self._ids[there], column, positions[k], int(n_tokens[k])))


def _whole_trace(trace: Trace, found: _Findings) -> None:
    for note in trace.notes:
        found.whole("unknown-key", "warn", note)
    for name in trace.table.column_names:
        nulls = trace.table[name].null_count
        if name not in ("response_ids", "rollout_logp", "old_logp") and 0 < nulls < len(trace):
            found.whole("partial-column", "info", f"{name} is missing from {nulls} of {len(trace)} rows", name)


def _shapes(trace: Trace, found: _Findings) -> np.ndarray:
    """Missing values and lengths; returns the rows whose columns do not align."""
    malformed = np.zeros(len(trace), bool)
    for name in ("response_ids", "rollout_logp", "old_logp"):
        if name in trace.table.column_names:
            missing = trace.table[name].is_null().to_numpy()
            if name == "old_logp" and missing.all():
                continue
        elif name == "old_logp":
            continue
        else:
            missing = np.ones(len(trace), bool)
        found.rows("null", "error", np.flatnonzero(missing), f"{name} is missing", name)
        malformed |= missing
    expected = trace.lengths
    empty = (expected == 0) & ~malformed
    found.rows("empty-response", "error", np.flatnonzero(empty), "response_ids has no tokens", "response_ids")
    for name in trace.table.column_names:
        if (name in TOKEN_COLUMNS or name in _NESTED_TOKEN_COLUMNS) and name != "response_ids":
            column = trace.table[name]
            lengths = list_lengths(column)
            bad = (lengths != expected) & column.is_valid().to_numpy() & trace.table["response_ids"].is_valid().to_numpy()
            says = _length_words(name, lengths, expected)
            found.rows("length", "error", np.flatnonzero(bad), says, name)
            malformed |= bad
    return malformed


def _length_words(name: str, lengths: np.ndarray, expected: np.ndarray) -> Any:
    return lambda row: f"{name} has {lengths[row]} values, response_ids {expected[row]}"


def _log_probs(part: Trace, found: _Findings) -> None:
    mask = part.mask
    for name in LOGP_COLUMNS:
        if not part.has(name):
            continue
        values = part.tokens(name)
        severity: Severity = "error" if name in ("rollout_logp", "old_logp") else "warn"
        finite = np.isfinite(values)
        if not finite.all():
            nan = np.isnan(values)
            found.tokens("logp-nan", severity, part, nan & mask, values, "NaN inside the mask", name)
            found.tokens("logp-inf", severity, part, ~finite & ~nan & mask, values, "infinite inside the mask", name)
            found.tokens("logp-outside", "info", part, ~finite & ~mask, values, "not finite, outside the mask", name)
        placeholder = finite & mask & (values <= _PLACEHOLDER)
        found.tokens("logp-placeholder", "warn", part, placeholder, values, "a placeholder, not a log-prob", name)
        above = finite & mask & (values > 0)
        if above.any():
            large, small = values > _SMALL, values > _ROUNDING
            says = "a log-prob above 0"
            found.tokens("logp-positive", severity, part, above & large, values, says, name)
            found.tokens("logp-above-zero", "warn", part, above & small & ~large, values, says, name)
            found.tokens("logp-rounding", "info", part, above & ~small, values, f"{says} by rounding", name)
    if part.has("entropy"):
        values = part.tokens("entropy")
        bad = mask & ~(values >= -_ROUNDING)
        found.tokens("entropy-range", "warn", part, bad, values, "an entropy that is negative or NaN", "entropy")


def _ids(part: Trace, found: _Findings, vocab_size: int | None) -> None:
    values = part.tokens("response_ids")
    for bad, says in _outside(values, vocab_size):
        found.tokens("id-range", "error", part, bad, values, says, "response_ids")
    if "prompt_ids" not in part.table.column_names:
        return
    column = one_chunk(part.table["prompt_ids"])
    values = flatten(column)
    row_of_token = np.repeat(np.arange(len(part)), list_lengths(column))
    for bad, says in _outside(values, vocab_size):
        rows, first = np.unique(row_of_token[bad], return_index=True)
        value = dict(zip(rows.tolist(), values[bad][first].tolist(), strict=True))
        found.rows("id-range", "error", rows, lambda row, says=says, value=value: f"{says} ({value[row]})", "prompt_ids")


def _outside(values: np.ndarray, vocab_size: int | None) -> list[tuple[np.ndarray, str]]:
    if len(values) == 0:
        return []
    out = []
    if values.min() < 0:
        out.append((values < 0, "a negative id"))
    if vocab_size is not None and values.max() >= vocab_size:
        out.append((values >= vocab_size, f"an id beyond the vocabulary of {vocab_size}"))
    return out


def _masks(part: Trace, found: _Findings) -> None:
    for name, code, limit in (("mask", "mask-value", 1), ("segment_ids", "segment-value", 5)):
        if part.has(name):
            values = part.tokens(name)
            bad = (values < 0) | (values > limit)
            found.tokens(code, "error", part, bad, values, f"expected 0 to {limit}", name)
    used = np.bincount(part.row_of_token, part.mask, len(part))
    rows = np.flatnonzero((used == 0) & (part.lengths > 0))
    found.rows("mask-all-zero", "warn", rows, "every token is masked: the row contributes nothing", "mask")


def _settings(trace: Trace, found: _Findings) -> None:
    ids = trace.rows("id")
    seen: dict[str, int] = {}
    again = {}
    for row, name in enumerate(ids):
        if name is not None and seen.setdefault(name, row) != row:
            again[row] = seen[name]
    says = "the id of row {} again"
    found.rows("duplicate-id", "warn", np.array(list(again), int), lambda row: says.format(again[row]), "id")
    odd = {
        row: reason for row, reason in enumerate(trace.rows("finish_reason")) if reason is not None and reason not in _FINISHED
    }
    rows = np.array(list(odd), int)
    found.rows("finish-reason", "info", rows, lambda row: f"unknown finish reason {odd[row]!r}", "finish_reason")
    if "sampling" not in trace.table.column_names:
        return
    for name, (expected, fits) in _PLAUSIBLE.items():
        values = trace.setting("sampling", name)
        bad = {row: value for row, value in enumerate(values) if value is not None and not fits(value)}
        found.rows(
            "sampling-range", "error", np.array(list(bad), int),
            lambda row, name=name, expected=expected, bad=bad: f"{name} is {bad[row]}, expected {expected}", "sampling",
        )  # fmt: skip
    greedy = np.array([value == 0 for value in trace.setting("sampling", "temperature")], bool)
    if greedy.any() and "rollout_logp" in trace.table.column_names:
        column = trace.table["rollout_logp"]
        values = np.abs(flatten(one_chunk(column)))
        nonzero = np.bincount(np.repeat(np.arange(len(trace)), list_lengths(column)), values > 0, len(trace)) > 0
        says = "temperature 0, and log-probs that are not 0: the tokens were not drawn from the recorded distribution"
        found.rows("sampling-greedy", "warn", np.flatnonzero(greedy & nonzero), says, "sampling")
