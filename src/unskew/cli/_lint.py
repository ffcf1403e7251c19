"""`unskew lint`: what is wrong with a trace's rows."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew._errors import UnskewError
from unskew.cli._output import emit, exit_for, fail_on_option, json_option, plain

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.trace import LintReport

_STYLE = {"error": "red", "warn": "yellow", "info": "dim"}


@click.command(epilog="Exit codes: 0 clean, 1 a finding at or above --fail-on, 2 usage, 4 unreadable or invalid input.")
@click.argument("trace")
@click.option("--vocab-size", type=click.IntRange(1), help="Token ids must be below it.")
@click.option("--model", type=click.Path(), metavar="DIR", help="Take the vocabulary size from this checkpoint.")
@json_option
@fail_on_option
def command(trace: str, vocab_size: int | None, model: str | None, as_json: bool, fail_on: str) -> None:
    """List what is wrong with a trace's rows, and which of them stay out of the figures.

    \b
    unskew lint rollouts.jsonl
    unskew lint TRACE --model checkpoints/step_120 --json
    head -n 100 rollouts.jsonl | unskew lint - --fail-on error
    """
    from unskew.trace import lint, read

    if vocab_size and model:
        raise UnskewError("--vocab-size and --model say the same thing", hint="give one of them", exit_code=2)
    report = lint(read(trace), vocab_size=vocabulary(Path(model)) if model else vocab_size)
    emit(report.to_dict(), as_json=as_json, human=lambda console: _show(console, report))
    exit_for(report.severity.values(), fail_on)


def vocabulary(model: Path) -> int:
    """Rows of a checkpoint's embedding from `config.json`, else the ids of its `tokenizer.json`; needs no torch."""
    for name, size in (("config.json", _of_config), ("tokenizer.json", _of_tokenizer)):
        if not (model / name).is_file():
            continue
        try:
            found = size(json.loads((model / name).read_bytes()))
        except ValueError as error:
            raise UnskewError(f"{model / name}: not JSON: {error}") from None
        if found is not None:
            return found
    raise UnskewError(f"{model}: no vocabulary size in config.json or tokenizer.json", hint="give --vocab-size N")


def _of_config(config: dict[str, Any]) -> int | None:
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")


def _of_tokenizer(tokenizer: dict[str, Any]) -> int | None:
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [token["id"] for token in tokenizer.get("added_tokens") or ()]
    return max(ids) + 1 if ids else None


def _show(console: "Console", report: "LintReport") -> None:
    from rich.table import Table

    kept = len(report.excluded) - int(report.excluded.sum())
    console.print(
        f"{len(report.excluded)} rows, {report.n_tokens} tokens: {kept} rows usable, {len(report.excluded) - kept} excluded"
    )
    if not report.counts:
        console.print("[green]nothing found[/]")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header, justify in (("code", "left"), ("severity", "left"), ("rows", "right"), ("tokens", "right")):
        table.add_column(header, justify=justify)  # pyright: ignore[reportArgumentType]
    for code, rows in report.counts.items():
        level = report.severity[code]
        table.add_row(code, f"[{_STYLE[level]}]{level}[/]", str(rows or ""), str(report.token_counts.get(code, "")))
    console.print(table)
    for finding in report.findings:
        where = "trace" if finding.row is None else f"row {finding.row}"
        where += f" ({finding.id})" if finding.id is not None else ""
        where += f" token {finding.token}" if finding.token is not None else ""
        more = f", {finding.n_tokens} tokens" if finding.n_tokens > 1 else ""
        column = f"{finding.column}: " if finding.column else ""
        console.print(f"{plain(where)}  {finding.code}  {plain(column + finding.says + more)}", style=_STYLE[finding.severity])
    unlisted = sum(report.counts.values()) - sum(finding.row is not None for finding in report.findings)
    if unlisted:
        console.print(f"… and {unlisted} more", style="dim")
