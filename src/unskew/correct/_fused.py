"""Token-level weights and kept tokens in one pass over memory, compiled; used where numba is installed (extra `fast`)."""

import numpy as np
from numba import njit

from unskew.measure._fused import COEFFICIENTS, LN2_HIGH, LN2_LOW, LOG2E, ROUND

__all__ = ["token_weights"]

_BLOCK = 1024
_C = COEFFICIENTS
# e^x leaves the normal doubles outside of these.
_LOW, _HIGH = -708.0, 709.0


@njit(fastmath={"contract"}, cache=True, nogil=True)
def _exp(x, out, power, bits, n):  # noqa: ANN
    """e^x of a block, −708 ≤ x ≤ 709, within 2 ulp; `power` and `bits` are one scratch array seen twice."""
    for i in range(n):
        power[i] = x[i] * LOG2E + ROUND
        out[i] = power[i] - ROUND
    for i in range(n):
        bits[i] = (bits[i] + 1023) << 52
    for i in range(n):
        r = (x[i] - out[i] * LN2_HIGH) - out[i] * LN2_LOW
        p = (((((_C[11] * r + _C[10]) * r + _C[9]) * r + _C[8]) * r + _C[7]) * r + _C[6]) * r + _C[5]
        p = ((((p * r + _C[4]) * r + _C[3]) * r + _C[2]) * r + _C[1]) * r + _C[0]
        out[i] = power[i] * (1.0 + (r + r * r * p))


@njit(cache=True, nogil=True)
def token_weights(rollout, old, mask, inside, clip, weighted, weight, keep, non_finite):  # noqa: ANN
    """Fill `weight`, `keep` and `non_finite` of tokens whose log-ratio alone decides.

    Args:
        rollout, old: (N,) float32 or float64, the same; mask: (N,) uint8.
        inside: (low, high) of the log-ratios that stay.
        clip: (low, high) of the weight.
        weighted: whether a token that stays weighs its ratio, else 1.
        weight: (N,) like `rollout`; keep, non_finite: (N,) uint8.
    """
    x, out, power = np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK)
    bits = power.view(np.int64)
    for start in range(0, len(rollout), _BLOCK):
        n = min(_BLOCK, len(rollout) - start)
        ratio, stays, unknown = weight[start : start + n], keep[start : start + n], non_finite[start : start + n]
        a, b, use = rollout[start : start + n], old[start : start + n], mask[start : start + n]
        for i in range(n):
            d = b[i] - a[i]
            finite = np.uint8((d - d) == 0)
            stays[i] = use[i] & finite & np.uint8(d >= inside[0]) & np.uint8(d <= inside[1])
            unknown[i] = use[i] & (finite ^ np.uint8(1))
            ratio[i] = d if stays[i] else 0.0
        if not weighted:
            for i in range(n):
                ratio[i] = stays[i]
            continue
        for i in range(n):
            x[i] = min(max(np.float64(ratio[i]), _LOW), _HIGH)
        _exp(x, out, power, bits, n)
        for i in range(n):
            d = np.float64(ratio[i])
            w = min(max(out[i], clip[0]), clip[1])
            w = clip[0] if d < _LOW else w
            w = clip[1] if d > _HIGH else w
            ratio[i] = w if stays[i] else 0.0
