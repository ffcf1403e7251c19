"""Reading traces: a directory of Parquet files, one Parquet file, JSON lines, a glob, or standard input."""

import glob
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from unskew._errors import UnskewError
from unskew.trace._convert import conform_table, rows_to_table, unknown_keys
from unskew.trace._schema import REQUIRED, SCHEMA, SCHEMA_VERSION
from unskew.trace._trace import Trace

if TYPE_CHECKING:
    from unskew.trace._manifest import Manifest

__all__ = ["MANIFEST", "iter_read", "read", "read_manifest"]

MANIFEST = "manifest.json"
VERSION_KEY = b"unskew.schema_version"
_LINES = (".jsonl", ".ndjson", ".json")


def read(path: str | Path) -> Trace:
    """The whole trace at `path`, in memory.

    Args:
        path: a directory that `write` made, a `.parquet` file, a `.jsonl` file, a glob of these, or "-" for JSON lines
            on standard input.

    Raises:
        UnskewError: nothing there, not readable, no rows, a required column missing, or a value that does not fit its
            column (with file, line or row, and key).

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "t.jsonl")
        >>> _ = file.write_text('{"response_ids": [5, 6], "rollout_logp": [-0.5, NaN], "score": 1}\\n')
        >>> trace = read(file)
        >>> len(trace), trace.n_tokens, trace.notes[0].endswith("keys that a trace does not have, not read: score")
        (1, 2, True)
    """
    parts = list(iter_read(path))
    table = pa.concat_tables([part.table for part in parts], promote_options="default").combine_chunks()
    names = [name for name in SCHEMA.names if name in table.column_names]
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Trace(table.select(names), str(path), notes)


def iter_read(
    path: str | Path,
    *,
    batch_rows: int = 1024,
    columns: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Iterator[Trace]:
    """The trace at `path` in batches of whole sequences; memory does not grow with the trace.

    Args:
        path: as for `read`.
        batch_rows: sequences a batch holds at most.
        columns: keys of the schema to read beside `response_ids` and `rollout_logp`; None for all.
        rename: from a key of the files to the key of the schema that it is read as.

    Raises:
        UnskewError: as for `read`, when the batch at fault is reached.
    """
    n_rows = 0
    wanted = set(SCHEMA.names) if columns is None else {*REQUIRED, *columns} & set(SCHEMA.names)
    for file in _files(str(path)):
        reader = _parquet if file.endswith(".parquet") else _lines
        for batch in reader(file, batch_rows, wanted, rename or {}):
            n_rows += len(batch)
            yield batch
    if n_rows == 0:
        raise UnskewError(f"{path}: no rows", hint="an empty file usually means that the recorder wrote nothing")


def read_manifest(path: str | Path) -> "Manifest":
    """The manifest of a trace directory.

    Raises:
        UnskewError: the directory has none, or it does not parse, or a newer version wrote it.
    """
    from unskew.trace._manifest import load

    found = load(Path(path, MANIFEST))
    _check_version(found.schema_version, str(path))
    return found


def _files(path: str) -> list[str]:
    """The files behind a path, in order."""
    if path == "-":
        return [path]
    here = Path(path)
    if here.is_dir():
        return _directory(here)
    if here.exists():
        if here.suffix not in (*_LINES, ".parquet"):
            raise UnskewError(f"{path}: unknown kind of file {here.suffix!r}", hint="expected .parquet or .jsonl")
        return [path]
    matches = sorted(glob.glob(path)) if any(c in path for c in "*?[") else []
    if not matches:
        raise UnskewError(f"{path}: no such file or directory", hint="give a trace directory, .parquet, .jsonl or glob")
    return [file for match in matches for file in _files(match)]


def _directory(path: Path) -> list[str]:
    """The Parquet files that the manifest lists, all there and as long as it says."""
    if not (path / MANIFEST).exists():
        raise UnskewError(
            f"{path}: no {MANIFEST}: not a trace, or its writer was stopped before the end",
            hint=f"read what is there with the glob '{path}/*.parquet'",
        )
    found = read_manifest(path)
    files = [str(path / part) for part in found.parts]
    n_rows = sum(_open(file).metadata.num_rows for file in files)
    if n_rows != found.n_rows:
        raise UnskewError(f"{path}: the files hold {n_rows} rows, {MANIFEST} says {found.n_rows}")
    return files


def _open(file: str) -> pq.ParquetFile:
    with _readable(file):
        return pq.ParquetFile(file, pre_buffer=False)


@contextmanager
def _readable(file: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UnskewError(f"{file}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        raise UnskewError(
            f"{file}: not a readable Parquet file: {str(error).splitlines()[0]}",
            hint="a truncated file means that the writer was killed or a copy is incomplete",
        ) from None


def _parquet(file: str, batch_rows: int, wanted: Set[str], rename: Mapping[str, str]) -> Iterator[Trace]:
    source = _open(file)
    schema = source.schema_arrow
    _check_version(int((schema.metadata or {}).get(VERSION_KEY, SCHEMA_VERSION)), file)
    names = {name: rename.get(name, name) for name in schema.names}
    _check_names(names, rename, file)
    keys = ((names[f.name], [child.name for child in f.type] if pa.types.is_struct(f.type) else ()) for f in schema)
    notes = _notes(file, unknown_keys(keys))
    known = [name for name in schema.names if names[name] in wanted]
    batches = source.iter_batches(batch_size=batch_rows, columns=known)
    start = 0
    with ThreadPoolExecutor(1) as pool:  # decodes the next batch while the caller works on this one
        pending = pool.submit(next, batches, None)
        while True:
            with _readable(file):
                batch = pending.result()
            if batch is None:
                return
            pending = pool.submit(next, batches, None)
            first = start
            renamed = pa.Table.from_batches([batch]).rename_columns([names[name] for name in batch.schema.names])
            table = conform_table(renamed, lambda row, first=first: f"{file} row {first + row}")
            start += len(batch)
            yield Trace(table, file, notes)


def _lines(file: str, batch_rows: int, wanted: Set[str], rename: Mapping[str, str]) -> Iterator[Trace]:
    name = "<stdin>" if file == "-" else file
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    seen: dict[str, str] = {}

    def batch() -> Trace:
        seen.update({key: rename.get(key, key) for row in rows for key in row})
        _check_names(seen, rename, name)
        renamed = [{rename.get(key, key): value for key, value in row.items()} for row in rows] if rename else rows
        keys = {(key, tuple(value) if isinstance(value, dict) else ()) for row in renamed for key, value in row.items()}
        filled = [{**dict.fromkeys(REQUIRED), **{k: v for k, v in row.items() if k in wanted}} for row in renamed]
        at = tuple(numbers)
        table = rows_to_table(filled, lambda row: f"{name} line {at[row]}")
        return Trace(table, name, _notes(name, unknown_keys(keys)))

    with nullcontext(sys.stdin.buffer) if file == "-" else _bytes(file) as stream:
        for number, line in enumerate(stream, start=1):
            row = _row(line, f"{name} line {number}")
            if row is None:
                continue
            rows.append(row)
            numbers.append(number)
            if len(rows) == batch_rows:
                yield batch()
                rows.clear()
                numbers.clear()
    if rows:
        yield batch()


def _bytes(file: str) -> BinaryIO:
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise UnskewError(f"{file}: cannot be read: {error.strerror}") from None


def _row(line: bytes, where: str) -> dict[str, Any] | None:
    """One line as a row; None for a blank line."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnskewError(f"{where}: not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}") from None
    if not text.strip():
        return None
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnskewError(
            f"{where}: invalid JSON at column {error.colno}: {error.msg}", hint="expected one JSON object a line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UnskewError(f"{where}: invalid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UnskewError(f"{where}: expected one JSON object a line, got {type(row).__name__}")
    return row


def _notes(file: str, unknown: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{file}: keys that a trace does not have, not read: {', '.join(unknown)}",) if unknown else ()


def _check_names(names: Mapping[str, str], rename: Mapping[str, str], file: str) -> None:
    """`names`: from each key of the file to the key it is read as."""
    absent = [theirs for theirs in rename if theirs not in names]
    twice = [ours for ours, count in Counter(names.values()).items() if count > 1]
    missing = [name for name in REQUIRED if name not in names.values()]
    has = f"it has {', '.join(sorted(names)) or 'none'}"
    if absent:
        raise UnskewError(f"{file}: no key {absent[0]!r} to rename; {has}", exit_code=2)
    if twice:
        raise UnskewError(f"{file}: more than one key would be read as {twice[0]!r}; {has}", exit_code=2)
    if missing:
        raise UnskewError(
            f"{file}: no column {' or '.join(missing)}; {has}",
            hint="rename its keys with `unskew import SRC -o TRACE --map theirs=ours`",
        )


def _check_version(version: int, file: str) -> None:
    if version > SCHEMA_VERSION:
        raise UnskewError(f"{file}: schema version {version}, this unskew knows {SCHEMA_VERSION}", hint="pip install -U unskew")
