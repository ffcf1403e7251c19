"""What every objective does first: set aside padding and non-finite tokens, take the log-ratio, place the correction."""

from dataclasses import dataclass

import torch

from unskew._errors import UnskewError
from unskew.correct import Weights
from unskew.measure import Layout
from unskew.objective._token_loss import TokenLoss

__all__ = ["CLAMP", "Tokens"]

CLAMP = 20.0
"""Largest |log-ratio| that an objective sees: e^20 is 5e8 already, and e^89 is infinite in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """One batch in its padded form, zero wherever a token takes no part.

    Args:
        layout: how the batch lies in memory.
        mask: bool (B, T), masked tokens with finite numbers; sequence ratios go over these.
        keep: bool (B, T), those that the correction keeps; losses go over these.
        non_finite: bool (B, T).
        logp: (B, T), with gradient.
        advantages: (B, T).
        weight: (B, T), no gradient.
    """

    layout: Layout
    mask: torch.Tensor
    keep: torch.Tensor
    non_finite: torch.Tensor
    logp: torch.Tensor
    others: tuple[torch.Tensor, ...]
    advantages: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(
        cls, logp: torch.Tensor, *others: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None,
        correction: Weights | None, cu_seqlens: torch.Tensor | None,
    ) -> "Tokens":  # fmt: skip
        """The batch of log-probs with gradient, other log-probs without, and advantages (B, T), (N,) or one a sequence (B,)."""
        layout = Layout.of(logp, mask, cu_seqlens)
        streams = [layout.gathered(logp), *(layout.gathered(x.detach()) for x in others)]
        advantages = _by_token(layout, advantages.detach())
        finite = torch.isfinite(advantages)
        for stream in streams:
            finite = finite & torch.isfinite(stream)
        inside: torch.Tensor = layout.mask & finite
        keep, weight = inside, torch.ones_like(streams[0]).detach()
        if correction is not None:
            keep = inside & layout.gathered(correction.keep)
            weight = layout.gathered(correction.weight).detach().to(weight.dtype)
        # Replaced before any arithmetic: a NaN at a padded place would reach the gradient as 0 · NaN.
        filled = [torch.where(inside, x, torch.zeros_like(x)) for x in streams]
        advantages = torch.where(inside, advantages, torch.zeros_like(advantages)).to(weight.dtype)
        return cls(layout, inside, keep, layout.mask & ~finite, filled[0], tuple(filled[1:]), advantages, weight)

    def log_ratio(self, other: int = 0) -> torch.Tensor:
        """logp − other log-probs, within ±20, (B, T)."""
        return (self.logp - self.others[other]).clamp(-CLAMP, CLAMP)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the masked tokens of each sequence, (B, 1); 0 of none."""
        total = torch.where(self.mask, values, torch.zeros_like(values)).sum(1, keepdim=True)
        return total / self.mask.sum(1, keepdim=True).clamp(min=1)

    def loss(self, values: torch.Tensor, clipped: torch.Tensor | None = None) -> TokenLoss:
        """What a token costs, times its weight, where it is kept."""
        values = torch.broadcast_to(values, self.keep.shape)
        none = torch.zeros_like(self.keep)
        held = none if clipped is None else self.keep & torch.broadcast_to(clipped, self.keep.shape)
        return TokenLoss(torch.where(self.keep, self.weight * values, torch.zeros_like(values)), self.keep, held, self.non_finite)


def _by_token(layout: Layout, advantages: torch.Tensor) -> torch.Tensor:
    if advantages.ndim == 1 and tuple(advantages.shape) == layout.shape[:1] and layout.place is None:
        return advantages[:, None].expand(layout.shape)
    if advantages.ndim == 1 and layout.place is not None and advantages.shape[0] == layout.shape[0] != layout.place.shape[0]:
        return advantages[:, None].expand(layout.shape)
    if advantages.ndim == 2 and layout.place is None and tuple(advantages.shape) == (layout.shape[0], 1):
        return advantages.expand(layout.shape)
    try:
        return layout.gathered(advantages)
    except UnskewError:
        raise UnskewError(
            f"advantages have shape {tuple(advantages.shape)}, the batch {layout.shape}",
            hint="give one a token, shaped like the log-probs, or one a sequence (B,)", exit_code=2,
        ) from None  # fmt: skip
