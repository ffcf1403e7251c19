"""`unskew correct`: what each correction would do to this trace."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from unskew.cli._output import emit, json_option, plain, say

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.correct import Calibrated, WhatIf
    from unskew.measure import Figure
    from unskew.trace import Trace

_METHODS = (
    "none",
    "token-is",
    "seq-is",
    "token-tis(2)",
    "icepop(0.5,5)",
    "seq-tis(2)",
    "geo-mask(0.999,1.001)",
    "seq-mean-k3(0.01)",
    "token-psis",
)
_SHOWN = (
    "tokens_kept", "sequences_kept", "tokens_kept_positive", "tokens_kept_negative", "weight_mean", "weight_max", "ess_before", "ess",
    "khat_before", "khat", "bias_token", "bias_sequence", "gradient_cosine", "gradient_size",
)  # fmt: skip


@click.command(epilog="Exit codes: 0 answered, 2 usage, 4 unreadable or invalid input.")
@click.argument("trace", type=click.Path())
@click.option(
    "--method",
    "methods",
    multiple=True,
    help="A correction, as in token-tis(2)+veto(1e-4); repeat it. The raw weights and six common ones by default.",
)
@click.option(
    "--old", default="old_logp", show_default=True, type=click.Choice(["old_logp", "prefill_logp", "logp"]), help="The trainer."
)
@click.option("--calibrate", "clean", type=click.Path(), help="A trace of a clean run: take the bounds from it, by length.")
@click.option(
    "--false-reject", default=0.01, show_default=True, type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of a clean run that each bound may reject.",
)  # fmt: skip
@click.option("--details", is_flag=True, help="Every figure of each, with unit, n and interval.")
@click.option("--model", type=click.Path(), help="Checkpoint: also how far the gradient of the head is turned.")
@click.option("--max-tokens", default=8192, show_default=True, type=click.IntRange(1), help="Tokens that --model scores at most.")
@click.option(
    "--cut", default=3, show_default=True, type=click.IntRange(0, 20), help="Tokens changed most that are shown for each."
)
@json_option
def command(
    trace: str, methods: tuple[str, ...], old: str, clean: str | None, false_reject: float, model: str | None, max_tokens: int,
    details: bool, cut: int, as_json: bool,
) -> None:  # fmt: skip
    """What each correction would do to this trace: what it keeps, how reliable its weights are, what bias it leaves.

    \b
    unskew correct TRACE
    unskew correct TRACE --method "token-tis(2)" --method "geo-mask(0.999,1.001)+veto(1e-4)"
    unskew correct TRACE --method geo-mask --calibrate CLEAN_TRACE --false-reject 0.01
    unskew explain corrections       (all names)

    A correction is no cure: run `unskew diagnose` first and fix the cause.
    """
    from unskew.correct import Correction, batch_of, calibrate, what_if
    from unskew.trace import read, usable

    corrections: list[Any] = [Correction.parse(text) for text in methods or _METHODS]
    rows, report = usable(read(trace))
    if clean is not None:
        known = batch_of(usable(read(clean))[0], old=old)
        corrections = [calibrate(c, known, false_reject=false_reject) for c in corrections]
    results = [what_if(correction, rows, old=old) for correction in corrections]
    gradients: Sequence[dict[str, Figure]] = [{} for _ in results]
    note = ""
    if model is not None:
        gradients, note = _gradients(results, rows, model, old, max_tokens)
    out = []
    for correction, result, gradient in zip(corrections, results, gradients, strict=True):
        one = result.to_dict()
        one["figures"] |= {name: figure.to_dict() for name, figure in gradient.items()}
        one["cut"] = _tokens(rows, result, old, cut)
        if clean is not None:
            one["calibrated"] = _bins(correction)
        out.append(one)
    n_excluded = int(report.excluded.sum())
    whole = {
        "schema_version": 1,
        "against": old,
        "n_rows": len(report.excluded),
        "n_excluded": n_excluded,
        "note": note,
        "methods": out,
    }
    emit(whole, as_json=as_json, human=lambda console: _show(console, whole, details=details))


def _gradients(results: "Sequence[WhatIf]", rows: "Trace", model: str, old: str, max_tokens: int) -> Any:
    """Cosine and relative size of Σ w A ∇log p at the head against exact next-token weights, for each correction."""
    import numpy as np

    from unskew.measure import Figure
    from unskew.score import HFScorer, head_gradients

    if not rows.has("advantage") and "reward" not in rows.columns:
        why = "neither advantage nor reward is recorded"
        return [{"gradient_cosine": Figure(None, "1", 0, why=why)} for _ in results], ""
    order = np.random.default_rng(0).permutation(len(rows))
    count = max(1, int(np.searchsorted(np.cumsum(rows.lengths[order]), max_tokens, side="right")))
    some = np.zeros(len(rows), bool)
    some[order[:count]] = True
    use = some[rows.row_of_token]
    part = rows.select(some)
    say(f"scoring {part.n_tokens} tokens")
    responses = np.split(part.tokens("response_ids"), part.cu_seqlens[1:-1])
    states = HFScorer.load(model).forward(part.contexts(), responses)
    d = part.tokens(old).astype(np.float64) - part.tokens("rollout_logp")
    advantage = np.where(part.mask & np.isfinite(d), _advantage(rows)[use], 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = advantage * np.exp(np.where(np.isfinite(d), d, 0.0))
    coefficients = np.stack([exact, *(advantage * r.weights.weight[use] for r in results)])
    products = head_gradients(states, coefficients)
    size = np.sqrt(np.diag(products))
    out, n = [], int(part.mask.sum())
    for k in range(1, len(products)):
        known = size[0] > 0 and size[k] > 0
        cosine = float(products[0, k] / (size[0] * size[k])) if known else None
        why = "" if known else "a gradient is zero"
        out.append({
            "gradient_cosine": Figure(cosine, "1", n, why=why),
            "gradient_size": Figure(float(size[k] / size[0]) if size[0] > 0 else None, "of the exact one", n, why=why),
        })  # fmt: skip
    return out, f"gradients of the head over {n} tokens, against exact next-token weights"


def _advantage(rows: "Trace") -> Any:
    """As recorded, else the reward minus the mean of its group (of all rows where there are no groups), a token."""
    import numpy as np

    if rows.has("advantage"):
        return rows.tokens("advantage")
    reward = np.array([np.nan if r is None else r for r in rows.rows("reward")], np.float64)
    groups = rows.rows("group_id") if rows.has("group_id") else [0] * len(rows)
    label = np.unique(np.asarray(groups), return_inverse=True)[1]
    known = np.isfinite(reward)
    mean = np.bincount(label, np.where(known, reward, 0.0)) / np.maximum(np.bincount(label, known), 1)
    return np.where(known, reward - mean[label], 0.0)[rows.row_of_token]


def _tokens(rows: "Trace", result: "WhatIf", old: str, most: int) -> list[dict[str, Any]]:
    import numpy as np

    ids = rows.rows("id")
    out = []
    for token in result.cut[:most]:
        row = int(rows.row_of_token[token])
        d = float(rows.tokens(old)[token]) - float(rows.tokens("rollout_logp")[token])
        out.append({"row": row, "id": ids[row], "position": int(rows.position[token]), "token_id": int(rows.tokens("response_ids")[token]),
                    "ratio": float(np.exp(min(d, 700.0))), "weight": float(result.weights.weight[token])})  # fmt: skip
    return out


def _bins(correction: "Calibrated") -> list[dict[str, Any]]:
    return [
        {"shortest": b.shortest, "longest": b.longest, "n": b.n, "correction": str(b.correction), "false_reject": b.false_reject}
        for b in correction.bins
    ]


def _show(console: "Console", whole: dict[str, Any], *, details: bool) -> None:
    from rich.table import Table

    console.print(f"{whole['n_rows'] - whole['n_excluded']} of {whole['n_rows']} rows, rollout_logp against {whole['against']}\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header, side in (("correction", "left"), ("tokens kept", "right"), ("sequences", "right"), ("ESS", "right"), ("k̂", "right"),
                         ("bias_token", "right"), ("bias_sequence", "right")):  # fmt: skip
        table.add_column(header, justify=side, no_wrap=header != "correction")  # pyright: ignore[reportArgumentType]
    for one in whole["methods"]:
        figures = one["figures"]
        shown = [_plus_minus(figures[name]) for name in ("bias_token", "bias_sequence")]
        few = [_short(figures[name]["value"]) for name in ("sequences_kept", "ess", "khat")]
        table.add_row(plain(one["correction"]), _plus_minus(figures["tokens_kept"]), *few, *shown)
    console.print(table)
    for one in whole["methods"]:
        _show_one(console, one, details=details)
    if whole["note"]:
        console.print(whole["note"], style="dim")
    console.print(
        "\nESS and k̂ are over tokens, or over sequences where the weight is one of a sequence; k̂ of – is a constant tail, token-is and seq-is are the raw weights. bias_token and "
        "bias_sequence bound how far a mean of anything within ±1 is from the one under exact token and sequence weights. A correction is "
        "no cure: `unskew diagnose` names the cause.",
        style="dim",
    )


def _show_one(console: "Console", one: dict[str, Any], *, details: bool) -> None:
    rejected = {term: figure["value"] for term, figure in one["rejected"].items() if figure["value"]}
    if details or one["cut"]:
        console.print(f"\n{plain(one['correction'])}", style="bold")
    if details:
        for name in _SHOWN:
            if (figure := one["figures"].get(name)) is not None:
                why = f" ({figure['why']})" if figure["value"] is None else ""
                console.print(f"  {name} {_interval(figure)}{why} {figure['unit']}, n = {figure['n']}")
    elif "gradient_cosine" in one["figures"]:
        for name in ("gradient_cosine", "gradient_size"):
            if (figure := one["figures"].get(name)) is not None:
                console.print(f"  {name} {_short(figure['value'])} {figure.get('why', '') or figure['unit']}")
    for term, value in rejected.items():
        console.print(plain(f"  {term} alone rejects {value:.2%} of the tokens"))
    for token in one["cut"]:
        console.print(
            f"  row {token['row']} token {token['position']} (id {token['token_id']}): ratio {token['ratio']:.4g}, weight {token['weight']:.4g}"
        )
    for part in one.get("calibrated", ()):
        many = (
            f"{part['shortest']} tokens and more"
            if part["longest"] is None
            else f"{part['shortest']} to {part['longest']} tokens"
        )
        console.print(
            plain(f"  {many}: {part['correction']}")
            + f" ({part['n']} clean sequences; rejects {part['false_reject']:.2%} of those held out)"
        )


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _plus_minus(figure: dict[str, Any]) -> str:
    low_high = figure["interval"]
    return _short(figure["value"]) + ("" if low_high is None else f" ± {(low_high[1] - low_high[0]) / 2:.1g}")


def _interval(figure: dict[str, Any]) -> str:
    """Value and interval, in no more digits than a person reads."""
    low_high = figure["interval"]
    return _short(figure["value"]) + ("" if low_high is None else plain(f" [{low_high[0]:.2g}, {low_high[1]:.2g}]"))
