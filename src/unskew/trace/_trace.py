"""A trace in memory: whole sequences as one Arrow table, read as flat token arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from unskew._errors import UnskewError
from unskew.trace._arrow import flatten, list_lengths, one_chunk
from unskew.trace._convert import rows_to_table, unknown_keys
from unskew.trace._layout import pack
from unskew.trace._schema import SCHEMA, SEGMENT_SAMPLED, TOKEN_COLUMNS

__all__ = ["Trace"]


@dataclass(frozen=True, eq=False)
class Trace:
    """What was recorded about B sequences of together N tokens.

    `table` holds one row a sequence in the types of `SCHEMA`; token columns are lists as long as `response_ids`.
    Views come flat: `tokens("rollout_logp")` is (N,), `cu_seqlens` (B+1,) bounds the sequences. `notes` says what of the
    source was not read.

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
        """A trace of the given rows, with the schema's keys; absent columns stay absent.

        One `weight_version` or `advantage` a row is repeated for each token; `messages` become JSON text.

        Raises:
            UnskewError: an unknown key, or a value that does not fit its column.
        """
        rows = list(rows)
        unknown = unknown_keys((k, v if isinstance(v, Mapping) else ()) for row in rows for k, v in row.items())
        if unknown:
            raise UnskewError(f"{path}: unknown columns {list(unknown)}", hint="see `unskew explain trace` for the keys")
        return cls(rows_to_table(rows, lambda row: f"{path} row {row}"), path)

    @classmethod
    def from_packed(
        cls, *, cu_seqlens: np.ndarray, rows: Mapping[str, Sequence[Any]] | None = None, **tokens: np.ndarray
    ) -> "Trace":
        """A trace of flat token columns.

        Args:
            cu_seqlens: bounds of the sequences, integers (B+1,), from 0 to N.
            rows: columns with one Python value a row, such as `{"prompt_ids": …, "sampling": …}`.
            **tokens: token columns (N,), `response_ids` among them.

        Example:
            >>> Trace.from_packed(cu_seqlens=[0, 2, 3], response_ids=[5, 6, 7], rollout_logp=[-1, -2, -3]).lengths
            array([2, 1])
        """
        bounds = np.asarray(cu_seqlens, np.int64)
        ids = np.asarray(tokens["response_ids"])
        if bounds.ndim != 1 or bounds[0] != 0 or bounds[-1] != len(ids) or (np.diff(bounds) < 0).any():
            raise UnskewError(f"cu_seqlens must rise from 0 to {len(ids)}, got {bounds.tolist()[:8]}", exit_code=2)
        lists = pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(ids).cast(pa.int32()))
        trace = cls(pa.table({"response_ids": lists})).with_tokens(**tokens)
        return trace.with_rows(**rows) if rows else trace

    @classmethod
    def from_padded(
        cls, *, present: np.ndarray, rows: Mapping[str, Sequence[Any]] | None = None, **tokens: np.ndarray
    ) -> "Trace":
        """A trace of padded token columns; padding on either side.

        Args:
            present: whether a token is there, bool (B, T). Which tokens the loss uses is the token column `mask`.
            rows: as for `from_packed`.
            **tokens: token columns (B, T), `response_ids` among them.

        Example:
            >>> Trace.from_padded(present=[[True, True], [True, False]], response_ids=[[5, 6], [7, 0]]).lengths
            array([2, 1])
        """
        present = np.asarray(present, bool)
        bounds = pack(present, present)[1]
        flat = {name: pack(np.asarray(values), present)[0] for name, values in tokens.items()}
        return cls.from_packed(cu_seqlens=bounds, rows=rows, **flat)

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that hold at least one value."""
        return frozenset(n for n in self.table.column_names if self.table[n].null_count < len(self))

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """Bounds of the sequences in the flat arrays, int64 (B+1,)."""
        lengths = list_lengths(self.table["response_ids"])
        return np.concatenate([[0], np.cumsum(lengths)])

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
        """A token column, flat (N,): float32 log-probs, int64 ids, in trace order; a null token is NaN, or −1.

        Raises:
            UnskewError: the column is missing from a row or not as long as `response_ids`.
        """
        if name not in TOKEN_COLUMNS:
            raise UnskewError(f"{name!r} is not a token column", exit_code=2)
        column = self._column(name)
        self._check_lengths(name, list_lengths(column), np.ones(len(self), bool))
        return flatten(column)

    def ragged(self, name: str) -> list[np.ndarray]:
        """A list column whose length is its own (`prompt_ids`), one array a row."""
        column = self._column(name)
        return np.split(flatten(column), np.cumsum(list_lengths(column))[:-1])

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
        """Tokens that the policy sampled and the loss uses, bool (N,).

        Row by row: its `mask`, where it has none its segment 1, where it has neither every token.
        """
        mask = np.ones(self.n_tokens, bool)
        for name, meaning in (("segment_ids", SEGMENT_SAMPLED), ("mask", 1)):
            if name in self.table.column_names:
                column = one_chunk(self.table[name])
                given = column.is_valid().to_numpy(zero_copy_only=False)
                self._check_lengths(name, list_lengths(column), given)
                mask[np.repeat(given, self.lengths)] = flatten(column) == meaning
        return mask

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
        return one_chunk(self.table[name])

    def _check_lengths(self, name: str, lengths: np.ndarray, rows: np.ndarray) -> None:
        bad = np.flatnonzero((lengths != self.lengths) & rows)
        if len(bad):
            row = int(bad[0])
            raise UnskewError(
                f"{self.path} row {row}: {name} has {lengths[row]} values, response_ids {self.lengths[row]}",
                hint="run `unskew lint` to list every such row",
            )


def _set(table: pa.Table, field: pa.Field, values: pa.Array) -> pa.Table:
    index = table.schema.get_field_index(field.name)
    return table.append_column(field, values) if index < 0 else table.set_column(index, field, values)
