"""What all commands share: results on stdout, words on stderr, exit codes."""

import json
import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["emit", "exit_for", "fail_on_option", "force_option", "json_option", "plain", "say"]

_RANK = {"info": 0, "warn": 1, "error": 2}

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
force_option = click.option("--force", is_flag=True, help="Overwrite what is there.")
fail_on_option = click.option(
    "--fail-on", type=click.Choice(list(_RANK)), default="warn", show_default=True, help="Exit 1 at or above this severity."
)


def emit(result: Mapping[str, Any], *, as_json: bool, human: Callable[["Console"], None]) -> None:
    """Print a result to stdout: one JSON object, or what `human` draws.

    Non-finite numbers become the strings "nan", "inf", "-inf", since JSON has none.
    """
    if as_json:
        click.echo(json.dumps(_finite(result), indent=1, allow_nan=False))
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() else 110
    human(Console(width=width, soft_wrap=False, highlight=False))


def say(words: str) -> None:
    """One line to stderr."""
    click.echo(words, err=True)


def exit_for(severities: Iterable[str], fail_on: str) -> None:
    """Exit with 1 if any severity is at or above `fail_on`."""
    if any(_RANK[severity] >= _RANK[fail_on] for severity in severities):
        raise SystemExit(1)


def plain(text: str) -> str:
    """Text from a trace made safe for a terminal and for rich: control characters as escapes, markup off.

    Example:
        >>> plain("a\\x1b[31m[b]")
        'a\\\\x1b\\\\[31m\\\\[b]'
    """
    safe = "".join(c if not unicodedata.category(c).startswith("C") else c.encode("unicode_escape").decode() for c in text)
    return safe.replace("[", "\\[")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
