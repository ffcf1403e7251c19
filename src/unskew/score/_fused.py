"""Log-prob, entropy and Σp² of rows of logits in one pass over memory, compiled; used where numba is installed (extra `fast`)."""

import math

import numpy as np
from numba import njit

__all__ = ["score_rows"]

_BLOCK = 2048
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693145751953125), np.float32(1.42860677e-06)
# Adding and taking this away rounds a float32 to the nearest integer, which then stands in its low bits.
_ROUND = np.float32(12582912.0)
# e^−87 is the smallest power of e that is a normal float32: a logit that far below the largest, or at −inf, adds nothing.
_FLOOR = np.float32(-87.0)
_C = tuple(np.float32(1.0 / math.factorial(k)) for k in range(8))


@njit(cache=True, nogil=True)
def _load(block, shift, bits):  # noqa: ANN
    """Bits of a block as float32, and the largest, NaN if one is: the order of floats is that of such integers."""
    most, size = np.int32(-(2**31)), np.int32(0)
    for i in range(len(block)):
        b = np.int32(np.int32(block[i]) << np.int32(shift))
        bits[i] = b
        most = max(most, np.int32(b ^ ((b >> np.int32(31)) & np.int32(0x7FFFFFFF))))
        size = max(size, np.int32(b & np.int32(0x7FFFFFFF)))
    if size > np.int32(0x7F800000):
        return np.float32(np.nan)
    return np.int32(most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit(fastmath={"contract"}, cache=True, nogil=True)
def _weigh(x, top, scale, d, w, n):  # noqa: ANN
    """d = (x − top) / T and w = e^d within 2 ulp; NaN stays NaN."""
    for i in range(n):
        v = (x[i] - top) * scale
        v = _FLOOR if v < _FLOOR else v
        power = v * _LOG2E + _ROUND
        k = power - _ROUND
        r = (v - k * _LN2_HIGH) - k * _LN2_LOW
        p = ((((((_C[7] * r + _C[6]) * r + _C[5]) * r + _C[4]) * r + _C[3]) * r + _C[2]) * r + _C[1]) * r + _C[0]
        d[i] = v
        e = p * np.int32((np.float32(power).view(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
        w[i] = np.float32(0.0) if v <= _FLOOR else e


@njit(fastmath={"contract", "reassoc", "nsz", "arcp"}, cache=True, nogil=True)
def _sums(d, w, n):  # noqa: ANN
    """Σ w, Σ w d, Σ w² of a block."""
    s0 = s1 = s2 = np.float32(0.0)
    for i in range(n):
        s0 += w[i]
        s1 += w[i] * d[i]
        s2 += w[i] * w[i]
    return s0, s1, s2


@njit(cache=True, nogil=True, error_model="numpy")
def score_rows(rows, shift, ids, temperature, out):  # noqa: ANN
    """Log-prob, entropy, Σ_{v≠y} p_v and Σ_{v≠y} p_v² of each row.

    The chosen token is left out of the sums and added in float64, so that nothing is lost where it has nearly all the mass.

    Args:
        rows: (n, V) bits of the logits: int32 of float32 with shift 0, or uint16 of bfloat16 with shift 16.
        ids: (n,) chosen token y of each row.
        temperature: what the logits are divided by.
        out: (4, n) float64, filled; NaN where a logit is NaN or +inf, or all are −inf.
    """
    bits, d, w = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    x, scale, vocab = bits.view(np.float32), np.float32(1.0 / temperature), rows.shape[1]
    for row in range(rows.shape[0]):
        top, mine = np.float32(-np.inf), np.float32(0.0)
        z, zd, zz = 0.0, 0.0, 0.0
        for start in range(0, vocab, _BLOCK):
            n = min(_BLOCK, vocab - start)
            most = _load(rows[row, start : start + n], shift, bits)
            if most > top or most != most:
                if z > 0.0:
                    down = (np.float64(top) - np.float64(most)) / temperature
                    factor = np.exp(down)
                    zd, z, zz = factor * (zd + down * z), factor * z, factor * factor * zz
                top = most
            if most == -np.inf and top == -np.inf:
                d[:n] = w[:n] = np.float32(0.0)
            else:
                _weigh(x, top, scale, d, w, n)
            chosen = ids[row] - start
            if 0 <= chosen < n:
                mine, w[chosen] = x[chosen], np.float32(0.0)
            s0, s1, s2 = _sums(d, w, n)
            z, zd, zz = z + s0, zd + s1, zz + s2
        far = (np.float64(mine) - np.float64(top)) / temperature
        own = np.exp(far)
        total = z + own
        log_total = np.log1p(z) if far == 0.0 else np.log(total)
        out[0, row] = far - log_total
        out[1, row] = log_total - (zd + (own * far if own > 0.0 else 0.0)) / total
        out[2, row], out[3, row] = z / total, zz / (total * total)
