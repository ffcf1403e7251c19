"""Every correction by name: which statistic, which bounds, what it does outside them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from unskew.correct import _tests
from unskew.correct._batch import Batch
from unskew.correct._levels import LEVELS

__all__ = ["METHODS", "Method"]

Form = Literal["is", "tis", "mis", "mask", "psis", "batch-norm"]


@dataclass(frozen=True, slots=True)
class Method:
    """One term of a correction.

    Args:
        name: as it is written.
        form: "is" the importance weight itself, "tis" clipped to the bounds, "mis" kept within them and rejected outside,
            "mask" weight 1 within and rejected outside, "psis" its tail smoothed, "batch-norm" weights over their mean.
        statistic: (B, T) or (B, 1): the log-weight, or what a mask compares; given the arguments.
        bounds: (low, high) of the statistic, from the batch and the arguments.
        takes: names of the arguments, as in "high" or "low, high".
        defaults: what stands where no argument is given.
        level: "token", or what decides for a whole prefix, turn or sequence.
        unit: what the arguments are: "ratio" (the statistic is its log), "nat" (they bound the statistic itself), or ""
            where they bound something that a clean run does not show.
        says: one line.
        source: paper and year.
    """

    name: str
    form: Form
    statistic: Callable[..., Any]
    bounds: Callable[..., tuple[float, float]]
    takes: tuple[tuple[str, ...], ...]
    defaults: tuple[float, ...]
    level: str
    unit: Literal["ratio", "nat", ""]
    says: str
    source: str

    def signature(self) -> str:
        """How it may be written.

        Example:
            >>> METHODS["token-tis"].signature()
            'token-tis(high=2) or token-tis(low, high)'
        """
        shown = []
        for names in self.takes:
            values = self.defaults if len(names) == len(self.defaults) else ()
            pairs = [f"{n}={v:g}" for n, v in zip(names, values, strict=True)] if values else list(names)
            shown.append(f"{self.name}({', '.join(pairs)})" if names else self.name)
        return " or ".join(shown)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _ratio_bounds(_: Batch, *args: float) -> tuple[float, float]:
    """Bounds of a ratio, (high) or (low, high), as bounds of its log."""
    low, high = (0.0, *args)[-2:]
    return _log(low), _log(high)


def _symmetric(_: Batch, *args: float) -> tuple[float, float]:
    low, high = args if len(args) == 2 else (-args[0], args[0])
    return low, high


def _at_most(_: Batch, bound: float) -> tuple[float, float]:
    return -math.inf, bound


def _free(_: Batch, *__: float) -> tuple[float, float]:
    return -math.inf, math.inf


_ONE_OR_TWO = (("high",), ("low", "high"))
_LEVEL_WORDS = {
    "token": "ρ_t", "seq": "∏ρ of the sequence", "geo": "the geometric mean of ρ over the sequence", "prefix": "∏ρ up to the token",
    "minpro": "ρ_t times the smallest ratio before it", "turn": "∏ρ of the turn",
}  # fmt: skip
_LEVEL_SOURCES = {
    "token": "Yao et al. 2025", "seq": "Liu, Li et al. 2025", "geo": "Zheng et al. 2025", "prefix": "Precup et al. 2000",
    "minpro": "Lei et al. 2026", "turn": "",
}  # fmt: skip
_DEFAULTS = {"token": 2.0, "seq": 2.0, "geo": 1.001, "prefix": 2.0, "minpro": 2.0, "turn": 2.0}


def _weights() -> list[Method]:
    out = []
    for level, log_weight in LEVELS.items():

        def statistic(batch: Batch, *_: float, log_weight: Callable[[Batch], Any] = log_weight) -> Any:
            return log_weight(batch)

        words, source, high = _LEVEL_WORDS[level], _LEVEL_SOURCES[level], _DEFAULTS[level]
        two = (1 / high, high) if level == "geo" else (0.5, high)
        two = (0.999, 1.001) if level == "geo" else two
        make = partial(Method, statistic=statistic, level=level, source=source, unit="ratio")
        out += [
            make(f"{level}-is", "is", bounds=_free, takes=((),), defaults=(), says=f"weight {words}, unbounded"),
            make(f"{level}-tis", "tis", bounds=_ratio_bounds, takes=_ONE_OR_TWO, defaults=(high,), says=f"weight {words}, clipped"),
            make(f"{level}-mis", "mis", bounds=_ratio_bounds, takes=_ONE_OR_TWO, defaults=(high,),
                 says=f"weight {words}; outside the bounds rejected"),
            make(f"{level}-mask", "mask", bounds=_ratio_bounds, takes=_ONE_OR_TWO, defaults=two,
                 says=f"weight 1; rejected where {words} is outside the bounds"),
        ]  # fmt: skip
        if level in ("token", "seq"):
            out.append(make(f"{level}-psis", "psis", bounds=_free, takes=((),), defaults=(),
                            says=f"weight {words}, its tail replaced by the quantiles of a fitted Pareto distribution"))  # fmt: skip
    return out


def _rejections() -> list[Method]:
    out = []
    for over in ("token", "sum", "mean", "max"):
        for estimator in ("k1", "k2", "k3"):
            name = f"{'token' if over == 'token' else f'seq-{over}'}-{estimator}"
            words = f"{estimator} of the token" if over == "token" else f"the {over} of {estimator} over the sequence"

            def statistic(batch: Batch, *_: float, estimator: str = estimator, over: str = over) -> Any:
                return _tests.divergence(batch, estimator=estimator, over=over)

            both = estimator == "k1"
            out.append(Method(
                name, "mask", statistic, _symmetric if both else _at_most, (("bound",), ("low", "high")) if both else (("bound",),),
                (0.05,) if over != "sum" else (1.0,), "token" if over == "token" else "seq", "nat",
                f"rejected where {words} (nats{', −d' if both else ''}) is {'outside ±bound' if both else 'above the bound'}",
                "Schulman 2020; verl's rollout_rs",
            ))  # fmt: skip
    return out


_OTHERS = [
    Method("icepop", "mis", lambda batch, *_: batch.d, _ratio_bounds, (("low", "high"),), (0.5, 5.0), "token", "ratio",
           "weight ρ_t between two bounds; outside rejected", "IcePop (2025)"),
    Method("kpop", "mask", lambda batch, *_: _tests.binary_kl_both(batch), _at_most, (("bound",),), (0.05,), "token", "nat",
           "rejected where either binary KL of the token is above the bound", "KPop in Ring-2.6 (2026)"),
    Method("veto", "mask", lambda batch, *_: _tests.smallest(batch), lambda _, low: (_log(low), math.inf), (("low",),), (1e-4,), "seq", "ratio",
           "the sequence is rejected where any ρ_t is below the bound", "verl; slime (2025)"),
    Method("veto-high", "mask", lambda batch, *_: _tests.largest(batch), lambda _, high: (-math.inf, _log(high)), (("high",),), (100.0,),
           "seq", "ratio", "the sequence is rejected where any ρ_t is above the bound", "SkyRL (2026)"),
    Method("opsm", "mask", lambda batch, *_: _tests.opsm(batch), _at_most, (("bound",),), (0.5,), "seq", "",
           "negative advantages of sequences whose mean rollout_logp − logp is above the bound are rejected", "DeepSeek-V3.2 (2025)"),
    Method("m2po", "mask", lambda batch, *_: _tests.square(batch), lambda batch, tau: (-math.inf, _tests.second_moment(batch, tau)),
           (("bound",),), (0.04,), "token", "", "the largest d² are rejected until the mean of the rest is within the bound", "M2PO (2025)"),
    Method("dppo-tv", "mask", lambda batch, *args: _tests.dppo_tv(batch, *(args * 2)[:2]), lambda _, *__: (-math.inf, 1.0),
           (("bound",), ("low", "high")), (0.15,), "token", "",
           "rejected where the token's probability has moved beyond the bound in the direction of its advantage", "DPPO (2026)"),
    Method("dppo-kl", "mask", lambda batch, *_: _tests.dppo_kl(batch), _at_most, (("bound",),), (0.05,), "token", "",
           "rejected where the binary KL from the sampler is above the bound in the direction of its advantage", "DPPO (2026)"),
    Method("batch-norm", "batch-norm", lambda batch, *_: batch.d, _free, ((),), (), "token", "",
           "weights over their mean over the tokens kept", "verl (2025)"),
    Method("seq-batch-norm", "batch-norm", lambda batch, *_: batch.d, _free, ((),), (), "seq", "",
           "weights over the mean of their means over the sequences kept", "verl (2025)"),
]  # fmt: skip

METHODS: Mapping[str, Method] = {method.name: method for method in (*_weights(), *_rejections(), *_OTHERS)}
"""Name → method."""


def names(forms: Sequence[Form]) -> tuple[str, ...]:
    """Names of the methods of these forms."""
    return tuple(name for name, method in METHODS.items() if method.form in forms)
