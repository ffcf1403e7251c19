"""Attention under edits: a function registered with transformers, so that it works on any architecture that uses its interface."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unskew._errors import UnskewError, require
from unskew.score._edit import Edit
from unskew.score._formats import fake_quantize

__all__ = ["ATTENTION_EDITS", "attention_edits"]

ATTENTION_EDITS = {
    "kv-cache": "keys and values rounded to a format, after the rotation, as a cache holds them",
    "attention-scale": "scores times a factor",
    "attention-softcap": "scores s become c · tanh(s / c)",
    "sliding-window": "a query sees the last W keys only, itself included",
    "attention-kernel": "scores and probabilities rounded to a dtype, as a kernel of that precision does",
    "attention-dropout": "attention probabilities dropped with probability p",
}
"""Edits of attention by name."""

_NAMES = {"sdpa": "unskew_sdpa", "eager": "unskew_eager"}
_active: dict[str, Any] = {}


@contextmanager
def attention_edits(model: torch.nn.Module, edits: list[Edit]) -> Iterator[None]:
    """Run the model's attention under these edits.

    Raises:
        UnskewError: an architecture whose attention does not go through transformers' interface.
    """
    config = model.get_submodule("").config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    base = config._attn_implementation
    if base not in _NAMES:
        raise UnskewError(f"attention of kind {base!r} cannot be edited", hint="load the model with sdpa or eager attention")
    _register()
    before = dict(_active)
    _active.update({edit.name: edit.value for edit in edits} | {"base": base, "calls": 0})
    config._attn_implementation = _NAMES[base]
    try:
        yield
        if not _active["calls"]:
            raise UnskewError(
                f"{type(model).__name__}: its attention does not go through transformers' attention interface",
                hint="causes inside attention cannot be tested on this architecture",
            )
    finally:
        config._attn_implementation = base
        _active.clear()
        _active.update(before)


def _register() -> None:
    transformers = require("transformers", extra="hf")
    masks = sys.modules["transformers.masking_utils"]
    for base, name in _NAMES.items():
        transformers.AttentionInterface.register(name, _attention)
        masks.AttentionMaskInterface.register(name, masks.ALL_MASK_ATTENTION_FUNCTIONS[base])  # pyright: ignore[reportAttributeAccessIssue]


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    _active["calls"] += 1
    scale = (scaling if scaling is not None else query.shape[-1] ** -0.5) * _active.get("attention-scale", 1.0)
    if format := _active.get("kv-cache"):
        key, value = fake_quantize(key, format), fake_quantize(value, format)
    dropout = _active.get("attention-dropout", dropout)
    if window := _active.get("sliding-window"):
        attention_mask = _windowed(attention_mask, query, key, int(window))
    if "attention-softcap" in _active or "attention-kernel" in _active:
        return _by_hand(module, query, key, value, attention_mask, scale, dropout, more.get("softcap"))
    if _active["base"] == "eager":
        eager = sys.modules[type(module).__module__].eager_attention_forward  # pyright: ignore[reportAttributeAccessIssue]
        return eager(module, query, key, value, attention_mask, scaling=scale, dropout=dropout, **more)
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS  # pyright: ignore[reportAttributeAccessIssue]
    return functions["sdpa"](module, query, key, value, attention_mask, scaling=scale, dropout=dropout, **more)


def _causal(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of queries (n, 1) and keys (1, m), the last query beside the last key."""
    n, m = query.shape[2], key.shape[2]
    return torch.arange(m - n, m, device=query.device)[:, None], torch.arange(m, device=query.device)[None]


def _windowed(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    at, of = _causal(query, key)
    near = (at - of < window)[None, None]
    if mask is None:
        return near & (of <= at)[None, None]
    if mask.dtype == torch.bool:
        return mask & near
    return mask.masked_fill(~near, torch.finfo(mask.dtype).min)


def _by_hand(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scaling: float, dropout: float, softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * scaling
    kernel = _active.get("attention-kernel")
    for cap in (softcap, _active.get("attention-softcap")):
        if cap:
            scores = torch.tanh(scores / cap) * cap
    if kernel:
        scores = fake_quantize(scores, kernel)
    if mask is None and query.shape[2] > 1:
        at, of = _causal(query, key)
        mask = (of <= at)[None, None]
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask[..., : key.shape[2]]
    weights = scores.softmax(-1, dtype=torch.float32).nan_to_num(0.0).to(query.dtype)
    if kernel:
        weights = fake_quantize(weights, kernel)
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2).contiguous(), weights
