"""A trace in memory: whole sequences as one Arrow table, read as flat token arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from unskew._errors import UnskewError
from unskew.trace._schema import SCHEMA, SEGMENT_SAMPLED, TOKEN_COLUMNS

__all__ = ["Trace"]


@dataclass(frozen=True, eq=False)
class Trace:
    """What was recorded about B sequences of together N tokens.

    `table` holds one row a sequence in the types of `SCHEMA`; token columns are lists as long as `response_ids`.
    `notes` says what of the source was not read. Views come flat: `tokens("rollout_logp")` is (N,), `cu_seqlens` (B+1,) bounds the sequences.

    Example:
        >>> trace = Trace.from_rows([{"response_ids": [5, 6], "rollout_logp": [-0.5, -0.25]},
        ...                          {"response_ids": [7], "rollout_logp": [-1.0]}])
        >>> trace.cu_seqlens.tolist(), trace.tokens("rollout_logp").tolist(), trace.mask.tolist()
        ([0, 2, 3], [-0.5, -0.25, -1.0], [True, True, True])
    """

    table: pa.Table
    path: str = "<memory>"
    notes: tuple[str, ...] = ()

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], *, path: str = "<memory>") -> "Trace":
        """A trace of the given rows (keys of DESIGN's schema); absent columns stay absent."""
        rows = list(rows)
        present = {key for row in rows for key in row}
        unknown = present - set(SCHEMA.names)
        if unknown:
            raise UnskewError(f"{path}: unknown columns {sorted(unknown)}", hint="see `unskew explain trace` for the keys")
        schema = pa.schema([field for field in SCHEMA if field.name in present])
        return cls(pa.Table.from_pylist([dict(row) for row in rows], schema=schema), path)

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that hold at least one value."""
        return frozenset(n for n in self.table.column_names if self.table[n].null_count < len(self))

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """Bounds of the sequences in the flat arrays, int64 (B+1,)."""
        lengths = pa.compute.list_value_length(self.table["response_ids"]).to_numpy(zero_copy_only=False)
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    @property
    def n_tokens(self) -> int:
        """Number of response tokens N."""
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Response tokens of each sequence, int64 (B,)."""
        return np.diff(self.cu_seqlens)

    @cached_property
    def row_of_token(self) -> np.ndarray:
        """Row index of each token, int64 (N,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def position(self) -> np.ndarray:
        """Index of each token in its response, int64 (N,)."""
        return np.arange(self.n_tokens) - np.repeat(self.cu_seqlens[:-1], self.lengths)

    def has(self, name: str) -> bool:
        """Whether every row holds a value of this column."""
        return name in self.table.column_names and self.table[name].null_count == 0 and len(self) > 0

    def tokens(self, name: str) -> np.ndarray:
        """A token column, flat (N,): float32 log-probs, int64 ids, in trace order; null tokens are NaN.

        Raises:
            UnskewError: the column is missing from a row or not as long as `response_ids`.
        """
        if name not in TOKEN_COLUMNS:
            raise UnskewError(f"{name!r} is not a token column", exit_code=2)
        column = self._column(name)
        lengths = pa.compute.list_value_length(column).to_numpy(zero_copy_only=False)
        bad = np.flatnonzero(lengths != self.lengths)
        if len(bad):
            row = int(bad[0])
            raise UnskewError(
                f"{self.path} row {row}: {name} has {int(lengths[row])} values, response_ids {self.lengths[row]}",
                hint="run `unskew lint` to list every such row",
            )
        return _flat(column)

    def ragged(self, name: str) -> list[np.ndarray]:
        """A list column whose length is its own (`prompt_ids`), one array a row."""
        column = self._column(name)
        cuts = np.cumsum(pa.compute.list_value_length(column).to_numpy(zero_copy_only=False))[:-1]
        return np.split(_flat(column), cuts)

    def contexts(self) -> list[np.ndarray]:
        """What precedes each response: its `prompt_ids`, or nothing where `response_ids` is the full row."""
        ids, cu = self.tokens("response_ids"), self.cu_seqlens
        return [
            prompt[:0] if 1 < len(prompt) < stop - start and np.array_equal(ids[start : start + len(prompt)], prompt) else prompt
            for prompt, start, stop in zip(self.ragged("prompt_ids"), cu[:-1], cu[1:], strict=True)
        ]

    def rows(self, name: str) -> list[Any]:
        """A column as Python values, one a row; None where it is null or the column is absent."""
        return self.table[name].to_pylist() if name in self.table.column_names else [None] * len(self)

    def setting(self, group: str, name: str) -> list[Any]:
        """One key of the `sampling`, `source` or `trainer` record of each row; None where it is not declared."""
        return [(value or {}).get(name) for value in self.rows(group)]

    @cached_property
    def mask(self) -> np.ndarray:
        """Tokens that the policy sampled and the loss uses, bool (N,): `mask`, else segment 1, else all."""
        if self.has("mask"):
            return self.tokens("mask").astype(bool)
        if self.has("segment_ids"):
            return self.tokens("segment_ids") == SEGMENT_SAMPLED
        return np.ones(self.n_tokens, bool)

    def select(self, rows: np.ndarray | Sequence[int]) -> "Trace":
        """The given rows (indices, or a bool array over rows), in the given order."""
        index = np.asarray(rows)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
        return replace(self, table=self.table.take(pa.array(index)))

    def with_tokens(self, **columns: np.ndarray) -> "Trace":
        """This trace with flat (N,) token columns set or replaced."""
        table = self.table
        offsets = pa.array(self.cu_seqlens.astype(np.int32))
        for name, values in columns.items():
            field = SCHEMA.field(name)
            if np.shape(values) != (self.n_tokens,):
                raise UnskewError(f"{name} has shape {np.shape(values)}, expected ({self.n_tokens},)", exit_code=2)
            lists = pa.ListArray.from_arrays(offsets, pa.array(np.asarray(values)).cast(field.type.value_type))
            table = _set(table, field, lists)
        return replace(self, table=table)

    def with_rows(self, **columns: Sequence[Any]) -> "Trace":
        """This trace with columns set from one Python value a row."""
        table = self.table
        for name, values in columns.items():
            field = SCHEMA.field(name)
            table = _set(table, field, pa.array(list(values), field.type))
        return replace(self, table=table)

    def _column(self, name: str) -> pa.ListArray:
        if not self.has(name):
            missing = "is missing" if name not in self.table.column_names else "is null in some rows"
            raise UnskewError(f"{self.path}: column {name!r} {missing}", hint="record it, or drop the rows without it")
        return self.table[name].combine_chunks()


def _flat(column: pa.Array) -> np.ndarray:
    values = column.flatten()
    if pa.types.is_floating(values.type):
        return values.to_numpy(zero_copy_only=False)
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


def _set(table: pa.Table, field: pa.Field, values: pa.Array) -> pa.Table:
    index = table.schema.get_field_index(field.name)
    return table.append_column(field, values) if index < 0 else table.set_column(index, field, values)
