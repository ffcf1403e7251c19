"""What a correction would do to a recorded batch: what it keeps, how far its weights can be trusted, what bias it leaves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unskew._errors import UnskewError
from unskew.correct._batch import Batch
from unskew.correct._calibrate import Calibrated
from unskew.correct._correction import Correction
from unskew.correct._weights import Weights
from unskew.measure import PSIS, Figure, cluster_mean, psis
from unskew.trace import Trace

__all__ = ["WhatIf", "batch_of", "what_if"]


@dataclass(frozen=True, slots=True, eq=False)
class WhatIf:
    """One correction on one trace.

    Args:
        correction: as written.
        figures: by name; every share, weight and bound with unit, n and interval over sequences.
        rejected: by term: share of the tokens that it alone rejects.
        cut: up to 20 tokens whose importance the correction changes most, largest first: indices (k,).
        weights: packed, of the trace's tokens.
    """

    correction: str
    figures: Mapping[str, Figure]
    rejected: Mapping[str, Figure]
    cut: np.ndarray
    weights: Weights

    def to_dict(self) -> dict[str, Any]:
        """JSON form, without the weights."""
        return {
            "correction": self.correction, "figures": {name: f.to_dict() for name, f in self.figures.items()},
            "rejected": {name: f.to_dict() for name, f in self.rejected.items()},
        }  # fmt: skip


def batch_of(trace: Trace, *, old: str = "old_logp") -> Batch:
    """The batch of a trace: `logp`, `advantage` and `turn_ids` where they are recorded.

    Raises:
        UnskewError: no such column of the trainer's log-probs.
    """
    if not trace.has(old):
        raise UnskewError(
            f"{trace.path}: no {old}, so there is no ratio to correct", hint="fill it with `unskew score TRACE --model DIR`"
        )
    more = {"logp": "logp", "advantages": "advantage", "turn_ids": "turn_ids"}
    return Batch.of(
        trace.tokens("rollout_logp"), trace.tokens(old), mask=trace.mask, cu_seqlens=trace.cu_seqlens,
        **{name: trace.tokens(column) for name, column in more.items() if trace.has(column)},
    )  # fmt: skip


def what_if(correction: Correction | Calibrated, trace: Trace, *, old: str = "old_logp") -> WhatIf:
    """What this correction would do to these rows.

    `bias_token` = mean |w − ρ_t| bounds how far any token average of a function within ±1 moves from the one with exact
    next-token weights; `bias_sequence` = mean |w − ∏ρ| does so against exact sequence weights, and is itself an estimate
    that fails where `khat_sequence` is above 0.7. A rejected token has w = 0.

    Args:
        correction: as parsed, or calibrated.
        trace: usable rows.
        old: the trainer's log-probs.

    Raises:
        UnskewError: a column that it needs is not recorded.
    """
    batch = batch_of(trace, old=old)
    found = correction.apply(batch)
    mask, rows, n_rows = trace.mask, trace.row_of_token, len(trace)

    def mean(values: np.ndarray, unit: str, among: np.ndarray = mask) -> Figure:
        return cluster_mean(np.bincount(rows, np.where(among, values, 0.0), n_rows), np.bincount(rows, among, n_rows), unit)

    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(mask & ~found.non_finite, trace.tokens(old).astype(np.float64) - trace.tokens("rollout_logp"), 0.0)
        product = np.bincount(rows, d, n_rows)
        ratio, whole = np.exp(d), np.exp(product)[rows]
        weight = found.weight.astype(np.float64)
        known = mask & ~found.non_finite
        used = np.bincount(rows, mask, n_rows) > 0
        kept_rows = np.bincount(rows, found.keep, n_rows) > 0
        weighting = correction.weighting
        by_sequence = weighting is not None and weighting.method.level in ("seq", "geo")
        unit = "sequences" if by_sequence else "tokens"
        first = np.flatnonzero(mask)
        if by_sequence:
            first = first[np.unique(rows[first], return_index=True)[1]]
        raw = d if weighting is None else batch.layout.restore(np.broadcast_to(weighting.statistic(batch)[0], batch.layout.shape))
        figures = {
            "tokens_kept": mean(found.keep, "share of tokens"),
            "sequences_kept": cluster_mean(kept_rows[used].astype(float), np.ones(used.sum()), "share of sequences"),
            "weight_mean": mean(weight, "1"),
            "weight_max": Figure(float(weight[mask].max(initial=0.0)), "1", int(mask.sum())),
            "ess_before": Figure(_ess(raw[first]), f"share of {unit}", len(first)),
            "ess": Figure(_ess_of(weight[first]), f"share of {unit}", len(first)),
            "khat_before": _khat(psis(raw[first]), unit),
            "khat": _khat(psis(np.log(weight[first][weight[first] > 0])), unit),
            "khat_sequence": _khat(psis(product[used]), "sequences"),
            "bias_token": mean(np.abs(weight - ratio), "of max |f|", known),
            "bias_sequence": mean(np.abs(weight - whole), "of max |f|", known),
        }  # fmt: skip
        if trace.has("advantage"):
            sign = np.sign(trace.tokens("advantage"))
            for name, value in (("positive", 1), ("negative", -1)):
                figures[f"tokens_kept_{name}"] = mean(
                    found.keep, f"share of tokens with {name} advantage", mask & (sign == value)
                )
        change = np.where(known, np.abs(weight - ratio), -1.0)
    rejected = {str(term): mean(mask & ~batch.layout.restore(term.within(batch)), "share of tokens") for term in correction.terms}
    cut = np.argsort(-change, kind="stable")[:20]
    # Weights are float32: a change below its rounding is none.
    return WhatIf(str(correction), figures, rejected, cut[change[cut] > 1e-6], found)


def _ess(log_weights: np.ndarray) -> float | None:
    """(Σw)² / (n Σw²) of log-weights."""
    if not len(log_weights):
        return None
    return _ess_of(np.exp(log_weights - log_weights.max()))


def _ess_of(weights: np.ndarray) -> float | None:
    square = float((weights**2).sum())
    return float(weights.sum() ** 2 / square / len(weights)) if square > 0 and np.isfinite(square) else None


def _khat(found: PSIS, unit: str) -> Figure:
    if np.isfinite(found.khat):
        return Figure(found.khat, "1", found.n)
    return Figure(None, "1", found.n, why=f"too few {unit}" if np.isnan(found.khat) else "the tail is constant")
