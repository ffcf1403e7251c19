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


@command.command("fault")
@click.argument("causes")
@click.option("-o", "--out", type=click.Path(), help="Trace to write.")
@click.option("--model", help="HF directory or GGUF file to sample from; the lab's own model by default.")
@click.option("--seed", default=0, show_default=True, help="Of prompts, sampling and parameters.")
@click.option("-n", "--sequences", default=48, show_default=True, type=click.IntRange(1))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--force", is_flag=True, help="Overwrite.")
@json_option
def fault_command(
    causes: str, out: str | None, model: str | None, seed: int, sequences: int, dtype: str, force: bool, as_json: bool
) -> None:
    """Write a trace with planted causes: ids separated by commas, "clean", or "list" for all that can be planted.

    \b
    unskew lab fault list
    unskew lab fault sampling.top-p -o top-p.jsonl
    unskew lab fault weights.stale,sampling.temperature -o both.jsonl --seed 3
    unskew lab fault numerics.kv-cache -o kv.jsonl --model ~/models/SmolLM2
    """
    from unskew._errors import UnskewError
    from unskew.causes import CAUSES
    from unskew.lab._faults import FAULTS, plant
    from unskew.trace import write

    if causes.lower() == "list":
        rows = [{"id": name, "side": CAUSES[name].planted, "says": CAUSES[name].says} for name in FAULTS]
        text = "\n".join(f"{row['id']:36s} {row['side']:8s} {row['says']}" for row in rows)
        emit({"schema_version": 1, "faults": rows}, as_json=as_json, human=lambda console: console.print(text, soft_wrap=True))
        return
    if out is None:
        raise UnskewError("no trace to write to", hint="give -o TRACE", exit_code=2)
    names = [] if causes == "clean" else causes.split(",")
    planted = plant(names, seed=seed, n=sequences, dtype=dtype, model=model)
    write(
        planted.trace, out, force=force, provenance={"planted": dict(planted.causes), "seed": seed, "model": planted.model.path}
    )
    result = {"schema_version": 1, "path": out, "planted": dict(planted.causes), "n_rows": len(planted.trace),
              "n_tokens": planted.trace.n_tokens, "model": planted.model.path}  # fmt: skip
    emit(result, as_json=as_json, human=lambda console: console.print(
        f"{out}: {len(planted.trace)} sequences, {planted.trace.n_tokens} tokens, planted {dict(planted.causes) or 'nothing'}\n"
        f"next: unskew diagnose {out} --model {planted.model.path}", soft_wrap=True))  # fmt: skip


@command.command("confusion")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Runs a cause, each with drawn parameters.")
@click.option("--first-seed", default=101, show_default=True, help="Seeds below 101 were used while developing.")
@click.option("--causes", help="Comma-separated ids; all that the lab can plant by default.")
@click.option("--clean", default=40, show_default=True, type=click.IntRange(0), help="Runs without a fault.")
@click.option("--pairs", default=0, show_default=True, type=click.IntRange(0), help="Random pairs of causes a seed.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--model", help="HF directory or GGUF file; the lab's own models by default.")
@click.option("-n", "--sequences", default=48, show_default=True, type=click.IntRange(8))
@json_option
def confusion_command(
    seeds: int, first_seed: int, causes: str | None, clean: int, pairs: int, dtype: str, model: str | None, sequences: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Plant each cause, diagnose it, and count how often the planted cause is named first.

    \b
    unskew lab confusion
    unskew lab confusion --pairs 10
    unskew lab confusion --causes sampling.top-p,template.bos --seeds 3 --clean 0 --json
    """
    from unskew.lab._confusion import confusion

    result = confusion(
        seeds=range(first_seed, first_seed + seeds), causes=causes.split(",") if causes else None, clean=clean, pairs=pairs,
        n=sequences, dtype=dtype, model=model, progress=say,
    ).to_dict()  # fmt: skip

    def human(console: Any) -> None:
        def line(text: str) -> None:
            console.print(text, soft_wrap=True)

        def rate(name: str) -> str:
            return "–" if result[name] is None else f"{result[name]:.1%}"

        line(f"{'cause':36s} trials visible exact class  parameter  called instead")
        for row in result["rows"]:
            error = row["worst_parameter_error"]
            shown = "" if error is None else f"±{error:.1%}"
            line(
                f"{row['cause']:36s} {row['trials']:6d} {row['visible']:7d} {row['exact']:5d} {row['class']:5d} {shown:>10s}  {', '.join(row['called'])}"
            )
        line(
            f"single faults above the floor: exact {rate('single_exact_rate')}, in class {rate('single_class_rate')} of {result['n_visible']}"
        )
        line(f"single faults below it: called clean or named {rate('below_floor_rate')} of {result['n_below']}")
        line(f"parameters within 5 %: {rate('parameter_rate')} of {result['n_parameters']}")
        line(f"pairs: both {rate('pair_exact_rate')}, at least one {rate('pair_one_rate')} of {result['n_pairs']}")
        line(f"false alarms: {rate('false_alarm_rate')} of {result['n_clean']} clean runs")
        line(f"{result['seconds']:.0f} s of diagnosis, {result['forward_passes']:.0f} forward passes, "
             f"in the median {result['median_forward_passes'] or 0:.1f} a diagnosis")  # fmt: skip

    emit(result, as_json=as_json, human=human)


@command.command("gradients")
@click.option("--objective", "objectives", multiple=True, help="Objectives to show; all by default.")
@click.option("--correction", "corrections", multiple=True, help="Corrections, composed ones too; by default each method alone.")
@click.option(
    "--update", default=0.0002, show_default=True, type=click.FloatRange(0), help="Mean |log-prob change| since old_logp, nats."
)
@click.option("--seed", default=0, show_default=True)
@json_option
def gradients_command(objectives: tuple[str, ...], corrections: tuple[str, ...], update: float, seed: int, as_json: bool) -> None:
    """Bias and noise of each objective's gradient with each correction, exactly, under four mismatches.

    On a policy small enough to count all its sequences. Columns: bias, how far the expected gradient is from that of
    a sampler that equals the trainer, over its length; cos, of the two; noise, of 64 sequences; kept, share of the tokens.

    \b
    unskew lab gradients --objective grpo --correction none --correction seq-is
    unskew lab gradients --objective grpo --correction "token-tis(2)+veto(1e-4)"
    unskew lab gradients --json
    """
    from unskew.lab._gradients import gradients

    table = gradients(objectives=objectives, corrections=corrections, update=update, seed=seed, progress=say)

    def human(console: Any) -> None:
        def line(text: str) -> None:
            console.print(text, soft_wrap=True)

        line(f"{table.sequences} sequences, all counted")
        for name, size in table.mismatches.items():
            line(
                f"  {name:10s} mean |d| {size['mean_abs_d']:.4f} nat, ESS {size['seq_ess']:.0%} of the sequences, "
                f"{size['unreached']:.0%} of the trainer's probability out of reach"
            )
        cells = {(row.objective, row.correction, row.mismatch): row for row in table.rows}
        for objective, own in table.own.items():
            line(f"\n{objective} (without a mismatch, cos with the policy gradient {own:.3f})")
            line(" " * 26 + "".join(f"{name:27s}" for name in table.mismatches))
            line(" " * 26 + "  bias    cos noise  kept  " * len(table.mismatches))
            for correction in dict.fromkeys(row.correction for row in table.rows):
                found = [cells[objective, correction, name] for name in table.mismatches]
                mark = "" if all(row.exact for row in found) else "*"
                line(
                    f"{correction + mark:26s}"
                    + "".join(f"{row.bias:6.1%} {row.cosine:6.3f} {row.noise:5.0%} {row.kept:5.0%}  " for row in found)
                )
        if not all(row.exact for row in table.rows):
            line("\n* what is kept depends on the batch: on one of 8192 sequences")

    emit(table.to_dict(), as_json=as_json, human=human)


@command.command("floors")
@click.option("--model", "models", multiple=True, type=click.Choice(["dense", "moe"]), help="Lab models; both by default.")
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice(["hf", "vllm"]), help="Both by default where vllm is installed."
)
@click.option("--recorded", nargs=2, multiple=True, type=click.Path(exists=True, path_type=Path), metavar="TRACE MODEL",
              help="A clean recording and its checkpoint, in place of the lab's models.")  # fmt: skip
@click.option("-n", "n", default=128, show_default=True, type=click.IntRange(1), help="Responses a measurement.")
@json_option
def floors_command(
    models: tuple[str, ...], engines: tuple[str, ...], recorded: tuple[tuple[Path, Path], ...], n: int, as_json: bool
) -> None:
    """How far apart correct engines are: clean rollouts of each engine and dtype, scored in fp32 and in the same dtype.

    \b
    unskew lab floors
    unskew lab floors --recorded clean-trace ./my-checkpoint
    """
    from dataclasses import asdict

    from unskew.lab._floors import measure_floors, recorded_floors

    if recorded:
        rows = [floor for trace, model in recorded for floor in recorded_floors(trace, model)]
    else:
        rows = list(measure_floors(models=models or ("dense", "moe"), engines=engines or None, n=n, progress=say))

    def human(console: Any) -> None:
        shown = ("logit_noise", "mean_abs", "probability_gap", "kl_rollout_old_k3", "mean_exp_abs")
        console.print(f"{'model':12s}{'engine':9s}{'dtypes':19s}" + "".join(f"{name:>18s}" for name in shown), soft_wrap=True)
        for f in rows:
            figures = "".join(f"{f.figures[name]:18.3g}" for name in shown)
            console.print(f"{f.model[:11]:12s}{f.engine:9s}{f'{f.dtype}/{f.trainer_dtype}':19s}{figures}", soft_wrap=True)

    emit({"schema_version": 1, "floors": [asdict(f) for f in rows]}, as_json=as_json, human=human)


@command.command("pages")
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("docs/causes"), show_default=True)
def pages_command(out: Path) -> None:
    """Write the documentation's page of every cause, with a figure of each that the lab can plant.

    \b
    unskew lab pages -o docs/causes
    """
    from unskew.lab._pages import write_pages

    write_pages(out, progress=say)
    click.echo(str(out))
