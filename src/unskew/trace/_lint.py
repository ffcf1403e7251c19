"""What is wrong with a trace, row by row: everything is counted, and rows that cannot be trusted stay out of figures."""

import numpy as np

from unskew._errors import UnskewError
from unskew.trace._arrow import flatten, list_lengths, one_chunk
from unskew.trace._findings import Findings, LintReport, Part, Severity
from unskew.trace._schema import LOGP_COLUMNS, TOKEN_COLUMNS
from unskew.trace._trace import Trace

__all__ = ["lint", "usable"]

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
        first = next((f"; row {f.row} {f.column}: {f.says}" for f in report.findings if f.severity == "error"), "")
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
        ('1 values, response_ids has 2', [True])
    """
    found = Findings(trace)
    _whole_trace(trace, found)
    malformed = _shapes(trace, found)
    part = Part(trace, np.arange(len(trace))).take(~malformed)
    _log_probs(part, found)
    _ids(part, found, vocab_size)
    _masks(part, found)
    _settings(trace, found)
    return found.report(malformed, trace.n_tokens)


def _whole_trace(trace: Trace, found: Findings) -> None:
    for note in trace.notes:
        found.whole("unknown-key", "warn", note)
    for name in sorted(trace.columns - {"response_ids", "rollout_logp", "old_logp"}):
        if nulls := trace.table[name].null_count:
            found.whole("partial-column", "info", f"missing from {nulls} of {len(trace)} rows", name)


def _shapes(trace: Trace, found: Findings) -> np.ndarray:
    """Missing values and lengths; returns the rows whose columns do not align."""
    malformed = np.zeros(len(trace), bool)
    for name in ("response_ids", "rollout_logp", *({"old_logp"} & trace.columns)):
        there = name in trace.table.column_names
        missing = trace.table[name].is_null().to_numpy() if there else np.ones(len(trace), bool)
        found.rows("null", "error", name, dict.fromkeys(np.flatnonzero(missing).tolist(), "missing"))
        malformed |= missing
    expected = trace.lengths
    empty = np.flatnonzero((expected == 0) & ~malformed)
    found.rows("empty-response", "error", "response_ids", dict.fromkeys(empty.tolist(), "0 tokens"))
    answered = trace.table["response_ids"].is_valid().to_numpy()
    for name in sorted(trace.columns & {*TOKEN_COLUMNS, *_NESTED_TOKEN_COLUMNS} - {"response_ids"}):
        lengths = list_lengths(trace.table[name])
        bad = (lengths != expected) & answered & trace.table[name].is_valid().to_numpy()
        says = {row: f"{lengths[row]} values, response_ids has {expected[row]}" for row in np.flatnonzero(bad).tolist()}
        found.rows("length", "error", name, says)
        malformed |= bad
    return malformed


def _log_probs(part: Part, found: Findings) -> None:
    for name in LOGP_COLUMNS:
        severity: Severity = "error" if name in ("rollout_logp", "old_logp") else "warn"
        for given in part.having(name):
            values = given.trace.tokens(name)
            if len(values) and values.min() > _PLACEHOLDER and values.max() <= 0:
                continue
            mask = given.trace.mask
            finite, nan = np.isfinite(values), np.isnan(values)
            above = finite & mask & (values > 0)
            large, small = values > _SMALL, values > _ROUNDING
            checks: tuple[tuple[str, Severity, np.ndarray, str], ...] = (
                ("logp-nan", severity, nan & mask, "NaN inside the mask"),
                ("logp-inf", severity, ~finite & ~nan & mask, "infinite inside the mask"),
                ("logp-outside", "info", ~finite & ~mask, "not finite, outside the mask"),
                ("logp-placeholder", "warn", finite & mask & (values <= _PLACEHOLDER), "a placeholder, not a log-prob"),
                ("logp-positive", severity, above & large, "a log-prob above 0"),
                ("logp-above-zero", "warn", above & small & ~large, "a log-prob above 0"),
                ("logp-rounding", "info", above & ~small, "a log-prob above 0 by rounding"),
            )
            for code, level, bad, says in checks:
                found.tokens(code, level, name, given, bad, says)
    for given in part.having("entropy"):
        bad = given.trace.mask & ~(given.trace.tokens("entropy") >= -_ROUNDING)
        found.tokens("entropy-range", "warn", "entropy", given, bad, "an entropy that is negative or NaN")


def _ids(part: Part, found: Findings, vocab_size: int | None) -> None:
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    beyond = f"an id beyond the vocabulary of {vocab_size}"
    for given in part.having("response_ids"):
        values = given.trace.tokens("response_ids")
        if len(values) and values.min() >= 0 and values.max() < limit:
            continue
        found.tokens("id-range", "error", "response_ids", given, values < 0, "a negative id")
        found.tokens("id-range", "error", "response_ids", given, values >= limit, beyond)
    for given in part.having("prompt_ids"):
        column = one_chunk(given.trace.table["prompt_ids"])
        values, row_of_value = flatten(column), np.repeat(given.rows, list_lengths(column))
        for bad, says in ((values < 0, "a negative id"), (values >= limit, beyond)):
            rows, first = np.unique(row_of_value[bad], return_index=True)
            pairs = zip(rows.tolist(), values[bad][first].tolist(), strict=True)
            found.rows("id-range", "error", "prompt_ids", {row: f"{says} ({value})" for row, value in pairs})


def _masks(part: Part, found: Findings) -> None:
    for name, code, limit in (("mask", "mask-value", 1), ("segment_ids", "segment-value", 5)):
        for given in part.having(name):
            values = given.trace.tokens(name)
            found.tokens(code, "error", name, given, (values < 0) | (values > limit), f"expected 0 to {limit}")
    if not part.trace.columns & {"mask", "segment_ids"}:
        return
    used = np.bincount(part.trace.row_of_token, part.trace.mask, len(part.trace))
    rows = part.rows[(used == 0) & (part.trace.lengths > 0)].tolist()
    found.rows("mask-all-zero", "warn", "mask", dict.fromkeys(rows, "every token is masked: the row contributes nothing"))


def _settings(trace: Trace, found: Findings) -> None:
    first: dict[str, int] = {}
    ids = {row: name for row, name in enumerate(trace.rows("id")) if name is not None}
    again = {row: first[name] for row, name in ids.items() if first.setdefault(name, row) != row}
    found.rows("duplicate-id", "warn", "id", {row: f"the id of row {other} again" for row, other in again.items()})
    odd = {row: name for row, name in enumerate(trace.rows("finish_reason")) if name not in _FINISHED | {None}}
    says = {row: f"unknown finish reason {name!r}" for row, name in odd.items()}
    found.rows("finish-reason", "info", "finish_reason", says)
    for name, (expected, fits) in _PLAUSIBLE.items():
        bad = {row: x for row, x in enumerate(trace.setting("sampling", name)) if x is not None and not fits(x)}
        says = {row: f"{name} is {value}, expected {expected}" for row, value in bad.items()}
        found.rows("sampling-range", "error", "sampling", says)
    greedy = np.array([value == 0 for value in trace.setting("sampling", "temperature")], bool)
    if greedy.any() and "rollout_logp" in trace.columns:
        column = one_chunk(trace.table["rollout_logp"])
        nonzero = np.bincount(np.repeat(np.arange(len(trace)), list_lengths(column)), flatten(column) < 0, len(trace)) > 0
        says = "temperature 0, and log-probs that are not 0: the tokens were not drawn from the recorded distribution"
        found.rows("sampling-greedy", "warn", "sampling", dict.fromkeys(np.flatnonzero(greedy & nonzero).tolist(), says))
