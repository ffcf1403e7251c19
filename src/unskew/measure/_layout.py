"""Padded (B, T) and packed (N,) + cu_seqlens are the same batch: one padded form for everything that looks along a sequence."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from unskew._errors import UnskewError

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How one batch lies in memory.

    Args:
        xp: array namespace of the batch.
        shape: (B, T) of the padded form.
        index: (B·T,) token behind each padded place, 0 where there is none; None where the batch is padded already.
        place: (N,) padded place of each token; None as above.
        mask: (B, T) bool, tokens that take part.

    Example:
        >>> x = np.array([1.0, 2.0, 3.0])
        >>> layout = Layout.of(x, np.array([1, 1, 1]), np.array([0, 1, 3]))
        >>> layout.padded(x).tolist(), layout.mask.tolist()
        ([[1.0, 0.0], [2.0, 3.0]], [[True, False], [True, True]])
        >>> layout.restore(layout.padded(x)).tolist()
        [1.0, 2.0, 3.0]
    """

    xp: Any
    shape: tuple[int, int]
    index: Any
    place: Any
    mask: Any

    @classmethod
    def of(cls, like: Any, mask: Any, cu_seqlens: Any = None) -> "Layout":
        """Layout of arrays shaped like `like`: (B, T), or (N,) with `cu_seqlens` (B+1,).

        Args:
            mask: nonzero where a token takes part, bool, integer or float; None for all.

        Raises:
            UnskewError: shapes that do not fit.
        """
        xp, where = array_namespace(like), device(like)
        if mask is not None and tuple(mask.shape) != tuple(like.shape):
            raise UnskewError(f"mask has shape {tuple(mask.shape)}, the log-probs {tuple(like.shape)}", exit_code=2)
        keep = xp.ones(like.shape, dtype=xp.bool, device=where) if mask is None else xp.astype(mask, xp.bool)
        if cu_seqlens is None:
            if like.ndim != 2:
                raise UnskewError(
                    f"log-probs of shape {tuple(like.shape)}", hint="give (B, T), or (N,) with cu_seqlens (B+1,)", exit_code=2
                )
            return cls(xp, tuple(like.shape), None, None, keep)
        cu = np.asarray(cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens, np.int64)
        n = like.shape[0]
        if like.ndim != 1 or cu.ndim != 1 or len(cu) < 1 or cu[0] != 0 or cu[-1] != n or (np.diff(cu) < 0).any():
            raise UnskewError(f"cu_seqlens must rise from 0 to {n}", hint="packed log-probs are (N,), bounds (B+1,)", exit_code=2)
        lengths = np.diff(cu)
        shape = (len(lengths), int(lengths.max(initial=0)))
        valid = np.arange(shape[1]) < lengths[:, None]
        index = np.where(valid, cu[:-1, None] + np.arange(shape[1]), 0).reshape(-1)
        layout = cls(
            xp, shape, xp.asarray(index, device=where), xp.asarray(np.flatnonzero(valid), device=where),
            xp.asarray(valid, device=where),
        )  # fmt: skip
        return cls(xp, shape, layout.index, layout.place, layout.mask & (layout._gather(keep) if n else layout.mask))

    def padded(self, values: Any) -> Any:
        """(B, T) of values in the batch's layout; 0 where the mask is 0, so that what stands there does not matter."""
        values = self.gathered(values)
        return self.xp.where(self.mask, values, self.xp.zeros_like(values))

    def gathered(self, values: Any) -> Any:
        """(B, T) of values in the batch's layout, whatever stands where the mask is 0.

        Raises:
            UnskewError: another shape than the batch.
        """
        size = self.shape if self.place is None else self.place.shape
        if tuple(values.shape) != tuple(size):
            raise UnskewError(f"an array of shape {tuple(values.shape)} beside log-probs {tuple(size)}", exit_code=2)
        if self.index is None:
            return values
        return self._gather(values) if values.shape[0] else self.xp.zeros(self.shape, dtype=values.dtype)

    def restore(self, values: Any) -> Any:
        """(B, T) values back in the batch's layout."""
        if self.place is None:
            return values
        return self.xp.take(self.xp.reshape(values, (-1,)), self.place, axis=0)

    def _gather(self, values: Any) -> Any:
        return self.xp.reshape(self.xp.take(values, self.index, axis=0), self.shape)
