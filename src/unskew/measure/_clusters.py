"""Means of tokens with intervals over the sequences or groups they came in."""

from math import isfinite, nan, sqrt

import numpy as np

from unskew.measure._figures import Figure

__all__ = ["cluster_mean"]


def cluster_mean(values: np.ndarray, sizes: np.ndarray, unit: str) -> Figure:
    """Σ y_c / Σ n_c with a 95 % interval from the spread of y_c − mean · n_c over clusters.

    Args:
        values: y_c, the sum over each cluster, float64 (C,).
        sizes: n_c, what it is a mean over, (C,); clusters of size 0 do not count.

    Example:
        >>> figure = cluster_mean(np.array([1.0, 3.0, 2.0]), np.array([2, 2, 2]), "share")
        >>> figure.value, figure.n, [round(x, 3) for x in figure.interval]
        (1.0, 6, [0.434, 1.566])

    Reference: ratio estimator, Cochran, Sampling Techniques (1977), §6.
    """
    used = sizes > 0
    values, sizes = values[used].astype(np.float64), sizes[used].astype(np.float64)
    clusters, total = len(values), float(sizes.sum())
    if not clusters:
        return Figure(None, unit, 0, why="nothing to average")
    mean = float(values.sum()) / total
    error = sqrt(float(((values - mean * sizes) ** 2).sum()) * clusters / (clusters - 1)) / total if clusters > 1 else nan
    return Figure(mean, unit, int(total), (mean - 1.96 * error, mean + 1.96 * error) if isfinite(error) else None)
