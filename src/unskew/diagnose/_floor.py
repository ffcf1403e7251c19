"""The gap that two correct engines at their dtypes are expected to have."""

from dataclasses import dataclass

import numpy as np

__all__ = ["ABOVE", "FLOORS", "SEARCH", "SideFloor", "logit_noise", "side_floor"]

FLOORS = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 6e-2}
"""Logit noise σ of a whole forward against fp32, in nats: upper end of what real engines and small models measured."""

FEW_TOKENS = 64
"""Tokens below which no cause is searched for."""

ABOVE = 2.5
"""A σ̂ within this factor of its floor counts as being at the floor: kernels of one dtype differ by about 2."""

SEARCH = 1.25
"""A σ̂ above this factor of its floor is searched for causes: one that reproduces it need not be above `ABOVE`."""

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


@dataclass(frozen=True, slots=True)
class SideFloor:
    """Expected logit noise of one side against fp32.

    `declared` is the dtype the record declares (None if it does not); `sigma` in nats of logit noise; `source` says
    "measured" (this model in that dtype) or "table".
    """

    declared: str | None
    dtype: str
    sigma: float
    source: str


def logit_noise(gap: np.ndarray, noise_scale: np.ndarray) -> float:
    """σ̂ = √(Σd² / Σs²): logit noise that would make this gap, comparable across models; nats. NaN of no tokens.

    Example:
        >>> logit_noise(np.array([0.03, -0.04]), np.array([0.6, 0.8]))
        0.05
    """
    scale = float((noise_scale**2).sum())
    return float(np.sqrt((gap**2).sum() / scale)) if scale else float("nan")


def dtype_name(declared: str | None) -> str | None:
    """Canonical name of a declared dtype, None if it is not one of the three that have a floor.

    Example:
        >>> dtype_name("torch.bfloat16"), dtype_name("bf16"), dtype_name("auto")
        ('bfloat16', 'bfloat16', None)
    """
    if declared is None:
        return None
    name = declared.removeprefix("torch.").lower()
    name = _ALIASES.get(name, name)
    return name if name in FLOORS else None


def side_floor(declared: str | None, measured: dict[str, float], observed: float) -> SideFloor:
    """Floor of one side: its declared dtype's, measured where it was, else the lowest dtype that reaches `observed`."""
    dtype = dtype_name(declared)
    if dtype is None:
        reach = [name for name in FLOORS if observed <= ABOVE * measured.get(name, FLOORS[name])]
        dtype = reach[0] if reach else "bfloat16"
    return SideFloor(declared, dtype, measured.get(dtype, FLOORS[dtype]), "measured" if dtype in measured else "table")
