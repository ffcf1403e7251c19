"""Traces on disk: a directory of Parquet files with a manifest, a Parquet file, or JSONL with the same keys."""

import glob
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from unskew._errors import UnskewError
from unskew.trace._schema import REQUIRED, SCHEMA, SCHEMA_VERSION, TOKEN_COLUMNS
from unskew.trace._trace import Trace

__all__ = ["Writer", "iter_read", "read", "read_manifest", "write"]

MANIFEST = "manifest.json"
_BATCH_ROWS = 2048
_BROADCAST = ("weight_version", "advantage")


def read(path: str | Path) -> Trace:
    """A whole trace: a directory of Parquet, a `.parquet` or `.jsonl` file, a glob of either, or "-" (JSONL on stdin).

    Raises:
        UnskewError: nothing there, not readable, or rows that do not fit the schema: with file, row and column.
    """
    chunks = list(iter_read(path))
    names = {name for chunk in chunks for name in chunk.table.column_names}
    schema = pa.schema([field for field in SCHEMA if field.name in names])
    table = pa.concat_tables([_fill(chunk.table, schema) for chunk in chunks])
    notes = tuple(dict.fromkeys(note for chunk in chunks for note in chunk.notes))
    return Trace(table, str(path), notes)


def iter_read(path: str | Path, *, batch_rows: int = _BATCH_ROWS) -> Iterator[Trace]:
    """The trace in pieces of whole sequences, with flat memory.

    Raises:
        UnskewError: as `read`.
    """
    empty = True
    for file in _files(str(path)):
        for chunk in _jsonl(file, batch_rows) if _is_jsonl(file) else _parquet(file, batch_rows):
            empty = False
            yield chunk
    if empty:
        raise UnskewError(f"{path}: no rows", hint="an empty trace cannot be measured; check that the writer finished")


def write(
    trace: Trace | Iterable[Trace], path: str | Path, *, provenance: Mapping[str, Any] | None = None, force: bool = False
) -> None:
    """Write a trace: a `.jsonl` or `.parquet` file, else a directory of Parquet with a manifest. All or nothing.

    Raises:
        UnskewError: the path exists and `force` is false.
    """
    with Writer(path, provenance=provenance, force=force) as writer:
        for chunk in [trace] if isinstance(trace, Trace) else trace:
            writer.append(chunk)


class Writer:
    """Streams traces to one path; what it writes appears under its name only when it is complete.

    Data goes to `PATH.unskew-tmp`, is synced and renamed on a clean exit, and removed if the block raises. A killed
    writer leaves only the temporary name, which `read` refuses.

    Args:
        path: `.jsonl`, `.parquet`, or a directory to be made.
        provenance: what the manifest says of where the rows are from (directories only).
        force: replace what is there.
    """

    def __init__(self, path: str | Path, *, provenance: Mapping[str, Any] | None = None, force: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not force:
            raise UnskewError(f"{self.path} exists", hint="choose another name or give --force", exit_code=2)
        self._temporary = self.path.with_name(self.path.name + ".unskew-tmp")
        self._provenance = dict(provenance or {})
        self._kind = self.path.suffix if self.path.suffix in (".jsonl", ".parquet") else "directory"
        self._parquet: pq.ParquetWriter | None = None
        self._jsonl: BinaryIO | None = None
        self.n_rows = self.n_tokens = self._parts = 0

    def __enter__(self) -> "Writer":
        _remove(self._temporary)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._kind == "directory":
            self._temporary.mkdir()
        elif self._kind == ".jsonl":
            self._jsonl = open(self._temporary, "wb")
        return self

    def append(self, trace: Trace) -> None:
        """Add rows. Columns may differ between calls in a directory or JSONL; a `.parquet` file keeps the first's."""
        if self._jsonl is not None:
            for row in trace.table.to_pylist():
                self._jsonl.write((json.dumps(_json_row(row)) + "\n").encode())
        elif self._kind == "directory":
            pq.write_table(trace.table, self._temporary / f"part-{self._parts:05d}.parquet", compression="zstd")
            self._parts += 1
        else:
            if self._parquet is None:
                self._parquet = pq.ParquetWriter(self._temporary, trace.table.schema, compression="zstd")
            self._parquet.write_table(_fill(trace.table, self._parquet.schema))
        self.n_rows += len(trace)
        self.n_tokens += trace.n_tokens

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in (self._parquet, self._jsonl):
            if stream is not None:
                stream.close()
        if kind is not None:
            _remove(self._temporary)
            return
        if self._kind == "directory":
            manifest = {"schema_version": SCHEMA_VERSION, "n_rows": self.n_rows, "n_tokens": self.n_tokens,
                        "provenance": self._provenance}  # fmt: skip
            (self._temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        if not self._temporary.exists():
            raise UnskewError(f"{self.path}: no rows to write", hint="an empty trace is not written")
        if self.path.exists():
            _remove(self.path)
        os.replace(self._temporary, self.path)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a trace directory: schema_version, n_rows, n_tokens, provenance.

    Raises:
        UnskewError: missing, not JSON, or of a newer schema.
    """
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise UnskewError(
            f"{path}: no {MANIFEST}: the writer did not finish, or this is not a trace", hint="name the Parquet files: 'DIR/*.parquet'"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnskewError(f"{file}: not a manifest: {error}") from None
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise UnskewError(f"{file}: schema_version {version!r}, this unskew reads up to {SCHEMA_VERSION}", hint="upgrade unskew")
    return manifest


def _files(path: str) -> list[str]:
    if path == "-":
        return ["-"]
    if any(char in path for char in "*?[") and not os.path.exists(path):
        found = sorted(glob.glob(path))
        if not found:
            raise UnskewError(f"{path}: no file matches", hint="check the pattern")
        return [file for match in found for file in _files(match)]
    if not os.path.exists(path):
        raise UnskewError(f"{path}: no such file or directory", hint="check the path")
    if not os.path.isdir(path):
        return [path]
    read_manifest(path)
    parts = sorted(str(file) for file in Path(path).glob("*.parquet"))
    if not parts:
        raise UnskewError(f"{path}: no Parquet files", hint="the trace is empty; check that the writer finished")
    return parts


def _is_jsonl(file: str) -> bool:
    if file == "-" or file.endswith((".jsonl", ".json", ".ndjson")):
        return True
    if file.endswith(".unskew-tmp"):
        raise UnskewError(f"{file}: an unfinished trace", hint="its writer was stopped; record it again")
    return False


def _parquet(file: str, batch_rows: int) -> Iterator[Trace]:
    try:
        source = pq.ParquetFile(file)
        known = [field.name for field in source.schema_arrow if field.name in SCHEMA.names]
        notes = _unknown(file, [field.name for field in source.schema_arrow if field.name not in SCHEMA.names])
        _required(file, set(known))
        row = 0
        for batch in source.iter_batches(batch_size=batch_rows, columns=known):
            yield Trace(_cast(pa.Table.from_batches([batch]), file, row), file, notes)
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise UnskewError(f"{file}: not readable as Parquet: {error}", hint="the file is truncated or not Parquet; write it again") from None


def _cast(table: pa.Table, file: str, row: int) -> pa.Table:
    columns, fields = [], []
    for name in table.column_names:
        field, column = SCHEMA.field(name), table[name]
        if name == "messages" and not pa.types.is_string(column.type):
            column = pa.chunked_array([pa.array([None if v is None else json.dumps(v) for v in column.to_pylist()], pa.string())])
        if name in _BROADCAST and not pa.types.is_nested(column.type):
            column = _broadcast(column.to_pylist(), table["response_ids"], field)
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise UnskewError(
                f"{file} rows from {row}: column {name} is {column.type}, expected {field.type}: {error}",
                hint="see `unskew explain trace` for the types",
            ) from None
        fields.append(field)
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _broadcast(values: list[Any], responses: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    rows = [None if v is None else [v] * len(r) for v, r in zip(values, responses.to_pylist(), strict=True)]
    return pa.chunked_array([pa.array(rows, field.type)])


def _jsonl(file: str, batch_rows: int) -> Iterator[Trace]:
    stream = sys.stdin.buffer if file == "-" else open(file, "rb")
    name = "<stdin>" if file == "-" else file
    rows: list[dict[str, Any]] = []
    unknown: dict[str, None] = {}
    with stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            rows.append(_parse(line, name, number, unknown))
            if len(rows) == batch_rows:
                yield _of_json(rows, name, number - len(rows), _unknown(name, list(unknown)))
                rows = []
    if rows:
        yield _of_json(rows, name, number - len(rows), _unknown(name, list(unknown)))


def _parse(line: bytes, name: str, number: int, unknown: dict[str, None]) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnskewError(f"{name} line {number}: not UTF-8: {error.reason} at byte {error.start}", hint="write JSON as UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnskewError(f"{name} line {number}: not JSON: {error}", hint="one JSON object a line; the last line may be cut off") from None
    if not isinstance(row, dict):
        raise UnskewError(f"{name} line {number}: a {type(row).__name__}, expected an object", hint="one JSON object a line")
    unknown.update(dict.fromkeys(key for key in row if key not in SCHEMA.names))
    _required(f"{name} line {number}", set(row))
    out = {key: value for key, value in row.items() if key in SCHEMA.names}
    for key in _BROADCAST:
        if isinstance(out.get(key), int | float) and isinstance(out["response_ids"], list):
            out[key] = [out[key]] * len(out["response_ids"])
    if not isinstance(out.get("messages"), str | None):
        out["messages"] = json.dumps(out["messages"])
    for key in ("id", "group_id"):
        if isinstance(out.get(key), int):
            out[key] = str(out[key])
    bias = (out.get("sampling") or {}).get("logit_bias") if isinstance(out.get("sampling"), dict) else None
    if isinstance(bias, dict):
        try:
            out["sampling"] = {**out["sampling"], "logit_bias": [(int(k), v) for k, v in bias.items()]}
        except ValueError:
            raise UnskewError(f"{name} line {number}: sampling.logit_bias has a key that is not a token id") from None
    return out


def _of_json(rows: list[dict[str, Any]], name: str, first: int, notes: tuple[str, ...]) -> Trace:
    columns, fields = [], []
    for field in SCHEMA:
        if not any(field.name in row for row in rows):
            continue
        values = [row.get(field.name) for row in rows]
        try:
            columns.append(pa.array(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, AttributeError, TypeError, ValueError):
            raise _bad_value(rows, field, name, first) from None
        fields.append(field)
    return Trace(pa.Table.from_arrays(columns, schema=pa.schema(fields)), name, notes)


def _bad_value(rows: list[dict[str, Any]], field: pa.Field, name: str, first: int) -> UnskewError:
    """The error that names the first value which does not fit its column."""
    for number, row in enumerate(rows, start=first + 1):
        value = row.get(field.name)
        try:
            pa.array([value], field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, AttributeError, TypeError, ValueError) as error:
            where = ""
            if isinstance(value, list) and field.name in TOKEN_COLUMNS | {"prompt_ids"}:
                for token, item in enumerate(value):
                    try:
                        pa.array([item], field.type.value_type)
                    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, ValueError) as inner:
                        where, error = f" token {token}", inner
                        break
            return UnskewError(
                f"{name} line {number}{where}: {field.name} does not fit {field.type}: {str(error).splitlines()[0][:200]}",
                hint="see `unskew explain trace` for the types",
            )
    return UnskewError(f"{name}: column {field.name} does not fit {field.type}")


def _required(where: str, present: set[str]) -> None:
    missing = [name for name in REQUIRED if name not in present]
    if missing:
        raise UnskewError(
            f"{where}: no {' and no '.join(missing)}", hint="a trace needs response_ids and rollout_logp; see `unskew explain trace`"
        )


def _unknown(where: str, names: list[str]) -> tuple[str, ...]:
    return (f"{where}: keys that are not of a trace and were not read: {', '.join(sorted(names))}",) if names else ()


def _fill(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of `schema` in its order, null where it has none."""
    columns = [table[f.name] if f.name in table.column_names else pa.nulls(len(table), f.type) for f in schema]
    return pa.Table.from_arrays([c if isinstance(c, pa.ChunkedArray) else pa.chunked_array([c]) for c in columns], schema=schema)


def _json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in row.items() if value is not None}
    for key in ("sampling", "source", "trainer"):
        if key in out:
            out[key] = {k: (dict(v) if k == "logit_bias" else v) for k, v in out[key].items() if v is not None}
    return out


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()
