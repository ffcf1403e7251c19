"""Pareto-smoothed importance weights."""

from typing import Any

import numpy as np

from unskew.correct._batch import Batch
from unskew.measure import smooth_tail

__all__ = ["smoothed"]


def smoothed(batch: Batch, log_weights: Any, *, by_sequence: bool) -> Any:
    """Log-weights whose largest ⌈min(0.2 n, 3 √n)⌉ are quantiles of the fitted Pareto distribution, in their own order.

    Args:
        log_weights: (B, T), or (B, 1) with `by_sequence`.

    Reference: Vehtari, Simpson, Gelman, Yao & Gabry, Pareto smoothed importance sampling (2024).
    """
    xp = batch.layout.xp
    where = xp.any(batch.mask, axis=1, keepdims=True) if by_sequence else batch.mask
    values, use = _numpy(log_weights), _numpy(where).astype(bool)
    out = values.astype(np.float64)
    out[use] = smooth_tail(out[use])
    return xp.asarray(out, dtype=log_weights.dtype, device=log_weights.device)


def _numpy(values: Any) -> np.ndarray:
    return np.from_dlpack(values.cpu()) if hasattr(values, "cpu") else np.asarray(values)
