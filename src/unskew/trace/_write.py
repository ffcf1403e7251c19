"""Writing traces: streamed, and there under their name only when they are whole."""

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from unskew._errors import UnskewError
from unskew.trace._read import MANIFEST, VERSION_KEY
from unskew.trace._schema import REQUIRED, SCHEMA, SCHEMA_VERSION
from unskew.trace._trace import Trace

__all__ = ["Writer", "write"]

_GROUP_TOKENS = 1 << 20
_PART_TOKENS = 1 << 24


def write(trace: Trace, path: str | Path, *, provenance: Mapping[str, Any] | None = None, force: bool = False) -> None:
    """Write a trace: a directory of Parquet files, or one file where the name ends in `.parquet` or `.jsonl`.

    Args:
        trace: what to write; pieces are written as they come.
        path: where; it appears there only when it is whole.
        provenance: where the rows are from, plain JSON values for the manifest of a directory; "created" among them
            becomes the manifest's `created`.
        force: replace what is there (a file, or a directory that holds a trace).

    Raises:
        UnskewError: something is there already and `force` is not given (exit code 2).

    Example:
        >>> import tempfile
        >>> from unskew.trace import read
        >>> path = Path(tempfile.mkdtemp(), "trace")
        >>> write(Trace.from_rows([{"response_ids": [5], "rollout_logp": [-0.5]}]), path)
        >>> read(path).tokens("rollout_logp").tolist()
        [-0.5]
    """
    with Writer(path, provenance=provenance, force=force) as writer:
        for piece in [trace] if isinstance(trace, Trace) else trace:
            writer.append(piece)


class Writer:
    """Writes a trace piece by piece; used as a context manager, which finishes or discards it.

    Rows go to a hidden name beside `path`, which is renamed when the block ends without an exception. A part is closed
    after 16 M tokens, so what a killed recorder had written by then is still in whole Parquet files there.

    Args:
        path: as for `write`.
        provenance: as for `write`.
        force: as for `write`.

    Raises:
        UnskewError: as for `write`.

    Example:
        >>> import tempfile
        >>> from unskew.trace import read
        >>> path = Path(tempfile.mkdtemp(), "t.jsonl")
        >>> with Writer(path) as writer:
        ...     writer.append([{"response_ids": [5], "rollout_logp": [-0.5]}])
        ...     writer.append([{"response_ids": [6], "rollout_logp": [-0.25]}])
        >>> len(read(path))
        2
    """

    def __init__(self, path: str | Path, *, provenance: Mapping[str, Any] | None = None, force: bool = False) -> None:
        self.path = Path(path)
        self.n_rows = 0
        self.n_tokens = 0
        self._force = force
        self._provenance = dict(provenance or {})
        self._buffer: list[pa.Table] = []
        self._buffered = 0
        self._check_free()

    def __enter__(self) -> "Writer":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        match self.path.suffix:
            case ".jsonl":
                self._sink: _Lines | _Parts = _Lines(self._temporary)
            case ".parquet":
                self._sink = _Parts(self._temporary, single=True)
            case _:
                self._temporary.mkdir()
                self._sink = _Parts(self._temporary, single=False)
        return self

    def append(self, rows: Trace | Iterable[Mapping[str, Any]]) -> None:
        """Add sequences: a trace, or rows with the schema's keys."""
        trace = rows if isinstance(rows, Trace) else Trace.from_rows(rows)
        bounds, start = trace.cu_seqlens, 0
        while start < len(trace):
            reach = bounds[start] + _GROUP_TOKENS - self._buffered
            end = min(int(np.searchsorted(bounds, reach)), len(trace))
            self._buffer.append(trace.table.slice(start, end - start))
            self._buffered += int(bounds[end] - bounds[start])
            if self._buffered >= _GROUP_TOKENS:
                self._flush()
            start = end
        self.n_rows += len(trace)
        self.n_tokens += trace.n_tokens

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._flush()
                self._sink.close()
                self._finish()
        finally:
            self._sink.close()
            _remove(self._temporary)

    def _flush(self) -> None:
        if self._buffer or not self.n_rows:
            empty = pa.schema([SCHEMA.field(name) for name in REQUIRED]).empty_table()
            table = pa.concat_tables([empty, *self._buffer], promote_options="default").combine_chunks()
            self._sink.write(table.select([name for name in SCHEMA.names if name in table.column_names]), self._buffered)
            self._buffer, self._buffered = [], 0

    def _finish(self) -> None:
        if isinstance(self._sink, _Parts) and not self._sink.single:
            from unskew.trace._manifest import Manifest

            found = Manifest(
                schema_version=SCHEMA_VERSION, unskew=version("unskew"), n_rows=self.n_rows, n_tokens=self.n_tokens,
                parts=tuple(self._sink.names), created=self._provenance.pop("created", None),
                provenance=self._provenance,
            )  # fmt: skip
            (self._temporary / MANIFEST).write_text(found.model_dump_json(indent=1, exclude_none=True) + "\n")
        self._check_free()
        if self.path.is_dir():
            aside = self._temporary.with_suffix(".old")
            os.rename(self.path, aside)
            os.rename(self._temporary, self.path)
            shutil.rmtree(aside)
        else:
            os.replace(self._temporary, self.path)

    def _check_free(self) -> None:
        if not self.path.exists():
            return
        if not self._force:
            raise UnskewError(f"{self.path} exists", hint="choose another name or give --force", exit_code=2)
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / MANIFEST).exists():
            raise UnskewError(
                f"{self.path} is a directory that holds no trace, and is not replaced",
                hint="choose another name",
                exit_code=2,
            )


class _Lines:
    """JSON lines; null values are left out."""

    def __init__(self, file: Path) -> None:
        self._out = file.open("x", encoding="utf-8")

    def write(self, table: pa.Table, _tokens: int) -> None:
        for batch in table.to_batches(max_chunksize=256):
            for row in batch.to_pylist():
                self._out.write(json.dumps(_without_nulls(row), ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._out.close()


class _Parts:
    """Parquet files; rows with a column that the open file lacks start the next one."""

    def __init__(self, path: Path, *, single: bool) -> None:
        self.single = single
        self.names: list[str] = []
        self._path = path
        self._out: pq.ParquetWriter | None = None
        self._tokens = 0

    def write(self, table: pa.Table, tokens: int) -> None:
        if self._out is not None:
            new = set(table.column_names) - set(self._out.schema.names)
            if new and self.single:
                raise UnskewError(
                    f"column {', '.join(sorted(new))} first appears after {self._tokens} tokens; one file has one schema",
                    hint="write to a directory: a name without .parquet",
                )
            if new or (self._tokens + tokens > _PART_TOKENS and not self.single):
                self.close()
        out = self._out = self._out or self._open(table.schema)
        schema = out.schema
        columns = [
            table[name] if name in table.column_names else pa.nulls(len(table), schema.field(name).type) for name in schema.names
        ]
        out.write_table(pa.table(columns, schema=schema), row_group_size=max(len(table), 1))
        self._tokens += tokens

    def close(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out, self._tokens = None, 0

    def _open(self, schema: pa.Schema) -> pq.ParquetWriter:
        name = f"part-{len(self.names):05d}.parquet"
        self.names.append(name)
        dictionary = [leaf for field in schema if not pa.types.is_list(field.type) for leaf in _leaves(field)]
        return pq.ParquetWriter(
            self._path if self.single else self._path / name,
            schema.with_metadata({VERSION_KEY: str(SCHEMA_VERSION)}),
            compression="zstd",
            use_dictionary=dictionary,  # pyright: ignore[reportArgumentType]
        )


def _leaves(field: pa.Field) -> list[str]:
    if pa.types.is_struct(field.type):
        return [f"{field.name}.{child.name}" for child in field.type if not pa.types.is_nested(child.type)]
    return [field.name]


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    out = {}
    for key, value in row.items():
        if isinstance(value, dict):
            value = _without_nulls(value) or None
        if key == "logit_bias" and value is not None:
            value = {str(token): bias for token, bias in value}
        if value is not None:
            out[key] = value
    return out


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
