"""`unskew report`: write one self-contained HTML page."""

import json
from pathlib import Path
from typing import Any

import click

from unskew._errors import UnskewError, require
from unskew.cli._output import emit, force_option, json_option


@click.command(epilog="Exit codes: 0 written, 2 usage, 4 unreadable or invalid input.")
@click.argument("trace", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False), help="HTML file to write.")
@click.option("--verdict", "verdict_path", type=click.Path(), help="What `unskew diagnose --save` wrote.")
@click.option("--tokenizer", type=click.Path(), help="Directory with tokenizer.json, to show text instead of ids.")
@click.option("--title", help="Heading; the trace's name by default.")
@force_option
@json_option
def command(
    trace: str, out: str, verdict_path: str | None, tokenizer: str | None, title: str | None, force: bool, as_json: bool
) -> None:
    """Write one HTML page that opens anywhere: verdict, figures, causes, plots, worst tokens.

    \b
    unskew report TRACE -o report.html
    unskew diagnose TRACE --model DIR --save verdict.json; unskew report TRACE --verdict verdict.json -o report.html
    """
    from unskew.measure import measure
    from unskew.report import render
    from unskew.trace import read, usable

    path = Path(out)
    if path.exists() and not force:
        raise UnskewError(f"{path} exists", hint="choose another name or give --force", exit_code=2)
    rows, _ = usable(source := read(trace))
    verdict = _verdict(Path(verdict_path)) if verdict_path else None
    measurement = measure(source).to_dict() if rows.has("old_logp") else None
    page = render(rows, measurement, verdict, title=title or Path(trace).name, decode=_decoder(tokenizer))
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(page, "utf-8")
    temporary.replace(path)
    size = len(page.encode())
    result = {"schema_version": 1, "path": str(path), "bytes": size}
    emit(result, as_json=as_json, human=lambda console: console.print(f"Wrote {path} ({size / 1000:.0f} kB)"))


def _verdict(path: Path) -> dict[str, Any]:
    try:
        verdict = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UnskewError(f"{path}: not a verdict: {error}", hint="write one with `unskew diagnose --save`") from None
    if not isinstance(verdict, dict) or verdict.get("schema_version") != 1 or "causes" not in verdict:
        raise UnskewError(f"{path}: not a verdict of schema_version 1", hint="write one with `unskew diagnose --save`")
    return verdict


def _decoder(directory: str | None) -> Any:
    if directory is None:
        return None
    file = Path(directory) / "tokenizer.json" if Path(directory).is_dir() else Path(directory)
    if not file.exists():
        raise UnskewError(f"{file}: no such file", hint="give a directory with tokenizer.json")
    tokenizer = require("tokenizers", extra="lab").Tokenizer.from_file(str(file))
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
