"""What lint says: findings, the report, and how findings are collected."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from unskew.trace._trace import Trace

__all__ = ["Findings", "LintFinding", "LintReport", "Part", "Severity"]

Severity = Literal["info", "warn", "error"]

_RANK: Mapping[Severity, int] = {"error": 0, "warn": 1, "info": 2}
_LISTED = 20


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
        counts: of each code, all findings: one a row and column; 0 where it is about the whole trace.
        token_counts: of each code about tokens, all tokens.
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


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of a trace, and which rows of it they are."""

    trace: Trace
    rows: np.ndarray

    def take(self, given: np.ndarray) -> "Part":
        """The rows for which `given` (bool) holds."""
        return self if given.all() else Part(self.trace.select(given), self.rows[given])

    def having(self, name: str) -> Iterator["Part"]:
        """The rows that hold a value in this column, if any do."""
        if name in self.trace.columns:
            yield self.take(self.trace.table[name].is_valid().to_numpy())


class Findings:
    """Collects findings about a trace."""

    def __init__(self, trace: Trace) -> None:
        self.listed: list[LintFinding] = []
        self.excluded = np.zeros(len(trace), bool)
        self._ids = trace.rows("id")
        self._counts: Counter[str] = Counter()
        self._token_counts: Counter[str] = Counter()
        self._severity: dict[str, Severity] = {}

    def whole(self, code: str, severity: Severity, says: str, column: str | None = None) -> None:
        """A finding about the whole trace."""
        self.listed.append(LintFinding(code, severity, says, column=column))
        self._count(code, severity, 0, 0)

    def rows(self, code: str, severity: Severity, column: str, says: Mapping[int, str]) -> None:
        """What to say about each row of the trace that is concerned."""
        self._add(code, severity, column, [(row, text, None, 0) for row, text in says.items()])

    def tokens(self, code: str, severity: Severity, column: str, part: Part, bad: np.ndarray, says: str) -> None:
        """Tokens of a token column (bool over those of `part`); `says` is followed by the first value."""
        where = np.flatnonzero(bad)
        if len(where) == 0:
            return
        rows, first, counts = np.unique(part.trace.row_of_token[where], return_index=True, return_counts=True)
        at = where[first]
        values = part.trace.tokens(column)[at]
        found = zip(part.rows[rows].tolist(), values.tolist(), part.trace.position[at].tolist(), counts.tolist(), strict=True)
        self._add(code, severity, column, [(row, f"{says} ({value:g})", token, count) for row, value, token, count in found])

    def report(self, malformed: np.ndarray, n_tokens: int) -> LintReport:
        """All of it."""
        codes = sorted(self._counts, key=lambda code: (_RANK[self._severity[code]], code))
        return LintReport(
            findings=tuple(sorted(self.listed, key=lambda f: (_RANK[f.severity], f.code, f.row or 0))),
            counts={code: self._counts[code] for code in codes},
            token_counts={code: self._token_counts[code] for code in codes if self._token_counts[code]},
            severity={code: self._severity[code] for code in codes},
            malformed=malformed,
            excluded=self.excluded,
            n_tokens=n_tokens,
        )

    def _add(self, code: str, severity: Severity, column: str, found: list[tuple[int, str, int | None, int]]) -> None:
        if not found:
            return
        self._count(code, severity, len(found), sum(count for *_, count in found))
        if severity == "error":
            self.excluded[[row for row, *_ in found]] = True
        self.listed += [
            LintFinding(code, severity, says, row, self._ids[row], column, token, count)
            for row, says, token, count in found[:_LISTED]
        ]

    def _count(self, code: str, severity: Severity, rows: int, tokens: int) -> None:
        self._severity[code] = min(severity, self._severity.get(code, severity), key=lambda level: _RANK[level])
        self._counts[code] += rows
        self._token_counts[code] += tokens
