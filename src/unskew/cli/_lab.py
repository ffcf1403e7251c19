"""`unskew lab`: the tiny models that the demo and the tests plant faults in."""

from pathlib import Path

import click


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
