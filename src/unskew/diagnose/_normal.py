"""Is a logged number normal? Against the floors that correct engines showed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from unskew._errors import UnskewError
from unskew.diagnose._floor import ABOVE, dtype_name

__all__ = ["KEPT", "MeasuredFloor", "Normal", "floors", "normal"]

KEPT = (
    "logit_noise", "mean_abs", "kl_rollout_old_k1", "kl_rollout_old_k2", "kl_rollout_old_k3", "js", "mean_exp_abs", "mean_ratio",
    "probability_gap", "chi2_token", "sequence_geometric_mean_abs", "max_abs", "probability_gap_max",
)  # fmt: skip
"""Figures kept of a measured floor."""

_AROUND_ONE = ("mean_exp_abs", "mean_ratio")
_GROW = ("max_abs", "probability_gap_max")
_CANCEL = ("kl_rollout_old_k1", "mean_ratio", "chi2_token")
_SQUARES = ("kl_rollout_old_k2", "kl_rollout_old_k3", "js")
_DEEPEST = 128
"""Layers that a model may have where `layers` is not given."""


@dataclass(frozen=True, slots=True)
class MeasuredFloor:
    """The gap of clean rollouts of one model, engine and pair of dtypes, as `unskew lab floors` measured it.

    `dtype` is the engine's, `trainer_dtype` that of the scoring forward; `figures` has those of `KEPT`.
    """

    model: str
    arch: str
    parameters: int
    layers: int
    engine: str
    engine_version: str
    dtype: str
    trainer_dtype: str
    n_tokens: int
    mean_entropy: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Normal:
    """How a value stands to measured floors.

    Args:
        answer: "at the floor", "above the floor" or "cannot tell".
        why: in words, with the numbers.
        low, high: smallest and largest measured value; None of none.
        floors: what it rests on.
        missing: what would make it surer.
    """

    answer: str
    why: str
    low: float | None
    high: float | None
    floors: tuple[MeasuredFloor, ...]
    missing: tuple[str, ...]


@cache
def floors() -> tuple[MeasuredFloor, ...]:
    """Every floor that ships with the package."""
    rows: list[dict[str, Any]] = json.loads((files("unskew.diagnose") / "floors.json").read_text(encoding="utf-8"))["floors"]
    return tuple(MeasuredFloor(**row) for row in rows)


def normal(
    figure: str,
    value: float,
    *,
    dtype: str,
    arch: str | None = None,
    engine: str | None = None,
    layers: int | None = None,
    entropy: float | None = None,
) -> Normal:
    """Whether a value of one of our figures is what correct engines show at this dtype.

    Rounding noise of independent layers adds in squares, so a floor is scaled by √(layers / measured layers), and by that
    squared for figures of second order. Without `layers` what up to 128 of them could explain is "cannot tell", and so is
    what only some of the measured models show, since the same noise moves a sharp policy less.

    Args:
        figure: one of `KEPT`.
        value: as logged, in our sign.
        dtype: of the engine: "bf16", "fp16", "fp32" or a longer name.
        arch: "dense" or "moe"; both where not given.
        engine: "transformers", "vllm" or "llama.cpp"; all where not given.
        layers: of the model that the value is of.
        entropy: mean entropy of its policy, nats: only floors within a factor of 2 of it.

    Raises:
        UnskewError: a dtype that is not measured, or a value that is not finite.

    Example:
        >>> normal("probability_gap", 0.3, dtype="bf16", arch="dense").answer
        'above the floor'
    """
    if not abs(value) < float("inf"):
        raise UnskewError(
            f"{value} is not a number to compare", hint="find the token that made it: `unskew lint TRACE`", exit_code=2
        )
    if figure not in KEPT:
        raise UnskewError(f"no floor is measured of {figure}", hint=f"measured: {', '.join(KEPT)}", exit_code=2)
    name = dtype_name(dtype)
    have = sorted({floor.dtype for floor in floors()})
    if name not in have:
        raise UnskewError(f"no floor is measured for {dtype}", hint=f"measured: {', '.join(have)}", exit_code=2)
    used = tuple(
        f
        for f in floors()
        if f.dtype == name and arch in (None, f.arch) and engine in (None, f.engine)
        and (entropy is None or f.mean_entropy / 2 <= entropy <= 2 * f.mean_entropy)
    )  # fmt: skip
    if not used:
        near = None if entropy is None else f"at an entropy near {entropy:g} nat"
        what = " ".join(filter(None, (engine, arch, name, near)))
        return Normal("cannot tell", f"no floor is measured of {what}", None, None, (), _MISSING)
    base = 1.0 if figure in _AROUND_ONE else 0.0
    sizes = [abs(floor.figures[figure] - base) for floor in used]
    size, low, high = abs(value - base), min(sizes), max(sizes)
    shown = f"|{figure} − 1| = {size:.3g}" if base else f"{figure} = {value:.3g}"
    where = f"correct engines showed {low:.2g} to {high:.2g} in {name} ({len(used)} measurements)"
    key, base = ("mean_abs", 0.0) if figure in _CANCEL else (figure, base)
    power = 2 if figure in _SQUARES else 1

    def reach(model: str, deep: int | None) -> float:
        """What this model's floors would allow a model of so many layers."""
        most = [(abs(f.figures[key] - base), f.layers) for f in used if f.model == model]
        return ABOVE * max(v * max(1.0, ((deep or n) / n) ** 0.5) ** power for v, n in most)

    models = {f.model for f in used}
    every, some = (take(reach(m, deep) for m in models) for take, deep in ((min, layers), (max, layers or _DEEPEST)))
    deep = f"{layers} layers" if layers else f"up to {_DEEPEST} layers"
    if figure in _GROW:
        answer, why = "cannot tell", f"{shown}; a maximum grows with the number of tokens: log a mean beside it"
    elif size > some:
        answer, why = "above the floor", f"{shown}; {where}, which with {deep} would come to at most {some:.2g}"
    elif figure in _CANCEL:
        answer, why = "cannot tell", f"{shown}; signs cancel in it, so a small value proves nothing: log mean_abs beside it"
    elif size <= every:
        answer, why = "at the floor", f"{shown}; {where}" + (f", which with {deep} would come to {every:.2g}" if layers else "")
    else:
        give = " and ".join(o for o, v in (("--layers", layers), ("--entropy", entropy)) if v is None)
        why = f"{shown}; {where}; noise alone could reach {some:.2g} in a deeper or less sharp model, or stay below {every:.2g}"
        answer, why = "cannot tell", why + (f": give {give}" if give else "")
    return Normal(answer, why, low, high, used, _MISSING)


_MISSING = (
    "how sharp your policy is: the same noise moves a confident model less; logit_noise compares across models",
    "your own floor: a step with learning rate 0, or `unskew lab floors --recorded TRACE MODEL` on a clean recording",
    "why: record rollout_logp, old_logp and the token ids of one step, then `unskew diagnose TRACE --model DIR`",
)
