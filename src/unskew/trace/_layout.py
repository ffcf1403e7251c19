"""Between padded `(B, T)` and packed `(N,)` token arrays; numpy and torch alike."""

from typing import Any

import array_api_compat

__all__ = ["pack", "pad", "padding_mask"]


def padding_mask(cu_seqlens: Any) -> Any:
    """Where a right-padded batch holds tokens, bool (B, T), T the longest sequence.

    Args:
        cu_seqlens: bounds of the sequences, integers (B+1,), from 0 to N.

    Example:
        >>> import numpy as np
        >>> padding_mask(np.array([0, 2, 3])).tolist()
        [[True, True], [True, False]]
    """
    xp = array_api_compat.array_namespace(cu_seqlens)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    longest = int(xp.max(lengths)) if lengths.shape[0] else 0
    steps = xp.arange(longest, dtype=lengths.dtype, device=array_api_compat.device(lengths))
    return steps[None, :] < lengths[:, None]


def pad(values: Any, cu_seqlens: Any, *, fill: float = 0) -> Any:
    """Packed values (N,) as a right-padded batch (B, T).

    Args:
        values: one value a token, (N,), any dtype.
        cu_seqlens: bounds of the sequences, integers (B+1,), from 0 to N.
        fill: value of the padding.

    Example:
        >>> import numpy as np
        >>> pad(np.array([-1.0, -2.0, -3.0]), np.array([0, 2, 3])).tolist()
        [[-1.0, -2.0], [-3.0, 0.0]]
    """
    xp = array_api_compat.array_namespace(values)
    mask = padding_mask(cu_seqlens)
    out = xp.full(mask.shape, fill, dtype=values.dtype, device=array_api_compat.device(values))
    out[mask] = values
    return out


def pack(values: Any, mask: Any) -> tuple[Any, Any]:
    """A padded batch (B, T) as packed values (N,) and their bounds (B+1,) int64; padding may be on either side.

    Args:
        values: one value a position, (B, T), any dtype.
        mask: where a token is, bool (B, T).

    Example:
        >>> import numpy as np
        >>> flat, cu = pack(np.array([[1, 2], [3, 0]]), np.array([[True, True], [True, False]]))
        >>> flat.tolist(), cu.tolist()
        ([1, 2, 3], [0, 2, 3])
    """
    xp = array_api_compat.array_namespace(values, mask)
    lengths = xp.sum(xp.astype(mask, xp.int64), axis=1)
    zero = xp.zeros(1, dtype=xp.int64, device=array_api_compat.device(lengths))
    return values[mask], xp.concat([zero, xp.cumulative_sum(lengths)])
