"""Pareto-smoothed importance sampling: how reliable is a mean of these weights, and how many would it take?"""

from dataclasses import dataclass

import numpy as np

__all__ = ["PSIS", "psis", "psis_of_tail", "smooth_tail"]


@dataclass(frozen=True, slots=True)
class PSIS:
    """Tail shape of importance weights.

    Args:
        khat: shape k̂ of the generalised Pareto tail; NaN with fewer than 25 weights or a constant tail (−inf then).
        threshold: k̂ below min(1 − 1/log10 n, 0.7) is reliable for this n.
        n_needed: weights that a reliable mean would take at this k̂, 10^(1 / (1 − max(k̂, 0))); inf for k̂ ≥ 1.
        n: weights.
        error: asymptotic standard error of k̂, (1 + k̂) / √M for a tail of M.
    """

    khat: float
    threshold: float
    n_needed: float
    n: int
    error: float = float("nan")


def psis(log_weights: np.ndarray) -> PSIS:
    """k̂ of n log-weights, any scale. Takes the largest min(0.2 n, 3 √n).

    Example:
        >>> rng = np.random.default_rng(0)
        >>> 0.6 < psis(0.7 * rng.exponential(size=20000)).khat < 0.8
        True

    Reference: Vehtari, Simpson, Gelman, Yao & Gabry, Pareto smoothed importance sampling (2024).
    """
    log_weights = np.asarray(log_weights, np.float64)
    return psis_of_tail(log_weights, len(log_weights))


def tail_size(n: int) -> int:
    """How many of n weights are the tail: ⌈min(0.2 n, 3 √n)⌉."""
    return int(np.ceil(min(0.2 * n, 3 * np.sqrt(n))))


def psis_of_tail(largest: np.ndarray, n: int) -> PSIS:
    """k̂ from the largest log-weights of n, in any order, at least one more than the tail."""
    threshold = min(1 - 1 / np.log10(n), 0.7) if n > 1 else float("nan")
    size = tail_size(n)
    if n < 25 or size < 5 or len(largest) <= size:
        return PSIS(float("nan"), threshold, float("nan"), n)
    rest = len(largest) - size - 1
    largest = np.sort(np.partition(largest, rest)[rest:])[::-1]
    cut = largest[size]
    # Relative to the largest weight, so that e^(1e4) cannot overflow; k̂ does not depend on scale.
    excess = np.exp(largest[:size] - largest[0]) - np.exp(cut - largest[0])
    if not excess[0] > 0 or excess[0] <= 1e-12 * np.exp(cut - largest[0]):
        return PSIS(float("-inf"), threshold, 10.0, n)
    khat = _gpd(np.sort(excess))[0]
    needed = float("inf") if khat >= 1 else float(10 ** (1 / (1 - max(khat, 0.0))))
    return PSIS(khat, threshold, needed, n, (1 + khat) / float(np.sqrt(size)))


def smooth_tail(log_weights: np.ndarray) -> np.ndarray:
    """Log-weights whose tail is replaced by the quantiles of its fitted Pareto distribution, none above the largest raw one.

    Args:
        log_weights: (n,) float64; a tail of fewer than 5, or a constant one, is left as it is.

    Example:
        >>> raw = np.log(np.random.default_rng(0).pareto(1.5, 4000))
        >>> smooth = smooth_tail(raw)
        >>> bool(smooth.max() <= raw.max()), int((smooth != raw).sum())
        (True, 189)

    Reference: Vehtari, Simpson, Gelman, Yao & Gabry, Pareto smoothed importance sampling (2024).
    """
    n = len(log_weights)
    size = tail_size(n)
    if size < 5 or n <= size:
        return log_weights
    order = np.argsort(log_weights, kind="stable")
    tail, cut = order[-size:], log_weights[order[-size - 1]]
    top = log_weights[tail[-1]]
    base = np.exp(cut - top)
    excess = np.exp(log_weights[tail] - top) - base
    if not excess[-1] > 1e-12 * base:
        return log_weights
    k, sigma = _gpd(excess[excess > 0])
    p = (np.arange(1, size + 1) - 0.5) / size
    quantile = sigma * (np.expm1(-k * np.log1p(-p)) / k if abs(k) > 1e-12 else -np.log1p(-p))
    out = log_weights.copy()
    out[tail] = np.minimum(np.log(quantile + base), 0.0) + top
    return out


def _gpd(x: np.ndarray) -> tuple[float, float]:
    """(shape, scale) of a generalised Pareto distribution from ascending excesses > 0, by the weighted profile of Zhang & Stephens.

    The shape has the weak prior of 10 observations at 0.5.

    Reference: Zhang & Stephens, Technometrics 51 (2009); Vehtari et al. (2024), appendix.
    """
    n = len(x)
    quartile = x[max(int(n / 4 + 0.5) - 1, 0)]
    m = 30 + int(np.sqrt(n))
    b = 1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5))
    b = b / (3 * quartile) + 1 / x[-1] if quartile > 0 else b / (3 * x[x > 0][0]) + 1 / x[-1]
    k = np.log1p(-b[:, None] * x).mean(axis=1)
    profile = n * (np.log(-b / k) - k - 1)
    weight = np.exp(profile - profile.max())
    weight /= weight.sum()
    b_mean = float((b * weight).sum())
    shape = float(np.log1p(-b_mean * x).mean())
    return (n * shape + 10 * 0.5) / (n + 10), -shape / b_mean
