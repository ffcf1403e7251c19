"""Values as a person reads them: numbers, shares, intervals, sentences, and text that cannot act on the reader's screen."""

import unicodedata
from collections.abc import Mapping, Sequence
from math import floor, isfinite, log10
from typing import Any, TypeGuard

__all__ = ["finite", "interval", "number", "percent", "plain_json", "sentence", "short", "signed", "visible"]

_NBSP = "\N{NO-BREAK SPACE}"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def finite(value: Any) -> TypeGuard[float]:
    """Whether this is a number that can be drawn: neither missing, nor words, nor NaN or infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def number(value: Any, digits: int = 4) -> str:
    r"""A number to `digits` significant digits; a missing one in words.

    Example:
        >>> number(0.23676), number(12345), number(None), number(float("-inf"))
        ('0.2368', '12,345', 'not known', '−∞')
        >>> number(-4.25e-8) == "−4.25\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10⁻⁸"
        True
    """
    if value is None:
        return "not known"
    if isinstance(value, bool | str):
        return str(value)
    if value != value:
        return "NaN"
    sign, size = "−" if value < 0 else "", abs(value)
    if not isfinite(size):
        return f"{sign}∞"
    if isinstance(value, int) or (size >= 1e4 and size < 1e7):
        return f"{sign}{size:,.0f}"
    if size and not 1e-4 <= size < 1e7:
        mantissa, exponent = f"{size:.{digits - 1}e}".split("e")
        return f"{sign}{float(mantissa):g}{_NBSP}×{_NBSP}10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    return f"{sign}{size:.{digits}g}"


def signed(value: Any, digits: int = 4) -> str:
    """A number with its sign, also where it is positive.

    Example:
        >>> signed(1.5), signed(-1.5), signed(0.0)
        ('+1.5', '−1.5', '0')
    """
    text = number(value, digits)
    return f"+{text}" if isinstance(value, float | int) and value > 0 else text


def percent(value: Any) -> str:
    """A share in percent with one decimal, more where it is small.

    Example:
        >>> [percent(share).split() for share in (0.9908, 1.0, 0.00043)], percent(None)
        ([['99.1', '%'], ['100', '%'], ['0.043', '%']], 'not known')
    """
    if not finite(value):
        return number(value)
    size = abs(100 * value)
    places = 1 if size >= 0.95 or size == 0 else 1 - floor(log10(size))
    text = f"{size:.{places}f}"
    return f"{'−' if value < 0 else ''}{text.rstrip('0').rstrip('.') if '.' in text else text}{_NBSP}%"


def interval(bounds: Sequence[Any] | None, show: Any = number) -> str:
    """A 95 % interval, or that there is none.

    Example:
        >>> interval((0.053, 0.06)), interval(None)
        ('0.053 to 0.06', 'no interval')
    """
    return "no interval" if not bounds else f"{show(bounds[0])} to {show(bounds[1])}"


def sentence(text: Any) -> str:
    """Text with a capital and a full stop; an id at its start keeps its case.

    Example:
        >>> sentence("the gap is small"), sentence("weights.stale was not tested"), sentence("")
        ('The gap is small.', 'weights.stale was not tested.', '')
    """
    text = str(text or "").strip()
    if not text:
        return ""
    first = text.split()[0]
    as_is = not text[0].isascii() or any(mark in first.rstrip(".") for mark in "._=")
    head = text if as_is else text[0].upper() + text[1:]
    return head if head[-1] in ".!?…" else f"{head}."


def visible(text: Any, *, spaces: bool = False) -> str:
    """Text with control, bidirectional, private and unassigned characters spelled out; line breaks kept.

    Args:
        text: anything from a trace.
        spaces: also show spaces as ·, line breaks as ↵, tabs as ⇥: a token's own text.

    Example:
        >>> visible("a\\x1b[31m\\u202eb"), visible(" a\\n", spaces=True)
        ('a⟨1B⟩[31m⟨202E⟩b', '·a↵')
    """
    marks = {" ": "·", "\n": "↵", "\t": "⇥"} if spaces else {c: c for c in (" ", "\n", "\t", _NBSP)}
    return "".join(marks.get(c) or (c if unicodedata.category(c)[0] not in "CZ" else f"⟨{ord(c):02X}⟩") for c in str(text))


def short(text: Any, limit: int = 48) -> str:
    """At most `limit` characters: head and tail around an ellipsis.

    Example:
        >>> short("abcdefghij", 5)
        'ab…ij'
    """
    text = str(text)
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


def plain_json(value: Any) -> Any:
    """The same value with non-finite numbers as the strings "nan", "inf", "-inf", since JSON has none."""
    if isinstance(value, Mapping):
        return {str(k): plain_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(v) for v in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
