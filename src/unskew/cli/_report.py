"""`unskew report`: write one self-contained HTML page, or a comment in Markdown."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew._errors import UnskewError, require
from unskew.cli._output import emit, force_option, json_option

if TYPE_CHECKING:
    from unskew.trace import Trace


@click.command(epilog="Exit codes: 0 written, 2 usage, 4 unreadable or invalid input.")
@click.argument("trace", type=click.Path())
@click.option(
    "-o", "--out", required=True, type=click.Path(dir_okay=False), help="File to write: HTML, or Markdown if it ends in .md."
)
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
    unskew report TRACE -o report.html --verdict verdict.json --tokenizer CHECKPOINT
    unskew report TRACE -o comment.md --verdict verdict.json    (for a pull request)
    """
    from unskew.measure import measure
    from unskew.report import markdown, render
    from unskew.trace import read, usable

    path = Path(out)
    if path.exists() and not force:
        raise UnskewError(f"{path} exists", hint="choose another name or give --force", exit_code=2)
    if not path.absolute().parent.is_dir():
        raise UnskewError(f"{path.parent}: no such directory", hint="make it first", exit_code=2)
    rows, _ = usable(source := read(trace))
    verdict = _verdict(Path(verdict_path)) if verdict_path else None
    measurement = measure(source).to_dict() if rows.has("old_logp") else None
    if path.suffix == ".md":
        page = markdown(verdict, measurement)
    else:
        texts = None if tokenizer is None else _texts(Path(tokenizer), rows)
        page = render(rows, measurement, verdict, title=title or Path(trace).name, tokenizer_texts=texts)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(page, "utf-8")
    temporary.replace(path)
    size = len(page.encode())
    result = {"schema_version": 1, "path": str(path), "bytes": size}
    emit(
        result,
        as_json=as_json,
        human=lambda console: console.print(f"Wrote {path} ({size / 1000:.0f} kB)", markup=False, soft_wrap=True),
    )


def _verdict(path: Path) -> dict[str, Any]:
    hint = "write one with `unskew diagnose --save`"
    try:
        verdict = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UnskewError(f"{path}: not a verdict: {error}", hint=hint) from None
    if not isinstance(verdict, dict) or verdict.get("schema_version") != 1 or not _dicts(verdict.get("causes")):
        raise UnskewError(f"{path}: not a verdict of schema_version 1", hint=hint)
    return verdict


def _dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _texts(directory: Path, trace: "Trace") -> list[str]:
    """Text of each id that the trace holds, by id; others are left empty."""
    import numpy as np

    file = directory / "tokenizer.json" if directory.is_dir() else directory
    if not file.exists():
        raise UnskewError(f"{file}: no such file", hint="give a directory with tokenizer.json")
    library = require("tokenizers", extra="lab")
    try:
        tokenizer = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise UnskewError(f"{file}: not a tokenizer: {error}", hint="give a directory with tokenizer.json") from None
    size = tokenizer.get_vocab_size()
    used = np.concatenate([trace.tokens("response_ids"), *(trace.ragged("prompt_ids") if trace.has("prompt_ids") else ())])
    texts = [""] * size
    for token in np.unique(used).tolist():
        if 0 <= token < size:
            piece, text = tokenizer.id_to_token(token) or "", tokenizer.decode([token], skip_special_tokens=False)
            # SentencePiece drops the space at the start of a text, and here every token is one.
            texts[token] = f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text
    return texts
