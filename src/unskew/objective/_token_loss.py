"""A loss a token, what of it still counts, and its sum over a batch."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from unskew._errors import UnskewError

__all__ = ["Over", "TokenLoss"]

Over = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean-token-mean"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """One objective's loss of each token, in the padded form (B, T) whatever layout it came from.

    Args:
        loss: float (B, T), weighted by the correction, 0 where `keep` is 0; carries the gradient.
        keep: bool (B, T), tokens in the loss: the mask without what the correction rejected and without non-finite tokens.
        clipped: bool (B, T), kept tokens whose gradient the trust region set to zero or bounded.
        non_finite: bool (B, T), masked tokens with a NaN or infinite log-prob or advantage; out of the loss, to be counted.

    Example:
        >>> loss = TokenLoss(torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[1, 1], [1, 0]]).bool(), *[torch.zeros(2, 2).bool()] * 2)
        >>> float(loss.aggregate("token-mean")), float(loss.aggregate("seq-mean-token-mean")), float(loss.aggregate("token-sum"))
        (3.0, 3.5, 9.0)
    """

    loss: torch.Tensor
    keep: torch.Tensor
    clipped: torch.Tensor
    non_finite: torch.Tensor

    def __add__(self, other: "TokenLoss") -> "TokenLoss":
        """Both losses of the same batch, a KL penalty beside a policy loss for example."""
        keep = self.keep & other.keep
        zero = torch.zeros_like(self.loss)
        return TokenLoss(
            torch.where(keep, self.loss + other.loss, zero),
            keep,
            self.clipped | other.clipped,
            self.non_finite | other.non_finite,
        )

    def __mul__(self, factor: float) -> "TokenLoss":
        """The loss times a coefficient."""
        return TokenLoss(self.loss * factor, self.keep, self.clipped, self.non_finite)

    __rmul__ = __mul__

    def aggregate(
        self, over: Over = "token-mean", *, count: float | None = None, length: float | None = None,
        prompts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """One number to differentiate. What the correction rejected is in neither sum.

        - "token-mean": Σ over tokens / tokens kept (DAPO, TRL's "bnpo").
        - "token-sum": Σ over tokens.
        - "seq-mean-token-mean": mean over sequences of their token means (GRPO, GSPO).
        - "seq-mean-token-sum": mean over sequences of their token sums; with `length`, divided by it (Dr. GRPO).
        - "prompt-mean-token-mean": mean over prompts of the mean over their tokens (ScaleRL).

        Args:
            count: tokens ("token-mean") or sequences ("seq-…", "prompt-…" prompts) of the whole update, where this batch is
                one of several micro-batches or ranks whose results are added; what is kept here otherwise.
            length: constant that divides the token sums of "seq-mean-token-sum".
            prompts: (B,) integers, the prompt of each sequence, for "prompt-mean-token-mean".

        Returns:
            A scalar; 0 with a gradient of 0 where nothing is kept.

        Raises:
            UnskewError: an unknown name, or "prompt-mean-token-mean" without `prompts`.
        """
        total, tokens = self.loss.sum(1), self.keep.sum(1)
        if over in ("token-mean", "token-sum"):
            total, units = total.sum(), tokens.sum() if over == "token-mean" else torch.ones_like(tokens.sum())
            return total / (units.clamp(min=1) if count is None else count)
        if over == "prompt-mean-token-mean":
            if prompts is None:
                raise UnskewError("prompt-mean-token-mean needs prompts", hint="pass prompts=(B,) integers", exit_code=2)
            _, group = torch.unique(prompts, return_inverse=True)
            total, tokens = (
                torch.zeros(int(group.max()) + 1, dtype=x.dtype, device=x.device).index_add(0, group, x) for x in (total, tokens)
            )
        elif over not in get_args(Over):
            raise UnskewError(f"no aggregation {over!r}", hint=f"one of {', '.join(get_args(Over))}", exit_code=2)
        each = total / (1 if length is None else length) if over == "seq-mean-token-sum" else total / tokens.clamp(min=1)
        return each.sum() / ((tokens > 0).sum().clamp(min=1) if count is None else count)

    @property
    def clip_fraction(self) -> torch.Tensor:
        """Share of the kept tokens that the trust region holds."""
        return self.clipped.sum() / self.keep.sum().clamp(min=1)
