"""`unskew import`: another tool's dump as a trace."""

from collections import Counter

import click

from unskew._errors import UnskewError
from unskew.cli._output import emit, force_option, json_option, plain, say


@click.command(epilog="Exit codes: 0 written, 2 usage, 4 unreadable or invalid input.")
@click.argument("source", metavar="SRC")
@click.option("-o", "--out", "out", required=True, metavar="TRACE", help="Directory to make, or a .parquet or .jsonl file.")
@click.option("--map", "names", multiple=True, metavar="THEIRS=OURS", help="Read their key as ours; repeat it.")
@force_option
@json_option
def command(source: str, out: str, names: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Convert a dump to a trace, in pieces, with flat memory.

    \b
    unskew import rollouts.jsonl -o trace
    unskew import dump.jsonl -o trace --map tokens=response_ids --map logprobs=rollout_logp
    zcat dump.jsonl.gz | unskew import - -o trace.parquet

    Keys that a trace does not have are named on stderr and left out. `unskew lint TRACE` checks the rows.
    """
    from unskew.trace import Writer, iter_read

    rename = dict(_pair(name) for name in names)
    provenance = {"imported_from": source, **({"map": rename} if rename else {})}
    notes: Counter[str] = Counter()
    with Writer(out, provenance=provenance, force=force) as writer:
        for piece in iter_read(source, rename=rename):
            writer.append(piece)
            notes.update(piece.notes)
    for note in notes:
        say(note)
    result = {"schema_version": 1, "path": out, "n_rows": writer.n_rows, "n_tokens": writer.n_tokens, "notes": list(notes)}
    emit(
        result, as_json=as_json,
        human=lambda console: console.print(f"{plain(out)}: {writer.n_rows} rows, {writer.n_tokens} tokens"),
    )  # fmt: skip


def _pair(text: str) -> tuple[str, str]:
    theirs, sep, ours = text.partition("=")
    if not (sep and theirs and ours):
        raise UnskewError(f"--map {text!r}: expected THEIRS=OURS", hint="--map logprobs=rollout_logp", exit_code=2)
    return theirs, ours
