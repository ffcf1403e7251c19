"""Log importance weights of a batch at each level; every one is (B, T), or (B, 1) where a sequence has a single one."""

from collections.abc import Callable, Mapping
from typing import Any

from unskew.correct._batch import Batch

__all__ = ["LEVELS", "Level"]

Level = Callable[[Batch], Any]


def token(batch: Batch) -> Any:
    """d_t: unbiased for the next token, biased to second order for the sequence."""
    return batch.d


def sequence(batch: Batch) -> Any:
    """Σ_t d_t, the exact weight of a sequence; its variance grows exponentially with length."""
    return batch.total(batch.d)


def geometric(batch: Batch) -> Any:
    """Mean of d_t over the sequence, the log of the geometric mean; not an importance weight of anything.

    Reference: Zheng et al., GSPO (2025), of the ratio to the old policy.
    """
    return batch.total(batch.d) / batch.counts


def prefix(batch: Batch) -> Any:
    """Σ_{i≤t} d_i, the exact weight of the prefix that a token completes."""
    xp = batch.layout.xp
    return xp.cumulative_sum(batch.d, axis=1, dtype=xp.float64)


def minpro(batch: Batch) -> Any:
    """d_t + min_{i<t} d_i: the smallest ratio so far stands for the product of the prefix; the first token has d_1.

    Reference: Lei, Cheng & Tao, A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization (2026).
    """
    xp, d = batch.layout.xp, batch.d
    # Tokens outside the mask do not lower the minimum; the first token in it has none before it.
    before = xp.where(batch.mask, d, xp.full_like(d, xp.inf))
    before = xp.concat([xp.full_like(before[:, :1], xp.inf), before[:, :-1]], axis=1)
    step = 1
    while step < before.shape[1]:
        shifted = xp.concat([xp.full_like(before[:, :step], xp.inf), before[:, :-step]], axis=1)
        before, step = xp.minimum(before, shifted), 2 * step
    return d + xp.where(xp.isfinite(before), before, xp.zeros_like(before))


def turn(batch: Batch) -> Any:
    """Σ of d over the turn that a token belongs to (`turn_ids`, from 0)."""
    xp, ids = batch.layout.xp, batch.need("turn_ids", "a turn-level correction")
    out = xp.zeros(batch.layout.shape, dtype=xp.float64, device=batch.d.device)
    for k in range(int(xp.max(ids)) + 1 if batch.d.shape[0] and batch.d.shape[1] else 0):
        inside = ids == k
        out = xp.where(inside, batch.total(xp.where(inside, batch.d, xp.zeros_like(batch.d))), out)
    return out


LEVELS: Mapping[str, Level] = {
    "token": token, "seq": sequence, "geo": geometric, "prefix": prefix, "minpro": minpro, "turn": turn,
}  # fmt: skip
"""Level of a weight, by the name it has in a correction."""
