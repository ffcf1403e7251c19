"""`unskew measure`: how far apart, with intervals."""

from typing import TYPE_CHECKING, Any

import click

from unskew.cli._output import emit, json_option, plain

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.measure import Figure, Measurement

_SHOWN = (
    "logit_noise", "mean_abs", "max_abs", "abs_quantile_0.99", "kl_rollout_old_k1", "kl_rollout_old_k3", "kl_old_rollout_k3",
    "mean_ratio", "kappa", "calibration", "calibration_z", "share_above_1.1", "share_above_2", "share_outside", "advantage_skew_positive", "advantage_skew_negative", "ess_token", "khat_token",
    "ess_sequence", "khat_sequence", "sequence_product_mean_abs", "sequence_geometric_sd", "log_perplexity_gap",
)  # fmt: skip


@click.command(epilog="Exit codes: 0 measured, 1 k3 above --max-k3, 2 usage, 4 unreadable or invalid input.")
@click.argument("trace", type=click.Path())
@click.option(
    "--old",
    default="old_logp",
    show_default=True,
    type=click.Choice(["old_logp", "prefill_logp", "logp"]),
    help="What stands for the trainer.",
)
@click.option("--slices", is_flag=True, help="Also by position, probability and what else the trace has columns for.")
@click.option("--clip", nargs=2, type=float, default=(0.8, 1.2), show_default=True, help="Count ratios outside these two bounds.")
@click.option("--max-k3", type=float, help="Exit 1 if kl_rollout_old_k3 is above this.")
@json_option
def command(trace: str, old: str, slices: bool, clip: tuple[float, float], max_k3: float | None, as_json: bool) -> None:
    """How far the rollout's and the trainer's log-probs are apart, in one pass over any size of trace.

    \b
    unskew measure TRACE
    unskew measure TRACE --slices --json
    unskew measure TRACE --max-k3 1e-3     (a gate for CI)
    """
    from unskew.measure import measure_path

    result = measure_path(trace, old=old, slices=slices, clip=clip)
    emit(result.to_dict(), as_json=as_json, human=lambda console: show_measurement(console, result))
    value = result.overall["kl_rollout_old_k3"].value
    if max_k3 is not None and (value is None or not value <= max_k3):
        raise SystemExit(1)


def show_measurement(console: "Console", result: "Measurement") -> None:
    """The figures a person reads first, then slices."""
    from rich.table import Table

    overall = result.overall
    console.print(
        f"{int(overall['n_tokens'].value or 0) if 'n_tokens' in overall.figures else 0} tokens, {result.n_rows - result.n_excluded} "
        f"sequences ({result.n_excluded} of {result.n_rows} rows excluded), rollout_logp against {result.against}"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header, side in (("figure", "left"), ("value", "right"), ("95 % interval", "right"), ("unit", "left"), ("n", "right")):
        table.add_column(header, justify=side)  # pyright: ignore[reportArgumentType]
    for name in _SHOWN:
        if name in overall.figures:
            table.add_row(name, *_cells(overall[name]))
    console.print(table)
    if result.factors:
        table = Table(box=None, pad_edge=False, header_style="dim", title="π_θ/μ taken apart", title_justify="left")
        for header in ("factor", "mean_abs", "k3", "share_outside", "ess_token", "correlation"):
            table.add_column(header, justify="right" if header != "factor" else "left")
        for name, part in result.factors.items():
            values = (part.figures.get(n) for n in ("mean_abs", "kl_rollout_old_k3", "share_outside", "ess_token", "correlation"))
            table.add_row(name, *("" if v is None or v.value is None else f"{v.value:.4g}" for v in values))
        console.print(table)
    for kind, parts in result.slices.items():
        table = Table(box=None, pad_edge=False, header_style="dim", title=f"by {kind}", title_justify="left")
        for header in (kind, "mean_abs", "k3", "mean_log_ratio", "n"):
            table.add_column(header, justify="right" if header != kind else "left")
        for label, part in parts.items():
            values = (part[name].value for name in ("mean_abs", "kl_rollout_old_k3", "mean_log_ratio"))
            table.add_row(plain(label), *(f"{value:.4g}" for value in values), str(part["mean_abs"].n))
        console.print(table)
    for note in result.notes:
        console.print(f"note: {plain(note)}", style="dim")


def _cells(figure: "Figure") -> tuple[str, str, str, str]:
    interval: Any = figure.interval
    value = f"– ({figure.why})" if figure.value is None else f"{figure.value:.4g}"
    return value, "" if interval is None else f"[{interval[0]:.3g}, {interval[1]:.3g}]", figure.unit, str(figure.n)
