"""`unskew diagnose`: whether engine and trainer disagree above the noise floor, why, and what to change."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew._errors import UnskewError
from unskew.cli._output import emit, exit_for, fail_on_option, force_option, json_option, plain

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = ("logit_noise", "mean_abs", "kl_rollout_old_k3", "mean_ratio", "calibration", "ess_sequence")


@click.command(
    epilog="Exit codes: 0 clean, 1 a cause at or above --fail-on, 2 usage, 3 inconclusive, 4 unreadable or invalid input."
)
@click.argument("trace", type=click.Path())
@click.option("--model", type=click.Path(), help="Checkpoint that sampled: an HF directory or a GGUF file.")
@click.option("--older", multiple=True, type=click.Path(), help="An older checkpoint, newest first; repeat it.")
@click.option("--adapter", type=click.Path(), help="PEFT adapter that belongs to --model.")
@click.option("--set", "facts", multiple=True, metavar="KEY=VALUE", help="Override a declared fact: trainer.temperature=1.")
@click.option("--framework", help="Whose settings the fixes name (verl, trl, slime, …); all known by default.")
@click.option("--max-tokens", default=8192, show_default=True, type=click.IntRange(1), help="Tokens used at most.")
@click.option("--save", type=click.Path(dir_okay=False), help="Also write the JSON verdict to this file.")
@force_option
@json_option
@fail_on_option
def command(
    trace: str, model: str | None, older: tuple[str, ...], adapter: str | None, facts: tuple[str, ...],
    framework: str | None, max_tokens: int, save: str | None, force: bool, as_json: bool, fail_on: str,
) -> None:  # fmt: skip
    """Name the cause of a training-inference mismatch.

    \b
    unskew diagnose rollouts.jsonl --model checkpoints/step_120
    unskew diagnose TRACE --model DIR --older OLDER_DIR --framework verl
    unskew diagnose TRACE --model DIR --set trainer.temperature=1 --json
    unskew diagnose TRACE            (without a model: the record alone, old_logp stands for the scorer)
    """
    from unskew.diagnose import diagnose, override
    from unskew.trace import read

    if save and Path(save).exists() and not force:
        raise UnskewError(f"{save} exists", hint="choose another name or give --force", exit_code=2)
    rows = override(read(trace), dict(_fact(fact) for fact in facts))
    scorers, tokenizer = None, None
    if model:
        from unskew.diagnose import load_scorers

        scorers = load_scorers(model, older=older, adapter=adapter)
        tokenizer = scorers[""]().tokenizer
    elif older or adapter:
        raise UnskewError("--older and --adapter need --model", hint="give --model DIR", exit_code=2)
    verdict = diagnose(
        rows, scorers, framework=framework, max_tokens=max_tokens,
        bos_id=getattr(tokenizer, "bos_token_id", None),
        decode=(lambda token: tokenizer.decode([token])) if tokenizer is not None else None,
    )  # fmt: skip
    if save:
        Path(save).write_text(json.dumps(verdict.to_dict(), indent=1) + "\n")
    emit(verdict.to_dict(), as_json=as_json, human=lambda console: show_verdict(console, verdict.to_dict()))
    if verdict.verdict == "inconclusive":
        raise SystemExit(3)
    severities = [cause.severity for cause in verdict.causes]
    exit_for(severities or (["warn"] if verdict.verdict == "mismatch" else []), fail_on)


def show_verdict(console: "Console", verdict: Mapping[str, Any]) -> None:
    """The verdict for a person: one sentence, the numbers, each cause with its evidence and fix, what is open."""
    from rich.table import Table

    word = verdict["verdict"]
    colour = {"clean": "green", "mismatch": "red", "inconclusive": "yellow"}[word]
    console.print(f"[bold {colour}]{word.upper()}[/]  {plain(verdict['summary'])}\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("figure", "value", "95 % interval", "unit", "n"):
        table.add_column(header, justify="left" if header in ("figure", "unit") else "right")
    for name in _SHOWN:
        if name in verdict["gap"]:
            table.add_row(name, *_cells(verdict["gap"][name]))
        if name == "logit_noise":
            table.add_row("  its floor", *_cells(verdict["floor"]["logit_noise"]))
    console.print(table)
    for rank, cause in enumerate(verdict["causes"], start=1):
        _show_cause(console, rank, cause)
    console.print(f"\nmatters: {plain(verdict['matters']['says'])}")
    console.print(f"correction: {plain(verdict['correction']['says'])}")
    for item in verdict["unchecked"]:
        console.print(f"unchecked: {plain(item['what'])} — {plain(item['why'])}; {plain(item['next'])}", style="dim")
    cost = verdict["cost"]
    spent = f", {cost['forward_passes']} forward passes, {cost['seconds']:.1f} s" if "seconds" in cost else ""
    console.print(f"{verdict['n_used']} sequences used, {verdict['n_excluded']} excluded{spent}", style="dim")


def _show_cause(console: "Console", rank: int, cause: Mapping[str, Any]) -> None:
    share = "" if cause["explained"] is None else f", explains {cause['explained']:.0%} of the {cause['of']}"
    if cause["interval"] is not None:
        share += f" ({cause['interval'][0]:.0%} to {cause['interval'][1]:.0%})"
    console.print(f"\n[bold]{rank}. {cause['id']}[/]  {cause['side']} side, {cause['severity']}, {cause['kind']}{share}")
    console.print(f"   {plain(cause['says'])}")
    for evidence in cause["evidence"]:
        console.print(f"   · {plain(evidence['says'])}")
        for token in evidence["tokens"][:3]:
            text = f" {plain(repr(token['text']))}" if token["text"] is not None else ""
            console.print(
                f"     row {token['row']} token {token['position']}{text}: rollout {token['rollout_logp']:.4f}, "
                f"trainer {token['trainer_logp']:.4f}, d {token['log_ratio']:+.4f}", style="dim",
            )  # fmt: skip
    if cause["severity"] != "info":
        console.print(f"   fix: {plain(cause['fix']['says'])}")
        frameworks = list(dict.fromkeys(name for name, _, _ in cause["fix"]["snippets"]))
        if len(frameworks) > 1:
            console.print(f"   settings known for {', '.join(frameworks)}: give --framework NAME", style="dim")
        else:
            for _, _, text in cause["fix"]["snippets"]:
                console.print(*(f"     {plain(line)}" for line in text.splitlines()), sep="\n", style="dim")
        console.print(f"   refuted if: {plain(cause['refute'])}")


def _cells(figure: Mapping[str, Any]) -> tuple[str, str, str, str]:
    value = figure["value"]
    interval = figure.get("interval")
    return (
        f"– ({figure.get('why') or 'undefined'})" if value is None else f"{value:.4g}",
        "" if interval is None else f"[{interval[0]:.3g}, {interval[1]:.3g}]",
        figure.get("unit") or "",
        "" if figure.get("n") is None else str(figure["n"]),
    )


def _fact(text: str) -> tuple[str, Any]:
    name, sep, value = text.partition("=")
    if not sep or name.count(".") != 1 or name.split(".")[0] not in ("sampling", "source", "trainer"):
        raise UnskewError(f"--set {text!r}: expected GROUP.KEY=VALUE with group sampling, source or trainer",
                          hint="for example --set trainer.temperature=1", exit_code=2)  # fmt: skip
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
