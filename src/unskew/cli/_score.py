"""`unskew score`: fill a trace with a model's log-probs."""

import click

from unskew._errors import UnskewError
from unskew.cli._output import emit, force_option, json_option


@click.command(epilog="Exit codes: 0 written, 2 usage, 4 unreadable or invalid input.")
@click.argument("trace", type=click.Path())
@click.option("--model", required=True, type=click.Path(), help="HF directory or GGUF file.")
@click.option("--adapter", type=click.Path(), help="PEFT adapter to merge.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option(
    "--temperature", type=click.FloatRange(min=0, min_open=True), help="Divides the logits; the recorded one by default."
)
@click.option("--column", default="old_logp", show_default=True, type=click.Choice(["old_logp", "ref_logp", "logp"]))
@click.option("-o", "--out", required=True, type=click.Path(), help="Directory, .parquet or .jsonl to write.")
@force_option
@json_option
def command(
    trace: str,
    model: str,
    adapter: str | None,
    dtype: str,
    temperature: float | None,
    column: str,
    out: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write the trace with a column of this model's log-probs; with old_logp also entropy and noise_scale.

    \b
    unskew score TRACE --model DIR -o scored
    unskew score TRACE --model BASE --column ref_logp -o with_ref.jsonl
    """
    from unskew.score import HFScorer, SamplingTransform
    from unskew.trace import read, usable, write

    rows, report = usable(read(trace))
    recorded = {value for group in ("trainer", "sampling") for value in rows.setting(group, "temperature") if value}
    if temperature is None and len(recorded) > 1:
        raise UnskewError(
            f"{trace}: temperatures {sorted(recorded)} are recorded", hint="say which: --temperature T", exit_code=2
        )
    scale = float(temperature if temperature is not None else recorded.pop() if recorded else 1.0)
    scores = HFScorer.load(model, dtype=dtype, adapters=[adapter] if adapter else []).score(
        rows, SamplingTransform(temperature=scale)
    )
    rows = rows.with_tokens(**{column: scores.logp})
    if column == "old_logp":
        rows = rows.with_tokens(entropy=scores.entropy, noise_scale=scores.noise_scale)
        rows = rows.with_rows(
            trainer=[{"framework": "unskew score", "dtype": dtype, "temperature": scale, "mode": "eval"}] * len(rows)
        )
    write(rows, out, force=force, provenance={"scored_from": trace, "model": model, "dtype": dtype, "temperature": scale})
    result = {
        "schema_version": 1, "path": out, "column": column, "n_rows": len(rows), "n_excluded": int(report.excluded.sum()),
        "n_tokens": rows.n_tokens, "temperature": scale,
    }  # fmt: skip
    emit(result, as_json=as_json, human=lambda console: console.print(
        f"Wrote {out}: {column} of {rows.n_tokens} tokens in {len(rows)} rows at temperature {scale:g}"
        + (f"; {result['n_excluded']} rows that fail lint were left out" if result["n_excluded"] else "")
    ))  # fmt: skip
