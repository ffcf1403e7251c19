"""List columns of Arrow as flat arrays."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["flatten", "list_lengths", "one_chunk"]


def list_lengths(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Values in each list, int64 (B,); a null list has none."""
    return pc.call_function("list_value_length", [column]).fill_null(0).to_numpy().astype(np.int64)


def flatten(column: pa.Array) -> np.ndarray:
    """The values of all lists: floats as they are with null as NaN, integers as int64 with null as −1."""
    values = column.flatten()
    if pa.types.is_floating(values.type):
        return values.to_numpy(zero_copy_only=False)
    return (values.fill_null(-1) if values.null_count else values).to_numpy(zero_copy_only=False).astype(np.int64)


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array, without a copy where it is one already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
