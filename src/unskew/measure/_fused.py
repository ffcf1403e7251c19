"""All token statistics in one pass over memory, compiled; used where numba is installed (extra `fast`)."""

import math

import numpy as np
from numba import njit

__all__ = ["COEFFICIENTS", "LN2_HIGH", "LN2_LOW", "LOG2E", "ROUND", "scan"]

_BLOCK = 1024
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693147180369123816490, 1.90821492927058770002e-10
# Adding and taking this away rounds a double to the nearest integer, which then stands in its low bits.
ROUND = 6755399441055744.0
_BIG = 30.0
_HALF_LN2 = 0.34657359
# (e^r − 1 − r) / r² = Σ r^k / (k + 2)!; 12 terms are exact to the last bit for |r| ≤ ln 2 / 2, 8 for |r| ≤ 1/32.
COEFFICIENTS = _C = tuple(1.0 / math.factorial(k) for k in range(2, 14))

# log cosh u = u² Σ c_k u^(2k), for |u| ≤ ln 2 / 4 within 1e-15 relative.
_L = (1 / 2, -1 / 12, 1 / 45, -17 / 2520, 31 / 14175, -691 / 935550, 10922 / 42567525, -929569 / 10216206000)

# Sums may be reordered and fused. NaN and infinity keep their meaning where they are counted.
_SUMS = {"contract", "reassoc", "nsz", "arcp"}


@njit(fastmath=_SUMS, cache=True, nogil=True)
def _load(rollout, old, start, n, d):  # noqa: ANN
    """d of a block; (Σ rollout, a number that is not 0 if some d is not finite)."""
    total, unknown = 0.0, 0.0
    for i in range(n):
        a = np.float64(rollout[start + i])
        x = np.float64(old[start + i]) - a
        d[i] = x
        total += a
        unknown += x * 0.0
    return total, unknown


@njit(cache=True, nogil=True)
def _masked(mask, start, n):  # noqa: ANN
    """Tokens outside the mask; an empty mask has none."""
    count = 0
    if not len(mask):
        return count
    for i in range(n):
        count += mask[start + i] == 0
    return count


@njit(fastmath=_SUMS, cache=True, nogil=True, error_model="numpy")
def _load_some(rollout, mask, start, n, d, use):  # noqa: ANN
    """Set d to 0 where masked or not finite: (tokens kept, Σ rollout of those)."""
    kept, total = 0, 0.0
    for i in range(n):
        ok = (len(mask) == 0 or mask[start + i] != 0) & ((d[i] - d[i]) == 0.0)
        use[i] = ok
        d[i] = d[i] if ok else 0.0
        total += np.float64(rollout[start + i]) if ok else 0.0
        kept += ok
    return kept, total


@njit(cache=True, nogil=True)
def _extremes(bits, out, n):  # noqa: ANN
    """Bits of the largest |d| and of the largest d, from the bits of finite doubles, whose order is that of integers."""
    size, high = np.int64(0), np.int64(-(2**63))
    for i in range(n):
        x = bits[i]
        size = max(size, x & 0x7FFFFFFFFFFFFFFF)
        high = max(high, x ^ ((x >> 63) & 0x7FFFFFFFFFFFFFFF))
    out[0], out[1] = size, high ^ ((high >> 63) & 0x7FFFFFFFFFFFFFFF)


@njit(fastmath={"contract"}, cache=True, nogil=True)
def _expm1_tiny(x, out, n):  # noqa: ANN
    """e^x − 1 for |x| ≤ 1/32."""
    for i in range(n):
        r = x[i]
        p = ((((((_C[7] * r + _C[6]) * r + _C[5]) * r + _C[4]) * r + _C[3]) * r + _C[2]) * r + _C[1]) * r + _C[0]
        out[i] = r + r * r * p


@njit(fastmath={"contract"}, cache=True, nogil=True)
def _expm1_small(x, out, n):  # noqa: ANN
    """e^x − 1 for |x| ≤ ln 2 / 2."""
    for i in range(n):
        r = x[i]
        p = (((((_C[11] * r + _C[10]) * r + _C[9]) * r + _C[8]) * r + _C[7]) * r + _C[6]) * r + _C[5]
        p = ((((p * r + _C[4]) * r + _C[3]) * r + _C[2]) * r + _C[1]) * r + _C[0]
        out[i] = r + r * r * p


@njit(fastmath={"contract"}, cache=True, nogil=True)
def _expm1(x, out, power, bits, n):  # noqa: ANN
    """e^x − 1 for −700 ≤ x ≤ 30 within 2 ulp; `power` and `bits` are one scratch array seen twice."""
    for i in range(n):
        power[i] = x[i] * LOG2E + ROUND
        out[i] = power[i] - ROUND
    for i in range(n):
        bits[i] = (bits[i] + 1023) << 52
    for i in range(n):
        r = (x[i] - out[i] * LN2_HIGH) - out[i] * LN2_LOW
        p = (((((_C[11] * r + _C[10]) * r + _C[9]) * r + _C[8]) * r + _C[7]) * r + _C[6]) * r + _C[5]
        p = ((((p * r + _C[4]) * r + _C[3]) * r + _C[2]) * r + _C[1]) * r + _C[0]
        out[i] = power[i] * (r + r * r * p) + (power[i] - 1.0)


@njit(fastmath=_SUMS, cache=True, nogil=True)
def _moments(d, excess, n):  # noqa: ANN
    """Σ of d, |d|, d², k3, ρ − 1, ρ² − 1 and the reverse k3 of a block without d > 30."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = 0.0
    for i in range(n):
        x, e = d[i], excess[i]
        k3 = e - x
        s0 += x
        s1 += abs(x)
        s2 += x * x
        s3 += k3
        s4 += e
        s5 += e * (e + 2.0)
        s6 += e * x - k3
    return s0, s1, s2, s3, s4, s5, s6


@njit(fastmath=_SUMS, cache=True, nogil=True)
def _capped(rollout, start, n, use, out):  # noqa: ANN
    """Log-probs that `_expm1` can take, 0 where not in use."""
    for i in range(n):
        x = np.float64(rollout[start + i])
        x = x if use[i] else 0.0
        out[i] = min(max(x, -700.0), 100.0)


@njit(fastmath=_SUMS, cache=True, nogil=True)
def _probabilities(d, excess, p, use, gap, n):  # noqa: ANN
    """Σ of JS, e^|d| − 1, |q − p|, p, q, p², q², p q; `p` holds p − 1, `gap` gets q − p; exact for |d| ≤ ln 2 / 2."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    for i in range(n):
        x, e = d[i], excess[i]
        u = 0.25 * x * x
        cosh = ((((((_L[7] * u + _L[6]) * u + _L[5]) * u + _L[4]) * u + _L[3]) * u + _L[2]) * u + _L[1]) * u + _L[0]
        a = p[i] + 1.0 if use[i] else 0.0
        b = a + a * e
        gap[i] = a * e
        s0 += 0.25 * e * x - 0.5 * u * cosh * (e + 2.0)
        s1 += e if x >= 0.0 else -e / (1.0 + e)
        s2 += abs(a * e)
        s3 += a
        s4 += b
        s5 += a * a
        s6 += b * b
        s7 += a * b
    return s0, s1, s2, s3, s4, s5, s6, s7


@njit(cache=True, nogil=True, error_model="numpy")
def _far(rollout, old, start, d, excess, use, n, sums):  # noqa: ANN
    """Take tokens with |d| > ln 2 / 2 out of what `_probabilities` sees and add them one by one; their largest |q − p|."""
    largest = 0.0
    for i in range(n):
        if abs(d[i]) <= _HALF_LN2:
            continue
        x = min(max(d[i], -300.0), 300.0)
        a, b = np.exp(min(np.float64(rollout[start + i]), 100.0)), np.exp(min(np.float64(old[start + i]), 100.0))
        e, cosh = np.expm1(x), np.log1p(2.0 * np.sinh(0.25 * x) ** 2)
        sums[0] += 0.5 * (0.5 * e * x - cosh * (e + 2.0))
        sums[1] += np.expm1(abs(x))
        sums[2] += abs(b - a)
        sums[3] += a
        sums[4] += b
        sums[5] += a * a
        sums[6] += b * b
        sums[7] += a * b
        d[i] = excess[i] = 0.0
        use[i] = False
        largest = max(largest, abs(b - a))
    return largest


@njit(fastmath=_SUMS, cache=True, nogil=True)
def _above(d, bound, n):  # noqa: ANN
    """Tokens with |d| above the bound."""
    count = 0
    for i in range(n):
        count += abs(d[i]) > bound
    return count


@njit(fastmath=_SUMS, cache=True, nogil=True)
def _known(values, start, n, use):  # noqa: ANN
    """(how many, Σ, Σ²) of the finite values at tokens in use."""
    count, total, square = 0, 0.0, 0.0
    for i in range(n):
        v = np.float64(values[start + i])
        ok = use[i] & ((v - v) == 0.0)
        total += v if ok else 0.0
        square += v * v if ok else 0.0
        count += ok
    return count, total, square


@njit(fastmath=_SUMS, cache=True, nogil=True)
def _among(values, other, start, n, use, squared):  # noqa: ANN
    """Σ other (or its square) where the values are finite, tokens in use."""
    total = 0.0
    for i in range(n):
        v = np.float64(values[start + i])
        x = np.float64(other[i])
        total += (x * x if squared else x) if use[i] & ((v - v) == 0.0) else 0.0
    return total


@njit(cache=True, nogil=True)
def _count(d, keys, use, n, whole, tables):  # noqa: ANN
    """Histogram on the upper 16 bits of float32; two tables, so that equal neighbours do not wait for each other."""
    if whole:
        for i in range(0, n - 1, 2):
            tables[0, keys[i] >> 16] += 1
            tables[1, keys[i + 1] >> 16] += 1
        if n % 2:
            tables[0, keys[n - 1] >> 16] += 1
    else:
        for i in range(n):
            if use[i]:
                tables[0, keys[i] >> 16] += 1


@njit(cache=True, nogil=True)
def _collect(d, use, n, cut, top, filled):  # noqa: ANN
    """Append the values at or above the cut."""
    for i in range(n):
        if d[i] >= cut and use[i]:
            top[filled] = d[i]
            filled += 1
    return filled


@njit(cache=True, nogil=True)
def _edge(tables, edges, keep):  # noqa: ANN
    """Lower edge of the highest bin at and above which there are `keep` values, and the number there."""
    half, total = len(edges) // 2, 0
    for k in range(half - 1, -1, -1):
        total += tables[0, k] + tables[1, k]
        if total >= keep:
            return edges[k]
    for k in range(half, 2 * half):
        total += tables[0, k] + tables[1, k]
        if total >= keep:
            return edges[k + 1] if k + 1 < 2 * half else -np.inf
    return -np.inf


@njit(cache=True, nogil=True)
def _add_big(big, d):  # noqa: ANN
    """One more token with d > 30: (number, max, Σ e^(d − max), Σ d, Σ d e^(d − max))."""
    if d > big[1]:
        factor = np.exp(big[1] - d) if big[0] else 0.0
        big[2] *= factor
        big[4] *= factor
        big[1] = d
    weight = np.exp(d - big[1])
    big[0] += 1
    big[2] += weight
    big[3] += d
    big[4] += d * weight


@njit(cache=True, nogil=True, error_model="numpy")
def scan(
    rollout,
    old,
    mask,
    cu,
    entropy,
    scale,
    log_taus,
    edges,
    sums,
    counts,
    large,
    tables,
    above,
    bad,
    big,
    top,
    keep_top,
    probabilities,
):  # noqa: ANN
    """Fill the sums of every sequence and what is kept of the whole: (max |d|, max |q − p|, how many of `top` are filled).

    Args:
        rollout, old: (N,) float32 or float64; mask: (N,) uint8, or (0,) where all take part; cu: (B+1,) int64.
        entropy, scale: (N,), or (0,) where not known.
        log_taus: log τ, rising; edges: the float32 that starts each bin, as float64.
        sums: (K, B) of the statistics in the order of `MEANS`, filled; counts: (3, B) of finite tokens, of those with
            entropy, of those with scale; large: (B,) of tokens with d > 30.
        tables: (2, bins) int64, whose sum is the histogram; above: as in `MismatchState`; bad: (3,) masked, NaN, infinite;
            big: (5,).
        top: (≥ 3 · keep_top,) scratch for the largest d; the first are returned, unordered, all of the largest `keep_top`.
        probabilities: whether sums 16 to 23 are filled.
    """
    d, small, excess, power = np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK)
    bits, single = power.view(np.int64), np.empty(_BLOCK, np.float32)
    keys, use = single.view(np.uint32), np.empty(_BLOCK, np.bool_)
    d_bits, extremes = d.view(np.int64), np.empty(2)
    extremes_bits = extremes.view(np.int64)
    p, gap = np.empty(_BLOCK), np.empty(_BLOCK)
    gap_bits, widest = gap.view(np.int64), 0.0
    limit, filled, cut, all_in_use = 0.0, 0, -np.inf, False
    for row in range(len(cu) - 1):
        for start in range(cu[row], cu[row + 1], _BLOCK):
            n = min(_BLOCK, cu[row + 1] - start)
            kept = n
            total, unknown = _load(rollout, old, start, n, d)
            if unknown != 0.0 or _masked(mask, start, n):
                kept, total = _load_some(rollout, mask, start, n, d, use)
            elif not all_in_use:
                use[:] = True
            all_in_use = kept == n and n == _BLOCK
            counts[0, row] += kept
            sums[7, row] += total
            if kept < n:
                for i in range(n):
                    if len(mask) and mask[start + i] == 0:
                        bad[0] += 1
                    elif not use[i]:
                        bad[1 if np.isnan(old[start + i]) or np.isnan(rollout[start + i]) else 2] += 1
            _extremes(d_bits, extremes_bits, n)
            size, high = extremes[0], extremes[1]
            limit = max(limit, size)
            plain = d
            if size <= 0.03125:
                _expm1_tiny(d, excess, n)
            elif size <= _HALF_LN2:
                _expm1_small(d, excess, n)
            else:
                if size > _BIG:
                    for i in range(n):
                        small[i] = d[i]
                        if d[i] > _BIG:
                            large[row] += 1.0
                            sums[0, row] += d[i]
                            sums[1, row] += d[i]
                            sums[2, row] += d[i] * d[i]
                            _add_big(big, d[i])
                            small[i] = 0.0
                    plain = small
                    for i in range(n):
                        power[i] = max(small[i], -700.0)
                    _expm1(power.copy(), excess, power, bits, n)
                else:
                    _expm1(d, excess, power, bits, n)
            s = _moments(plain, excess, n)
            for k in range(7):
                sums[k, row] += s[k]
            for t in range(len(log_taus)):
                if size <= log_taus[t]:
                    break
                above[t] += _above(d, log_taus[t], n)
            if len(entropy):
                known, total, _ = _known(entropy, start, n, use)
                counts[1, row] += known
                sums[9, row] += total + _among(entropy, old[start : start + n], start, n, use, False)
            if len(scale):
                known, _, square = _known(scale, start, n, use)
                counts[2, row] += known
                sums[10, row] += _among(scale, d, start, n, use, True)
                sums[11, row] += square
            for i in range(n):
                single[i] = d[i]
            _count(d, keys, use, n, kept == n, tables)
            if high >= cut:
                filled = _collect(d, use, n, cut, top, filled)
                if filled > len(top) - _BLOCK:
                    cut = _edge(tables, edges, keep_top)
                    whole, filled = filled, 0
                    for i in range(whole):
                        if top[i] >= cut:
                            top[filled] = top[i]
                            filled += 1
            if probabilities:
                if size > _HALF_LN2:
                    widest = max(widest, _far(rollout, old, start, d, excess, use, n, sums[16:, row]))
                    all_in_use = False
                _capped(rollout, start, n, use, small)
                _expm1(small, p, power, bits, n)
                found = _probabilities(d, excess, p, use, gap, n)
                for k in range(8):
                    sums[16 + k, row] += found[k]
                _extremes(gap_bits, extremes_bits, n)
                widest = max(widest, extremes[0])
    for row in range(len(cu) - 1):
        sums[8, row] = sums[7, row] + sums[0, row]
    return limit, widest, filled
