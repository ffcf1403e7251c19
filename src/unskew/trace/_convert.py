"""Rows and foreign Arrow columns in the types of the schema, or an error that says which value does not fit."""

import json
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from unskew._errors import UnskewError
from unskew.trace._arrow import list_lengths, one_chunk
from unskew.trace._schema import SCHEMA

__all__ = ["conform_table", "rows_to_table", "unknown_keys"]

_BROADCAST = ("weight_version", "advantage")
_ARROW_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def rows_to_table(rows: Sequence[Mapping[str, Any]], where: Callable[[int], str]) -> pa.Table:
    """Rows as an Arrow table in the types of `SCHEMA`; keys that are not in it are left out.

    Args:
        rows: one mapping a sequence. One `weight_version` or `advantage` a row is repeated for each token.
        where: from a row index to the words that open an error message, such as "t.jsonl line 3".

    Raises:
        UnskewError: a value that does not fit its column, with key and element.
    """
    present = {key for row in rows for key in row}
    columns = {}
    for field in SCHEMA:
        if field.name in present:
            values = [_plain(field.name, row.get(field.name), row.get("response_ids")) for row in rows]
            columns[field.name] = _column(values, field, where)
    return pa.table(columns, schema=pa.schema([SCHEMA.field(name) for name in columns]))


def conform_table(table: pa.Table, where: Callable[[int], str]) -> pa.Table:
    """The known columns of a table, cast to `SCHEMA` (float64 to float32, large lists to lists, …), values untouched.

    Raises:
        UnskewError: a column whose values do not fit, with row and element.
    """
    columns = {}
    for field in SCHEMA:
        if field.name not in table.column_names:
            continue
        array = one_chunk(table[field.name])
        try:
            columns[field.name] = _conform_column(array, field, table)
        except _ARROW_ERRORS as error:
            raise _explain(array, field, where, error) from None
    return pa.table(columns, schema=pa.schema([SCHEMA.field(name) for name in columns]))


def unknown_keys(keys: Iterable[tuple[str, Iterable[str]]]) -> tuple[str, ...]:
    """Names that the schema does not have, from (column, its sub-keys) pairs: "score", "sampling.best_of"."""
    unknown = set()
    for name, children in keys:
        if name not in SCHEMA.names:
            unknown.add(name)
        elif pa.types.is_struct(SCHEMA.field(name).type):
            known = {child.name for child in SCHEMA.field(name).type}
            unknown |= {f"{name}.{child}" for child in children if child not in known}
    return tuple(sorted(unknown))


def _plain(name: str, value: Any, response_ids: Any) -> Any:
    """The value in the form Arrow can infer."""
    if value is None:
        return None
    if name in _BROADCAST and isinstance(value, numbers.Real):
        return [value] * (len(response_ids) if isinstance(response_ids, Sequence | np.ndarray) else 1)
    if name in ("id", "group_id") and isinstance(value, numbers.Integral):
        return str(value)
    if name == "messages" and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if name == "sampling" and isinstance(value, Mapping):
        value = dict(value)
        if isinstance(value.get("stop"), str):
            value["stop"] = [value["stop"]]
        if isinstance(value.get("logit_bias"), Mapping):
            value["logit_bias"] = [(_as_int(k), v) for k, v in value["logit_bias"].items()]
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return value.tolist()
    return value


def _as_int(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.lstrip("-").isdigit() else key


def _column(values: list[Any], field: pa.Field, where: Callable[[int], str]) -> pa.Array:
    try:
        if pa.types.is_struct(field.type):
            if any(_misfit(value, field.type) for value in values):
                raise TypeError
            return pa.array(values, field.type)
        return _conform(pa.array(values), field.type)
    except _ARROW_ERRORS as error:
        raise _explain(values, field, where, error) from None


def _conform_column(array: pa.Array, field: pa.Field, table: pa.Table) -> pa.Array:
    if field.name in _BROADCAST and _is_number(array.type):
        lengths = list_lengths(table["response_ids"])
        values = array.take(pa.array(np.repeat(np.arange(len(array)), lengths)))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        mask = array.is_null() if array.null_count else None
        array = pa.ListArray.from_arrays(offsets, values, mask=mask)
    if field.name == "messages" and not _is_text(array.type):
        array = pa.array([None if v is None else json.dumps(v, ensure_ascii=False) for v in array.to_pylist()])
    return _conform(array, field.type)


def _conform(array: pa.Array, target: pa.DataType) -> pa.Array:
    """`array` in the type `target`; raises where that would change a value's meaning."""
    source = array.type
    if source == target:
        return array
    if pa.types.is_null(source):
        return pa.nulls(len(array), target)
    if pa.types.is_dictionary(source):
        return _conform(array.dictionary_decode(), target)
    if pa.types.is_list(target):
        if not (pa.types.is_list(source) or pa.types.is_large_list(source) or pa.types.is_fixed_size_list(source)):
            raise TypeError(f"expected {target}, got {source}")
        lists = array.cast(pa.list_(source.value_type)) if not pa.types.is_list(source) else array
        lists = pa.concat_arrays([lists]) if lists.offset else lists
        mask = lists.is_null() if lists.null_count else None
        return pa.ListArray.from_arrays(lists.offsets, _conform(lists.values, target.value_type), mask=mask)
    if pa.types.is_struct(target):
        if not pa.types.is_struct(source):
            raise TypeError(f"expected {target}, got {source}")
        names = {field.name for field in source}
        children = [
            _conform(array.field(field.name), field.type) if field.name in names else pa.nulls(len(array), field.type)
            for field in target
        ]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=array.is_null())
    number = _is_number(source) or pa.types.is_boolean(source)
    fits = (
        (pa.types.is_floating(target) and _is_number(source))
        or (pa.types.is_integer(target) and number)
        or (pa.types.is_boolean(target) and pa.types.is_boolean(source))
        or (pa.types.is_string(target) and (_is_text(source) or pa.types.is_integer(source)))
        or (pa.types.is_map(target) and pa.types.is_map(source))
    )
    if not fits:
        raise TypeError(f"expected {target}, got {source}")
    return array.cast(target, safe=not pa.types.is_floating(target))


def _explain(values: Any, field: pa.Field, where: Callable[[int], str], error: Exception) -> UnskewError:
    """The error that names the first row whose value does not fit; the whole column where none is at fault alone."""
    for row, value in enumerate(values):
        value = value.as_py() if isinstance(value, pa.Scalar) else value
        found = _misfit(value, field.type)
        if found:
            path, expected, got = found
            return UnskewError(f"{where(row)}: {field.name}{path}: expected {expected}, got {got}")
    return UnskewError(f"{where(0)} and after: {field.name}: expected {field.type}: {error}")


def _misfit(value: Any, target: pa.DataType) -> tuple[str, str, str] | None:
    """Where inside the value it departs from the type: (path, expected, got)."""
    if value is None:
        return None
    got = f"{type(value).__name__} {_short(value)}"
    if pa.types.is_list(target) or pa.types.is_map(target):
        if not isinstance(value, list | tuple | np.ndarray):
            return "", "a list", got
        if pa.types.is_map(target):
            pairs = [(_misfit(k, target.key_type), _misfit(v, target.item_type)) for k, v in value]
            return next((("", "token ids and numbers", got) for pair in pairs if any(pair)), None)
        inner = ((f"[{i}]", _misfit(item, target.value_type)) for i, item in enumerate(value))
        return next(((step + found[0], *found[1:]) for step, found in inner if found), None)
    if pa.types.is_struct(target):
        if not isinstance(value, Mapping):
            return "", "an object", got
        inner = ((f".{child.name}", _misfit(value.get(child.name), child.type)) for child in target)
        return next(((step + found[0], *found[1:]) for step, found in inner if found), None)
    if pa.types.is_integer(target):
        limit = 1 << (target.bit_width - 1)
        whole = isinstance(value, numbers.Integral | np.bool_) or (isinstance(value, float) and value.is_integer())
        return None if whole and -limit <= int(value) < limit else ("", f"an integer of {target.bit_width} bits", got)
    if pa.types.is_floating(target):
        return None if isinstance(value, numbers.Real) and not isinstance(value, bool) else ("", "a number", got)
    if pa.types.is_boolean(target):
        return None if isinstance(value, bool | np.bool_) else ("", "true or false", got)
    if not isinstance(value, str):
        return "", "text", got
    return ("", "text without lone surrogates", got) if any("\ud800" <= c <= "\udfff" for c in value) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
