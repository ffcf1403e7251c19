"""Number formats that engines store weights, activations and K/V in: rounding to them and back."""

from functools import cache

import torch

from unskew._errors import UnskewError

__all__ = ["GRIDS", "fake_quantize", "rounding_error"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8 = {"fp8-e4m3": (torch.float8_e4m3fn, 448.0), "fp8-e5m2": (torch.float8_e5m2, 57344.0)}
GRIDS = ("fp8-e4m3", "fp8-e5m2", "int8", "int4", "int4-asym", "int3", "nvfp4", "bfloat16", "float16")
"""Grids by name; a format is a grid and what shares a scale: "tensor", "channel" (a row), "token", "groupN" or "one" (scale 1)."""


def fake_quantize(values: torch.Tensor, format: str) -> torch.Tensor:
    """Values rounded to a format and back; shape and dtype stay.

    Formula: s · grid(x / s), s from the largest |x| of what shares a scale along the last axis.

    Args:
        values: (…, D).
        format: "grid/scope", such as "fp8-e4m3/tensor", "int8/channel", "int4/group32"; or "bfloat16", "float16".

    Raises:
        UnskewError: no such format.

    Example:
        >>> fake_quantize(torch.tensor([[1.0, -0.3, 0.02]]), "int8/channel").mul(127).round(decimals=3)
        tensor([[127., -38.,   3.]])
    """
    grid, _, scope = format.partition("/")
    if grid not in GRIDS or not (scope in ("", "one", "tensor", "channel", "token") or scope.startswith(("group", "block"))):
        raise UnskewError(
            f"no number format {format!r}", hint=f"one of {', '.join(GRIDS)} with /tensor, /channel, /group32", exit_code=2
        )
    x = values.float()
    if grid in ("bfloat16", "float16"):
        return x.to(getattr(torch, grid)).to(values.dtype)
    if scope.startswith("block"):
        return _blocks(x, grid, int(scope[5:])).to(values.dtype)
    shape, width = x.shape, x.shape[-1]
    group = int(scope[5:]) if scope.startswith("group") else 0
    if group and width % group:
        x = torch.nn.functional.pad(x, (0, group - width % group))
    if group:
        x = x.reshape(*x.shape[:-1], -1, group)
    out = _rounded(x, grid, scope)
    if group:
        out = out.reshape(*shape[:-1], -1)[..., :width]
    return out.to(values.dtype)


@cache
def rounding_error(format: str) -> float:
    """Root mean square error of a format relative to the values', for normal values with 128 to a row.

    Example:
        >>> rounding_error("bfloat16") < rounding_error("fp8-e4m3/token") < rounding_error("int4/token")
        True
    """
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    return float((fake_quantize(values, format) - values).norm() / values.norm())


def _rounded(x: torch.Tensor, grid: str, scope: str) -> torch.Tensor:
    top = x.abs().amax() if scope == "tensor" else x.abs().amax(-1, keepdim=True)
    if grid in _FP8:
        dtype, largest = _FP8[grid]
        scale = torch.ones(()) if scope in ("", "one") else _positive(top / largest)
        return (x / scale).clamp(-largest, largest).to(dtype).float() * scale
    if grid == "nvfp4":
        whole = _positive(x.abs().amax() / (6.0 * 448.0))
        scale = _positive((top / 6.0 / whole).to(torch.float8_e4m3fn).float() * whole)
        steps = torch.tensor(_E2M1, device=x.device)
        middles = (steps[1:] + steps[:-1]) / 2
        return torch.sign(x) * steps[torch.bucketize((x / scale).abs(), middles)] * scale
    bits = int(grid.removeprefix("int").removesuffix("-asym"))
    if grid.endswith("-asym"):
        low = x.amin(-1, keepdim=True)
        scale = _positive((x.amax(-1, keepdim=True) - low) / (2**bits - 1))
        return ((x - low) / scale).round() * scale + low
    largest = 2 ** (bits - 1) - 1
    scale = _positive(top / largest)
    return (x / scale).round().clamp(-largest - 1, largest) * scale


def _blocks(x: torch.Tensor, grid: str, size: int) -> torch.Tensor:
    """Square blocks of the last two axes share a scale."""
    rows, cols = x.shape[-2:]
    padded = torch.nn.functional.pad(x, (0, -cols % size, 0, -rows % size))
    tall, wide = padded.shape[-2] // size, padded.shape[-1] // size
    tiles = (
        padded.reshape(*x.shape[:-2], tall, size, wide, size).transpose(-3, -2).reshape(*x.shape[:-2], tall, wide, size * size)
    )
    out = _rounded(tiles, grid, "channel").reshape(*x.shape[:-2], tall, wide, size, size).transpose(-3, -2)
    return out.reshape(*x.shape[:-2], tall * size, wide * size)[..., :rows, :cols]


def _positive(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
