"""What the figures would be if rounding noise at the floor were all there is."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log10, pi, sqrt
from typing import Any

import numpy as np

from unskew.report._words import finite
from unskew.trace import Trace

__all__ = ["NoiseFloor", "expected", "noise_floor"]


@dataclass(frozen=True, eq=False, slots=True)
class NoiseFloor:
    """Noise of `sigma` nats on each logit, which moves the log-prob of token t by σ · `scale`[t].

    Args:
        sigma: σ̂ of the floor, nats.
        scale: s = √((1 − p_y)² + Σ_{v≠y} p_v²), float64 (N,): recorded, or 1.2 (1 − p_y) where it is not.
    """

    sigma: float
    scale: np.ndarray

    @property
    def mean_abs(self) -> np.ndarray:
        """Expected |d| of each token, σ s √(2/π), nats (N,)."""
        return self.sigma * self.scale * sqrt(2 / pi)


def noise_floor(trace: Trace, verdict: Mapping[str, Any] | None) -> NoiseFloor | None:
    """The floor that a complete verdict names, on the tokens of a trace; None where it names none."""
    sigma = verdict["floor"]["logit_noise"]["value"] if verdict else None
    if not finite(sigma):
        return None
    p = -np.expm1(np.minimum(trace.tokens("rollout_logp").astype(np.float64), 0.0)) * 1.2
    if trace.has("noise_scale"):
        recorded = trace.tokens("noise_scale").astype(np.float64)
        p = np.where(np.isfinite(recorded), recorded, p)
    return NoiseFloor(float(sigma), np.nan_to_num(p, nan=1.2))


def expected(floor: NoiseFloor | None, mask: np.ndarray, rows: np.ndarray, n_rows: int) -> dict[str, float]:
    """Figures at the floor, by name.

    Args:
        floor: None leaves what holds at any floor: mean_ratio 1, calibration 0.
        mask: tokens of the loss, bool (N,).
        rows: row of each token, int (N,).
        n_rows: sequences.

    Example:
        >>> at = expected(NoiseFloor(0.1, np.array([0.5, 0.5])), np.array([True, True]), np.array([0, 1]), 2)
        >>> round(at["mean_abs"], 4), round(at["kl_rollout_old_k3"], 5)
        (0.0399, 0.00125)
    """
    n = int(mask.sum())
    out = {"mean_ratio": 1.0, "calibration": 0.0}
    if n > 10:
        out["khat_token"] = min(1 - 1 / log10(n), 0.7)
    if floor is None or not n:
        return out
    variance = np.where(mask, (floor.sigma * floor.scale) ** 2, 0.0)
    # A sum over a sequence is Gaussian with variance v, and E e^S = e^(v/2).
    sums = np.minimum(np.bincount(rows, variance, n_rows), 50.0)
    return out | {
        "logit_noise": floor.sigma, "mean_abs": float(floor.mean_abs[mask].mean()),
        "kl_rollout_old_k3": float(variance.sum()) / n / 2,
        "ess_sequence": float(np.exp(sums / 2).mean() ** 2 / np.exp(2 * sums).mean()),
    }  # fmt: skip
