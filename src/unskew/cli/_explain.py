"""`unskew explain`: what a figure, another project's metric, a key of the trace or a cause means."""

from collections.abc import Mapping
from typing import Any

import click

from unskew._errors import UnskewError
from unskew.cli._output import emit, json_option


@click.command()
@click.argument("topic", required=False)
@click.option("--dtype", help="With NAME=VALUE: dtype of the rollout engine, such as bf16.")
@click.option("--arch", type=click.Choice(["dense", "moe"]), help="With NAME=VALUE: kind of model.")
@click.option(
    "--engine", type=click.Choice(["transformers", "vllm", "llama.cpp"]), help="With NAME=VALUE: only floors of this engine."
)
@click.option("--layers", type=click.IntRange(1), help="With NAME=VALUE: layers of the model.")
@click.option("--entropy", type=click.FloatRange(min=0, min_open=True), help="With NAME=VALUE: mean entropy of the policy, nats.")
@json_option
def command(
    topic: str | None,
    dtype: str | None,
    arch: str | None,
    engine: str | None,
    layers: int | None,
    entropy: float | None,
    as_json: bool,
) -> None:
    """What a figure, another project's metric, a key of the trace or a cause means; without a topic, the list of topics.

    \b
    unskew explain kappa
    unskew explain training/rollout_corr/k3_kl
    unskew explain rollout_probs_diff_mean=0.012 --dtype bf16 --arch moe
    unskew explain sampling.temperature
    """
    if topic and "=" in topic:
        name, _, text = topic.rpartition("=")
        result = _is_normal(name, text, dtype=dtype, arch=arch, engine=engine, layers=layers, entropy=entropy)
    else:
        result = _explained(topic)

    def human(console: Any) -> None:
        for key, words in result.items():
            for text in words if isinstance(words, list) and key not in _LISTS else [words]:
                text = ", ".join(text) if isinstance(text, list) else str(text)
                console.print(f"[bold]{key}[/]: {text.replace('[', chr(92) + '[')}")

    emit({"schema_version": 1, "topic": topic, **result}, as_json=as_json, human=human)


_LISTS = ("topics", "figures", "causes")


def _explained(topic: str | None) -> Mapping[str, Any]:
    from unskew.causes import CAUSES
    from unskew.correct import METHODS
    from unskew.measure import find_metrics, metrics
    from unskew.measure._explain import FIGURES

    if topic is None:
        topics = ["trace", "exit-codes", "corrections", "objectives", "metrics", "floors"]
        return {"topics": topics, "figures": list(FIGURES), "causes": list(CAUSES)}
    if topic == "trace":
        from unskew.trace import SCHEMA, TOKEN_COLUMNS

        return {f.name: f"{f.type}{', one value a response token' if f.name in TOKEN_COLUMNS else ''}" for f in SCHEMA}
    if topic == "corrections":
        return {method.signature(): f"{method.says} ({method.source or 'unskew'})" for method in METHODS.values()}
    if topic == "objectives":
        from unskew.objective import OBJECTIVES

        return {o.name: f"{o.says}; {o.over}, {o.advantages} ({o.source})" for o in OBJECTIVES.values()}
    if topic == "metrics":
        return {name: ", ".join(m.ours) or m.formula for m in metrics() for name in m.names}
    if topic == "floors":
        from unskew.diagnose import floors

        return {
            f"{f.model} ({f.arch}, {f.layers} layers), {f.engine} {f.engine_version} {f.dtype}, trainer {f.trainer_dtype}": ", ".join(
                f"{key} {f.figures[key]:.3g}" for key in ("logit_noise", "mean_abs", "probability_gap", "kl_rollout_old_k3")
            )
            for f in floors()
        }
    if topic == "exit-codes":
        return {"0": "clean", "1": "a finding at or above --fail-on", "2": "usage", "3": "inconclusive",
                "4": "unreadable or invalid input", "130": "interrupted"}  # fmt: skip
    if topic in METHODS:
        method = METHODS[topic]
        return {"written": method.signature(), "says": method.says, "decides for": method.level, "source": method.source}
    if topic in CAUSES:
        cause = CAUSES[topic]
        return {"says": cause.says, "sides": ", ".join(sorted(cause.sides)), "found by": cause.screens_on,
                "refuted if": cause.refute, "fix": cause.remedy, "settings": ", ".join(cause.settings)}  # fmt: skip
    figure = next((name for name in FIGURES if topic == name or topic.startswith(f"{name}_")), None)
    if figure is not None:
        formula, reading, source = FIGURES[figure]
        return {"formula": formula, "reading": reading, "source": source or "this project's conventions"}
    if found := find_metrics(topic):
        if len(found) == 1:
            return _metric(found[0], topic)
        return {f"{m.framework}: {key}": words for m in found for key, words in _metric(m, topic).items() if key != "framework"}
    raise UnskewError(f"nothing is known about {topic!r}", hint="unskew explain lists the topics", exit_code=2)


def _metric(metric: Any, name: str) -> dict[str, str]:
    """One metric of another project, in words."""
    from unskew.measure._explain import FIGURES

    ours = metric.figure(name)
    base = next((key for key in FIGURES if ours and (ours == key or ours.startswith(f"{key}_"))), None)
    out = {
        "framework": metric.framework, "formula": metric.formula, "mean over": metric.over, "of": metric.of,
        "ours": ours or "none of our figures", "sign": metric.sign if ours else "", "note": metric.note,
        "normal there": metric.rule, "reading": FIGURES[base][1] if base else "",
    }  # fmt: skip
    return {key: words for key, words in out.items() if words}


def _is_normal(
    name: str, text: str, *, dtype: str | None, arch: str | None, engine: str | None, layers: int | None, entropy: float | None
) -> dict[str, Any]:
    """Whether a logged value is what correct engines show."""
    from unskew.diagnose import KEPT, normal
    from unskew.measure import find_metrics

    try:
        value = float(text)
    except ValueError:
        raise UnskewError(f"{text!r} is not a number", hint="write NAME=0.012", exit_code=2) from None
    if dtype is None:
        raise UnskewError(
            "the floor depends on the dtype of the rollout engine", hint="give --dtype bf16, fp16 or fp32", exit_code=2
        )
    found = find_metrics(name)
    shown = {(m.figure(name) or "", m.factor, m.of): m for m in found} if name not in KEPT else {(name, 1, "raw"): None}
    if not shown:
        raise UnskewError(f"nothing is known about {name!r}", hint="`unskew explain metrics` lists the names", exit_code=2)
    if len(shown) > 1:
        which = "; ".join(f"{m.framework}: {m.formula}" for m in shown.values() if m)
        raise UnskewError(
            f"{name} is more than one metric: {which}", hint="give the name of one of our figures instead", exit_code=2
        )
    ((figure, factor, of), metric) = next(iter(shown.items()))
    if metric and (of != "raw" or figure not in KEPT):
        why = "after a correction, so that it cannot show a mismatch" if of != "raw" else metric.formula
        raise UnskewError(
            f"{metric.framework}'s {name} is {why}",
            hint="log mean |d| or the mean gap of probabilities, without a correction",
            exit_code=2,
        )
    found_normal = normal(figure, value / factor, dtype=dtype, arch=arch, engine=engine, layers=layers, entropy=entropy)
    rests = [
        f"{f.engine} {f.engine_version} in {f.dtype} against transformers in {f.trainer_dtype}: {f.model}, {f.arch}, {f.layers} layers, "
        f"{f.n_tokens} tokens, mean entropy {f.mean_entropy:.2g} nat: {figure} {f.figures[figure]:.3g}"
        for f in found_normal.floors
    ]
    out: dict[str, Any] = {"answer": found_normal.answer, "why": found_normal.why}
    if metric:
        out["ours"] = figure + (" × −1" if factor < 0 else "")
    if metric and metric.rule:
        out["normal there"] = metric.rule
    return out | {"rests on": rests, "to be surer": list(found_normal.missing)}
