"""The at most seven numbers that stand under a verdict."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from unskew.report._words import interval, number, percent

__all__ = ["NUMBERS", "figures", "rows_of_numbers"]

NUMBERS: Mapping[str, tuple[str, str]] = {
    "logit_noise": ("Logit noise σ̂", "noise on each logit that would make this gap"),
    "mean_abs": ("Mean |d|", "typical size of the log-ratio of a token"),
    "kl_rollout_old_k3": ("KL(rollout ‖ old), k3", "how far the trainer's policy is from the one that sampled"),
    "mean_ratio": ("Mean ratio", "not 1: the log is not of the full distribution that sampled"),
    "calibration": ("Calibration C", "not 0: the tokens were not drawn from what was scored"),
    "ess_sequence": ("Effective sample size", "what products of ratios over sequences keep, raw"),
    "khat_token": ("Tail shape k̂", "tail of the token ratios, raw"),
}
"""Name of a figure → (label, what it says)."""


def figures(measurement: Mapping[str, Any] | None, verdict: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """The figures of a verdict, completed by a measurement's where the verdict has none."""
    return {**(measurement["overall"] if measurement else {}), **(verdict["gap"] if verdict else {})}


def rows_of_numbers(known: Mapping[str, Mapping[str, Any]], at_floor: Mapping[str, float]) -> list[dict[str, str]]:
    """One row of words a number: label, says, value, unit, interval, floor, n."""
    out = []
    for name, (label, says) in NUMBERS.items():
        figure = known.get(name)
        if figure is None:
            continue
        unit = figure.get("unit") or ""
        share = unit.startswith("share of ")
        show = percent if share else partial(number, digits=6) if name == "mean_ratio" else number
        value, floor = figure.get("value"), at_floor.get(name)
        n = figure.get("n")
        out.append({
            "name": name, "label": label, "says": says,
            "value": show(value) if value is not None else figure.get("why") or "not known",
            "known": "yes" if value is not None else "",
            "unit": "" if unit == "1" or value is None else unit.removeprefix("share ") if share else unit,
            "interval": interval(figure.get("interval"), show), "n": number(n),
            "floor": "not known" if floor is None else f"reliable below {floor:.2f}" if name == "khat_token" else show(floor),
        })  # fmt: skip
    return out
