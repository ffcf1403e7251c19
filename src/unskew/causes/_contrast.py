"""A conditional statistic: the gap of flagged rows against the others."""

from collections.abc import Iterable

import numpy as np

from unskew.causes._base import Cause, Reading, Side
from unskew.trace import Trace

__all__ = ["contrast"]


def contrast(cause: Cause, trace: Trace, column: str, side: Side) -> Iterable[Reading]:
    """A reading where only rows with a positive value of `column` disagree.

    Statistic: per-row mean |d|. It speaks where the flagged rows' median is above 3 times the 90 % quantile of the
    others, which themselves agree within 0.01 nat more than the flagged ones.
    """
    if not (trace.has(column) and trace.has("old_logp") and trace.has("rollout_logp")):
        return
    gap = np.where(trace.mask, np.abs(trace.tokens("old_logp").astype(np.float64) - trace.tokens("rollout_logp")), 0.0)
    sums = np.bincount(trace.row_of_token, gap, len(trace)) / np.maximum(
        np.bincount(trace.row_of_token, trace.mask, len(trace)), 1
    )
    flagged = np.asarray(trace.rows(column)) > 0
    if flagged.sum() < 2 or (~flagged).sum() < 2:
        return
    inside, outside = float(np.median(sums[flagged])), float(np.quantile(sums[~flagged], 0.9))
    if inside > 3 * outside + 1e-4 and inside - outside > 0.01:
        yield Reading(
            cause.id, side, "error",
            (f"mean |d| is {inside:.3g} nat in the {int(flagged.sum())} rows with {column} > 0 (median row) and "
             f"{float(np.median(sums[~flagged])):.3g} in the {int((~flagged).sum())} others",),
            {"rows": int(flagged.sum())}, np.flatnonzero(flagged[trace.row_of_token] & trace.mask),
        )  # fmt: skip
