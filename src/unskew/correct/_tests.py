"""Statistics that decide whether a token or a sequence stays in the loss; (B, T), or (B, 1) for a whole sequence."""

from typing import Any

from unskew.correct._batch import Batch
from unskew.measure import k1, k2, k3

__all__ = ["binary_kl_both", "divergence", "dppo_kl", "dppo_tv", "largest", "opsm", "second_moment", "smallest", "square"]

_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def divergence(batch: Batch, *, estimator: str, over: str) -> Any:
    """k1, k2 or k3 of each token, or its sum, mean or maximum over the sequence, nats."""
    # float32 ends at e^88; e^80 is above any bound already.
    values = _ESTIMATORS[estimator](batch.layout.xp.clip(batch.d, max=80.0) if estimator == "k3" else batch.d)
    if over == "token":
        return values
    if over == "max":
        return batch.highest(values)
    return batch.total(values) / (batch.counts if over == "mean" else 1)


def smallest(batch: Batch) -> Any:
    """min_t d_t of the sequence; +inf of no token."""
    return -batch.highest(-batch.d)


def largest(batch: Batch) -> Any:
    """max_t d_t of the sequence; −inf of no token."""
    return batch.highest(batch.d)


def square(batch: Batch) -> Any:
    """d_t², the second moment that M2PO bounds over the batch."""
    return batch.d * batch.d


def second_moment(batch: Batch, bound: float) -> float:
    """Largest d² such that the mean of all d² up to it stays within the bound; −inf where even the smallest is above.

    Reference: Zheng et al., M2PO (2025).
    """
    xp = batch.layout.xp
    values = xp.where(batch.mask, square(batch), xp.full_like(batch.d, xp.inf))
    ordered = xp.sort(xp.reshape(values, (-1,)))
    n = int(xp.sum(xp.astype(batch.mask, xp.int64)))
    ordered = ordered[:n]
    mean = xp.cumulative_sum(ordered, dtype=xp.float64) / xp.arange(1, n + 1, dtype=xp.float64, device=ordered.device)
    inside = int(xp.sum(xp.astype(mean <= bound, xp.int64)))
    return float(ordered[inside - 1]) if inside else float("-inf")


def binary_kl_both(batch: Batch) -> Any:
    """The larger of KL_B(old ‖ rollout) and KL_B(rollout ‖ old) of "this token or another", nats.

    Reference: KPop in Ring-2.6 (2026).
    """
    xp = batch.layout.xp
    return xp.maximum(_binary_kl(xp, batch.old, batch.rollout), _binary_kl(xp, batch.rollout, batch.old))


def dppo_tv(batch: Batch, low: float, high: float) -> Any:
    """How far the probability of the token has moved from the sampler's in the direction of its advantage, over its bound.

    (p − μ) / high for a positive advantage, (μ − p) / low for a negative one; −inf for none. p is of `logp`.

    Reference: DPPO, binary total variation (2026).
    """
    xp = batch.layout.xp
    moved = xp.exp(batch.logp) - xp.exp(batch.rollout)
    return _by_advantage(batch, moved / high, -moved / low)


def dppo_kl(batch: Batch) -> Any:
    """KL_B(rollout ‖ current) of the token where it has moved in the direction of its advantage, else −inf.

    Reference: DPPO, binary KL (2026).
    """
    xp = batch.layout.xp
    gap = _binary_kl(xp, batch.rollout, batch.logp)
    moved, away = batch.logp - batch.rollout, xp.full_like(gap, -xp.inf)
    return _by_advantage(batch, xp.where(moved > 0, gap, away), xp.where(moved < 0, gap, away))


def opsm(batch: Batch) -> Any:
    """Mean of rollout_logp − logp over the sequence at tokens with a negative advantage, −inf at the others.

    Reference: DeepSeek-V3.2, off-policy sequence masking (2025); the sampler is the rollout engine.
    """
    xp = batch.layout.xp
    mean = batch.total(batch.rollout - batch.logp) / batch.counts
    drift = xp.astype(xp.broadcast_to(mean, batch.layout.shape), batch.d.dtype)
    return _by_advantage(batch, xp.full_like(drift, -xp.inf), drift)


def _by_advantage(batch: Batch, positive: Any, negative: Any) -> Any:
    xp, advantages = batch.layout.xp, batch.need("advantages", "this mask")
    none = xp.full_like(positive, -xp.inf)
    return xp.where(advantages > 0, positive, xp.where(advantages < 0, negative, none))


def _binary_kl(xp: Any, logp: Any, logq: Any) -> Any:
    """p log(p/q) + (1 − p) log((1 − p)/(1 − q)), +inf where q is 1 and p is not."""
    zero = xp.zeros_like(logp)
    logp, logq = xp.minimum(logp, zero), xp.minimum(logq, zero)
    miss_p, miss_q = -xp.expm1(logp), -xp.expm1(logq)
    tiny = xp.full_like(miss_p, xp.finfo(miss_p.dtype).smallest_normal)
    others = miss_p * (xp.log(xp.maximum(miss_p, tiny)) - xp.log(xp.maximum(miss_q, tiny)))
    others = xp.where((miss_q == 0) & (miss_p > 0), xp.full_like(others, xp.inf), others)
    return xp.exp(logp) * (logp - logq) + xp.where(miss_p > 0, others, zero)
