"""What can be asked of a scorer beside its plain forward pass: named edits of its arithmetic, other inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["HEAD_NAMES", "Edit", "Inputs"]

HEAD_NAMES = frozenset({"head-precision", "logits-precision", "final-softcap", "vocab-padding"})
"""Edits that leave the hidden states as they are."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One named change to how a model computes; `BODY_EDITS` and `HEAD_EDITS` say what each does.

    Args:
        name: as in "kv-cache", "rope-base".
        value: its one parameter: a format, a factor, a number of parts.

    Example:
        >>> str(Edit("kv-cache", "int8/token"))
        'kv-cache=int8/token'
    """

    name: str
    value: float | int | str = ""

    @property
    def rounds(self) -> bool:
        """Whether it rounds to a format: then the last bit of another batch shape can grow to a step of that format."""
        return isinstance(self.value, str)

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a forward pass reads.

    Args:
        prompts: ids of each context.
        responses: ids of each response; its tokens are what is scored.
        positions: position ids of each sequence, prompt and response; None for 0, 1, ….
        routed_experts: expert ids to force, one (tokens, layers, k) array a sequence, or None.
        cached: (prefix lengths, name of the scorer whose K/V stand there), or None.
    """

    prompts: Sequence[np.ndarray]
    responses: Sequence[np.ndarray]
    positions: Sequence[np.ndarray] | None = None
    routed_experts: Sequence[Any] | None = None
    cached: tuple[Sequence[int], str] | None = None
