"""The statistics of a token that are summed, on any array-API array: one formula for numpy, torch and the tests."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_torch_namespace

from unskew._errors import UnskewError

__all__ = ["BIG", "BINS", "TAUS", "TOP", "TokenSums", "probability_terms", "ratio_terms", "skew_terms", "token_sums"]

TAUS = (1.01, 1.1, 1.5, 2.0, 5.0, 10.0)
"""F(τ) = share of tokens with max(ρ, 1/ρ) > τ is counted exactly for these."""

TOP = 1 << 17
"""Largest log-ratios kept, enough for the PSIS tail of 1.9e9 tokens."""

BINS = 1 << 16
BIG = 30.0
"""Tokens with a larger d enter ratio statistics in log space."""


def ratio_terms(xp: Any, d: Any) -> list[Any]:
    """k3, ρ − 1, ρ² − 1 and the reverse k3 of d ≤ 30, float64, any shape."""
    excess = xp.expm1(d)
    # In float64 this keeps 8 digits down to |d| = 1e-8; below that k3 is below 1e-16.
    k3 = excess - d
    return [k3, excess, excess * (excess + 2), excess * d - k3]


def skew_terms(xp: Any, d: Any, advantage: Any) -> list[tuple[Any, Any]]:
    """A d and A (ρ − 1), each where A > 0 and where A < 0: [(values, tokens)], d above 30 counted as 30."""
    none = xp.zeros_like(d)
    signs = (advantage > 0, advantage < 0)
    both = (d, xp.expm1(_at_most(xp, d, BIG)))
    return [(xp.where(sign, advantage * values, none), sign) for values in both for sign in signs]


def probability_terms(xp: Any, rollout: Any, old: Any, d: Any, keep: Any) -> list[Any]:
    """JS, e^|d| − 1, |q − p|, p, q, p², q², p q of p = e^rollout and q = e^old, 0 where `keep` is 0; |d| counts up to 300, log-probs to 100."""
    none = xp.zeros_like(d)
    d = _at_most(xp, -_at_most(xp, -d, 300.0), 300.0)  # squares of sums stay finite
    p, q = (xp.where(keep, xp.exp(_at_most(xp, x, 100.0)), none) for x in (rollout, old))
    # ½ (ρ log(2ρ/(1+ρ)) + log(2/(1+ρ))), the mean of which is JS, with log((1+ρ)/2) = d/2 + log cosh(d/2).
    excess, cosh = xp.expm1(d), xp.log1p(2 * xp.sinh(d / 4) ** 2)
    js = (excess * d / 2 - cosh * (excess + 2)) / 2
    gap = xp.where(xp.abs(d) < 1, p * excess, q - p)  # q − p loses the digits that d has
    return [js, xp.expm1(xp.abs(d)), xp.abs(gap), p, q, p * p, q * q, p * q]


@dataclass(frozen=True, slots=True, eq=False)
class TokenSums:
    """What a batch adds to a state, still where the batch is: nothing was read back.

    Args:
        sums, counts: (K, B) of every statistic and of the tokens behind it; large: (B,) tokens with d > 30.
        bad: (3,) masked, NaN, infinite; above: (6,); histogram: (65536,) int64.
        big: (5,) as in `MismatchState`; extremes: (2,) max |d|, max |p_old − p_rollout|.
        top: (min(B·T, 2^17),) the largest d in any order, −inf where there are fewer.
    """

    sums: Any
    counts: Any
    large: Any
    bad: Any
    above: Any
    histogram: Any
    big: Any
    extremes: Any
    top: Any


def token_sums(
    rollout_logp: Any, old_logp: Any, mask: Any, *, entropy: Any = None, noise_scale: Any = None, advantage: Any = None,
    probabilities: bool = False,
) -> TokenSums:  # fmt: skip
    """Sums of a padded batch on its own device, without a branch on data: it compiles as one graph.

    Args:
        rollout_logp, old_logp, mask, and the others where known: (B, T), any float dtype.

    Raises:
        UnskewError: shapes that do not fit.
    """
    xp, where = array_namespace(rollout_logp), device(rollout_logp)
    more = {"old_logp": old_logp, "mask": mask, "entropy": entropy, "noise_scale": noise_scale, "advantage": advantage}
    for name, values in more.items():
        if rollout_logp.ndim != 2 or (values is not None and tuple(values.shape) != tuple(rollout_logp.shape)):
            found = None if values is None else tuple(values.shape)
            raise UnskewError(
                f"{name} has shape {found}, rollout_logp {tuple(rollout_logp.shape)}",
                hint="give padded arrays (B, T)", exit_code=2,
            )  # fmt: skip
    mask = xp.astype(mask, xp.bool)
    rollout, old = (xp.astype(x, xp.float64) for x in (rollout_logp, old_logp))
    d = old - rollout
    finite = xp.isfinite(d)
    keep = mask & finite
    none = xp.zeros_like(d)
    nan = mask & (xp.isnan(rollout) | xp.isnan(old))
    d = xp.where(keep, d, none)
    size = xp.abs(d)
    large = d > BIG
    rows = [d, size, d * d, *ratio_terms(xp, xp.where(large, none, d))]
    rows += [xp.where(keep, rollout, none), xp.where(keep, old, none)]
    tokens = [keep] * len(rows)

    def known(values: Any) -> tuple[Any, Any]:
        values = none if values is None else xp.astype(values, xp.float64)
        ok = keep & xp.isfinite(values)
        return xp.where(ok, values, none), ok

    absent = xp.zeros_like(keep)
    found, ok = known(entropy)
    rows.append(xp.where(ok, old + found, none))
    tokens.append(ok if entropy is not None else absent)
    found, ok = known(noise_scale)
    rows += [xp.where(ok, d * d, none), found * found]
    tokens += [ok if noise_scale is not None else absent] * 2
    if advantage is None:
        rows += [none] * 4
        tokens += [absent] * 4
    else:
        found, _ = known(advantage)
        for values, sign in skew_terms(xp, d, found):
            rows.append(values)
            tokens.append(sign)
    found_all = probability_terms(xp, rollout, old, d, keep) if probabilities else [none] * 8
    rows += found_all
    tokens += [keep if probabilities else absent] * 8

    highest = _max(xp, xp.where(large, d, xp.full_like(d, BIG)))
    weight = xp.where(large, xp.exp(_at_most(xp, d - highest, 0.0)), none)
    n_large = xp.sum(xp.astype(large, xp.float64))
    big = xp.stack([
        n_large, xp.where(n_large > 0, highest, xp.full_like(highest, -np.inf)), xp.sum(weight), xp.sum(xp.where(large, d, none)),
        xp.sum(d * weight),
    ])  # fmt: skip
    return TokenSums(
        sums=xp.stack([xp.sum(values, axis=1) for values in rows]),
        counts=xp.stack([xp.sum(xp.astype(values, xp.float64), axis=1) for values in tokens]),
        large=xp.sum(xp.astype(large, xp.float64), axis=1),
        bad=xp.stack([xp.sum(xp.astype(x, xp.int64)) for x in (~mask, nan, mask & ~finite & ~nan)]),
        above=xp.stack([xp.sum(xp.astype(size > float(np.log(tau)), xp.int64)) for tau in TAUS]),
        histogram=_histogram(xp, xp.astype(d, xp.float32), keep, where),
        big=big,
        extremes=xp.stack([_max(xp, size), _max(xp, found_all[2])]),
        top=_largest(xp, xp.where(keep, d, xp.full_like(d, -np.inf))),
    )  # fmt: skip


def _at_most(xp: Any, values: Any, bound: float) -> Any:
    return xp.where(values > bound, xp.full_like(values, bound), values)


def _max(xp: Any, values: Any) -> Any:
    return xp.max(values) if 0 not in values.shape else xp.sum(values)


def _histogram(xp: Any, d: Any, keep: Any, where: Any) -> Any:
    """Counts by the upper 16 bits of float32. Views of bits and scatter are not in the array API: a port each."""
    if is_torch_namespace(xp):
        cell = (d.view(xp.int32) >> 16) & 0xFFFF
        return xp.zeros(BINS, dtype=xp.int64, device=where).index_add_(
            0, cell.reshape(-1).to(xp.int64), keep.reshape(-1).to(xp.int64)
        )
    bits = np.asarray(d).view(np.uint32)[np.asarray(keep)] >> np.uint32(16)
    return xp.asarray(np.bincount(bits, minlength=BINS), dtype=xp.int64)


def _largest(xp: Any, values: Any) -> Any:
    """The 2^17 largest, in any order. Selection is not in the array API: a port each."""
    values = xp.reshape(values, (-1,))
    count = min(values.shape[0], TOP)
    if is_torch_namespace(xp):
        return values.topk(count, sorted=False).values
    flat = np.asarray(values)
    return xp.asarray(np.partition(flat, len(flat) - count)[len(flat) - count :] if count else flat)
