"""`unskew lab`: the tiny models that the demo and the tests plant faults in."""

from pathlib import Path
from typing import Any

import click

from unskew.cli._output import emit, json_option, say


@click.group("lab")
def command() -> None:
    """Tiny models to see a mismatch happen on.

    \b
    Examples:
      unskew lab train -o /data/lab            train all models from scratch
      unskew lab train -o /data/lab --model moe
    """


@command.command("train")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("lab-models"), show_default=True)
@click.option("--model", "kind", type=click.Choice(["dense", "moe", "all"]), default="all", show_default=True)
@click.option("--force", is_flag=True, help="Write into a directory that is not empty.")
def train_command(out: Path, kind: str, force: bool) -> None:
    """Train the packaged models from scratch on the CPU, with fixed seeds, into a directory.

    Progress and the figures of each model (greedy accuracy, entropy, shifts) go to stderr.
    """
    from unskew._errors import UnskewError
    from unskew.lab._train import train

    if out.exists() and any(out.iterdir()) and not force:
        raise UnskewError(f"{out} is not empty", hint="choose another directory or pass --force", exit_code=2)
    train(out, kind=kind, log=lambda line: click.echo(line, err=True))
    click.echo(str(out))


@command.command("confusion")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Runs a cause, each with drawn parameters.")
@click.option("--first-seed", default=101, show_default=True, help="Seeds below 101 were used while developing.")
@click.option("--causes", help="Comma-separated ids; all that the lab can plant by default.")
@click.option("--clean", default=40, show_default=True, type=click.IntRange(0), help="Runs without a fault.")
@json_option
def confusion_command(seeds: int, first_seed: int, causes: str | None, clean: int, as_json: bool) -> None:
    """Plant each cause, diagnose it, and count how often the planted cause is named first.

    \b
    unskew lab confusion
    unskew lab confusion --causes sampling.top-p,template.bos --seeds 3 --clean 0 --json
    """
    from unskew.lab._confusion import confusion

    table = confusion(
        seeds=range(first_seed, first_seed + seeds), causes=causes.split(",") if causes else None, clean=clean, progress=say
    )
    result = table.to_dict()

    def human(console: Any) -> None:
        console.print(f"{'cause':34s} trials visible exact  called instead")
        for row in result["rows"]:
            if row["cause"] != "clean":
                called = ", ".join(row["called"])
                console.print(f"{row['cause']:34s} {row['trials']:6d} {row['visible']:7d} {row['exact']:5d}  {called}")
        console.print(f"exact cause on top: {result['single_exact_rate']:.1%} of {result['n_visible']} visible faults")
        console.print(f"false alarms: {result['false_alarm_rate']:.1%} of {result['n_clean']} clean runs")
        console.print(f"{result['seconds']:.0f} s of diagnosis, {result['forward_passes']} forward passes")

    emit(result, as_json=as_json, human=human)
