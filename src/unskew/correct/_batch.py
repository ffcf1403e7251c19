"""One batch as corrections see it: padded, masked, non-finite log-ratios set aside."""

from dataclasses import dataclass
from typing import Any

from unskew._errors import UnskewError
from unskew.measure import Layout

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Arrays (B, T) of one batch, 0 where `mask` is 0; no gradient.

    Args:
        layout: how the batch lies in memory.
        mask: bool, tokens in the loss whose log-ratio is finite.
        non_finite: bool, tokens in the loss whose log-ratio is not.
        d: log-ratio old_logp − rollout_logp, at least float32.
        rollout, old, logp: log-probs of the sampler, of the trainer at the sampling weights and at the current ones.
        advantages, turn_ids: where given.
    """

    layout: Layout
    mask: Any
    non_finite: Any
    d: Any
    rollout: Any
    old: Any
    logp: Any
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
        rollout, old = (_wide(xp, layout.padded(x)) for x in (rollout_logp, old_logp))
        current = old if logp is None else _wide(xp, layout.padded(logp))
        finite = xp.isfinite(rollout) & xp.isfinite(old) & xp.isfinite(current)
        keep = layout.mask & finite
        zero = xp.zeros_like(old)
        rollout, old, current = (xp.where(keep, x, zero) for x in (rollout, old, current))
        return cls(
            layout, keep, layout.mask & ~finite, old - rollout, rollout, old, current,
            None if advantages is None else layout.padded(advantages),
            None if turn_ids is None else layout.padded(turn_ids),
        )  # fmt: skip

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


def _wide(xp: Any, values: Any) -> Any:
    """At least float32: bfloat16 and float16 sums of log-ratios are noise."""
    return values if values.dtype in (xp.float32, xp.float64) else xp.astype(values, xp.float32)
