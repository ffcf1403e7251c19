"""`unskew demo`: record with a planted fault and diagnose it."""

import json
from typing import Any

import click

from unskew.cli._diagnose import show_verdict
from unskew.cli._output import emit, json_option, say


@click.command()
@click.option("--recorded", is_flag=True, help="A trace that vLLM recorded, with its stored verdict: offline, without torch.")
@click.option("--cause", default="sampling.temperature", show_default=True, help="What to plant.")
@click.option("--seed", default=7, show_default=True)
@json_option
def command(recorded: bool, cause: str, seed: int, as_json: bool) -> None:
    """See it work: sample from a tiny model with a fault planted in the engine, and let diagnosis find it.

    \b
    unskew demo
    unskew demo --cause template.bos
    unskew demo --recorded
    """
    if recorded:
        _recorded(as_json)
        return
    from unskew._errors import require

    require("torch", extra="lab")
    from unskew.lab._confusion import name_cause
    from unskew.lab._faults import plant

    planted_in = plant(cause, seed=seed)
    trace, parameters = planted_in.trace, planted_in.causes[cause]
    planted = f"{cause} ({', '.join(f'{k} {v}' for k, v in parameters.items())})" if parameters else cause
    say(f"planted {planted} in transformers' generate; sampled {len(trace)} sequences, {trace.n_tokens} tokens")
    verdict = name_cause(trace, planted_in.model)
    emit({**verdict.to_dict(), "planted": {"cause": cause, "parameters": parameters}}, as_json=as_json,
         human=lambda console: show_verdict(console, verdict.to_dict()))  # fmt: skip


def _recorded(as_json: bool) -> None:
    from unskew.cli._measure import show_measurement
    from unskew.lab import recorded_path
    from unskew.measure import measure
    from unskew.trace import lint, read

    trace = read(recorded_path())
    report, measurement = lint(trace), measure(trace)
    verdict: dict[str, Any] = json.loads(recorded_path("verdict.json").read_text("utf-8"))

    def human(console: Any) -> None:
        console.print("vLLM, bf16, sampled at temperature 0.7 with processed log-probs; the trainer scored at 1.")
        console.print(f"lint: {dict(report.counts) or 'nothing found'} in {len(trace)} rows (computed now)\n")
        show_measurement(console, measurement)
        console.print("\nThe verdict below is stored, not computed now: `unskew demo` computes one (needs torch).\n")
        show_verdict(console, verdict)

    result = {"schema_version": 1, "stored_verdict": verdict, "measurement": measurement.to_dict(), "lint": report.to_dict()}
    emit(result, as_json=as_json, human=human)
