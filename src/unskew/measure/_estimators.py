"""Divergence estimators of one token's log-ratio, on any array-API array, accurate where the textbook forms are not."""

from typing import Any

from array_api_compat import array_namespace

__all__ = ["chi2", "k1", "k2", "k3", "k3_reverse"]

_SERIES = 0.125


def k1(d: Any) -> Any:
    """k1 = −d, whose mean under the rollout's tokens is KL(rollout ‖ old); same shape and dtype as d, nats.

    Args:
        d: log-ratio old_logp − rollout_logp, any shape.

    Reference: Schulman, Approximating KL divergence (2020).
    """
    return -d


def k2(d: Any) -> Any:
    """k2 = d²/2, the second-order form of either KL direction; same shape and dtype as d, nats."""
    return d * d / 2


def k3(d: Any) -> Any:
    """k3 = ρ − 1 − log ρ with ρ = e^d, ≥ 0, whose mean is KL(rollout ‖ old); same shape and dtype as d, nats.

    For |d| < 1/8 a series stands in: e^d − d − 1 cancels and in float32 returns noise below 1e-4, even negative.

    Example:
        >>> import numpy as np
        >>> d = np.array([1e-5, -1.0], np.float32)
        >>> [f"{value:.4e}" for value in k3(d)], f"{(np.exp(d) - 1 - d)[0]:.0e}"
        (['5.0000e-11', '3.6788e-01'], '1e-08')

    Reference: Schulman, Approximating KL divergence (2020).
    """
    xp = array_namespace(d)
    near = xp.where(xp.abs(d) < _SERIES, d, 0 * d)
    series = near * near / 2 * (1 + near / 3 * (1 + near / 4 * (1 + near / 5 * (1 + near / 6 * (1 + near / 7)))))
    return xp.where(xp.abs(d) < _SERIES, series, xp.expm1(d) - d)


def k3_reverse(d: Any) -> Any:
    """ρ·d − (ρ − 1) ≥ 0, whose mean under the rollout's tokens is KL(old ‖ rollout); same shape and dtype, nats.

    By importance weights from the same tokens, never by a sign-swapped e^(−d).

    Example:
        >>> import numpy as np
        >>> round(float(k3_reverse(np.asarray(1.0))), 6)
        1.0
    """
    xp = array_namespace(d)
    near = xp.where(xp.abs(d) < _SERIES, d, 0 * d)
    series = near * near / 2 * (1 + 2 * near / 3 * (1 + 3 * near / 8 * (1 + 4 * near / 15 * (1 + 5 * near / 24))))
    return xp.where(xp.abs(d) < _SERIES, series, xp.exp(d) * d - xp.expm1(d))


def chi2(d: Any) -> Any:
    """ρ² − 1 = expm1(2d), whose mean under the rollout's tokens is χ²(old ‖ rollout); same shape and dtype.

    Its estimate fails for heavy tails: where k̂ > 0.5 the mean has no finite variance.
    """
    return array_namespace(d).expm1(2 * d)
