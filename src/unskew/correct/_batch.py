"""One batch as corrections see it: padded, masked, non-finite log-ratios set aside."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from unskew._errors import UnskewError
from unskew.measure import Layout

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Arrays (B, T) of one batch; no gradient.

    Args:
        layout: how the batch lies in memory.
        mask: bool, tokens in the loss whose log-ratio is finite.
        non_finite: bool, tokens in the loss whose log-ratio is not.
        d: log-ratio old_logp − rollout_logp, at least float32, 0 where `mask` is 0.
        raw: the log-probs of sampler, trainer at the sampling weights and trainer now, in the layout they came in.
        advantages, turn_ids: where given, 0 outside the mask.
    """

    layout: Layout
    mask: Any
    non_finite: Any
    d: Any
    raw: tuple[Any, Any, Any]
    advantages: Any
    turn_ids: Any

    @classmethod
    def of(
        cls, rollout_logp: Any, old_logp: Any, *, mask: Any, cu_seqlens: Any = None, logp: Any = None, advantages: Any = None,
        turn_ids: Any = None,
    ) -> "Batch":  # fmt: skip
        """The batch of log-probs (B, T), or packed (N,) with `cu_seqlens`; `logp` is `old_logp` where it is not given."""
        rollout_logp, old_logp, logp, advantages = (_detached(x) for x in (rollout_logp, old_logp, logp, advantages))
        layout = Layout.of(rollout_logp, mask, cu_seqlens)
        xp = layout.xp
        # At least float32: sums of log-ratios in bfloat16 and float16 are noise.
        d = _difference(_wide(xp, layout.gathered(old_logp)), _wide(xp, layout.gathered(rollout_logp)))
        finite = xp.isfinite(d) if logp is None else xp.isfinite(d) & xp.isfinite(layout.gathered(logp))
        keep = layout.mask & finite
        return cls(
            layout, keep, layout.mask & ~finite, xp.where(keep, d, xp.zeros_like(d)),
            (rollout_logp, old_logp, old_logp if logp is None else logp),
            None if advantages is None else layout.padded(advantages),
            None if turn_ids is None else layout.padded(turn_ids),
        )  # fmt: skip

    @property
    def rollout(self) -> Any:
        """Log-probs of the sampler, 0 outside the mask."""
        return self._filled(0)

    @property
    def old(self) -> Any:
        """Log-probs of the trainer at the weights that sampled, 0 outside the mask."""
        return self._filled(1)

    @property
    def logp(self) -> Any:
        """Log-probs of the trainer now, 0 outside the mask."""
        return self._filled(2)

    def _filled(self, index: int) -> Any:
        values = _wide(self.layout.xp, self.layout.gathered(self.raw[index]))
        return self.layout.xp.where(self.mask, values, self.layout.xp.zeros_like(values))

    def need(self, name: str, method: str) -> Any:
        """An optional array, or the error that says which method wants it."""
        values = getattr(self, name)
        if values is None:
            raise UnskewError(f"{method} needs {name}", hint=f"pass {name}=…, shaped like the log-probs", exit_code=2)
        return values

    @property
    def counts(self) -> Any:
        """Tokens of each sequence that take part, float64 (B, 1), at least 1."""
        xp = self.layout.xp
        count = xp.sum(xp.astype(self.mask, xp.float64), axis=1, keepdims=True)
        return xp.maximum(count, xp.ones_like(count))

    def total(self, values: Any) -> Any:
        """Σ over the tokens of each sequence that take part, float64 (B, 1)."""
        xp = self.layout.xp
        return xp.sum(xp.where(self.mask, values, xp.zeros_like(values)), axis=1, keepdims=True, dtype=xp.float64)

    def highest(self, values: Any) -> Any:
        """Largest value among the tokens of each sequence that take part, (B, 1); −inf where there is none."""
        xp = self.layout.xp
        low = xp.full_like(values, -xp.inf)
        if not values.shape[1]:
            return xp.full((values.shape[0], 1), -xp.inf, dtype=values.dtype)
        return xp.max(xp.where(self.mask, values, low), axis=1, keepdims=True)


def _detached(values: Any) -> Any:
    return values.detach() if hasattr(values, "detach") else values


def _difference(a: Any, b: Any) -> Any:
    """a − b; numpy warns where both are the same infinity, which is counted here."""
    if isinstance(a, np.ndarray):
        with np.errstate(invalid="ignore"):
            return a - b
    return a - b


def _wide(xp: Any, values: Any) -> Any:
    return values if values.dtype in (xp.float32, xp.float64) else xp.astype(values, xp.float32)
