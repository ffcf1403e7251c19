"""How often diagnosis names the causes that were planted."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from unskew.causes import CAUSES
from unskew.diagnose import Verdict, diagnose
from unskew.diagnose._floor import ABOVE, logit_noise
from unskew.lab._faults import FAULTS, LabModel, Planted, lab_model, plant
from unskew.trace import Trace

__all__ = ["Confusion", "Trial", "confusion", "name_cause"]

_LEAST = 1e-6
_NATURAL: Mapping[str, Callable[[float], float]] = {
    "top_p": lambda p: 1 - p, "repetition_penalty": lambda x: x - 1, "base_ratio": math.log, "scale": lambda x: x - 1,
}  # fmt: skip
"""What a parameter's error is relative to, where it is not the parameter itself."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Planted causes (or none), what diagnosis named, and whether the faults could be seen at all.

    Args:
        planted: ids.
        effects: σ̂ of each planted change in nats, from a paired run with the fault off.
        floor: σ̂ of that paired run, nats.
        named: ids above severity info, in the verdict's order.
        classes: of the first named cause, the ids that the data cannot tell it from.
        errors: relative error of each fitted parameter of the planted causes.
    """

    planted: tuple[str, ...]
    seed: int
    model: str
    dtype: str
    parameters: Mapping[str, Any]
    effects: tuple[float, ...]
    floor: float
    named: tuple[str, ...]
    classes: tuple[str, ...]
    found: Mapping[str, Any]
    errors: Mapping[str, float]
    verdict: str
    seconds: float
    forward_passes: float

    @property
    def visible(self) -> bool:
        """Whether each fault is above the floor; one that changes no log-prob, or only the record, always is."""
        return all(
            effect > ABOVE * self.floor or CAUSES[cause].kind == "lint" or cause == "sampling.silent"
            for cause, effect in zip(self.planted, self.effects, strict=True)
        )

    @property
    def exact(self) -> bool:
        """Whether the planted causes, and no others before them, are named."""
        return bool(self.planted) and set(self.named[: len(self.planted)]) == set(self.planted)

    @property
    def in_class(self) -> bool:
        """Whether the planted cause is in the class of the first one named."""
        return self.exact or bool(set(self.planted) & set(self.classes))

    @property
    def one(self) -> bool:
        """Whether at least one of the planted causes is named."""
        return bool(set(self.named) & set(self.planted))


@dataclass(frozen=True, slots=True)
class Confusion:
    """All trials and their rates."""

    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON form: rates, one row a cause, all trials; a rate of nothing is None."""
        single = [t for t in self.trials if len(t.planted) == 1]
        seen, below = [t for t in single if t.visible], [t for t in single if not t.visible]
        pairs = [t for t in self.trials if len(t.planted) == 2]
        clean = [t for t in self.trials if not t.planted]
        errors = [error for t in seen if t.exact for error in t.errors.values()]
        rows = []
        for planted in dict.fromkeys(t.planted for t in single):
            trials = [t for t in single if t.planted == planted]
            visible = [t for t in trials if t.visible]
            others = [t.named[0] if t.named else t.verdict for t in visible if not t.exact]
            rows.append({"cause": planted[0], "trials": len(trials), "visible": len(visible), "exact": sum(t.exact for t in visible),
                         "class": sum(t.in_class for t in visible), "called": sorted(set(others)),
                         "worst_parameter_error": max((e for t in visible if t.exact for e in t.errors.values()), default=None)})  # fmt: skip
        passes = sorted(t.forward_passes for t in self.trials)
        return {
            "schema_version": 1,
            "single_exact_rate": _rate(t.exact for t in seen), "single_class_rate": _rate(t.in_class for t in seen),
            "below_floor_rate": _rate(t.verdict == "clean" or t.exact for t in below),
            "parameter_rate": _rate(error <= 0.05 for error in errors),
            "pair_exact_rate": _rate(t.exact for t in pairs), "pair_one_rate": _rate(t.one for t in pairs),
            "false_alarm_rate": _rate(t.verdict != "clean" for t in clean),
            "n_visible": len(seen), "n_below": len(below), "n_pairs": len(pairs), "n_clean": len(clean), "n_parameters": len(errors),
            "seconds": sum(t.seconds for t in self.trials), "forward_passes": sum(passes),
            "median_forward_passes": float(np.median(passes)) if passes else None, "rows": rows,
            "trials": [{**asdict(t), "visible": t.visible, "exact": t.exact} for t in self.trials],
        }  # fmt: skip


def _rate(hits: Any) -> float | None:
    values = list(hits)
    return sum(values) / len(values) if values else None


def confusion(
    *, seeds: Sequence[int], causes: Sequence[str] | None = None, clean: int = 0, pairs: int = 0, n: int = 48,
    dtype: str = "float32", model: str | LabModel | None = None, progress: Callable[[str], None] = lambda _: None,
) -> Confusion:  # fmt: skip
    """Plant each cause once a seed, `pairs` random pairs a seed and `clean` runs with no fault, and diagnose them all.

    A pair's parts each exceed three times the floor of the paired run. Clean runs: fp32 and bf16, dense and MoE, short
    and long, temperature 1 and 0.6 honestly logged, in turn.
    """
    chosen, trials = list(causes if causes is not None else FAULTS), []

    def add(trial: Trial) -> None:
        trials.append(trial)
        named = ", ".join(trial.named[:3]) or trial.verdict
        progress(f"{' + '.join(trial.planted) or 'clean'} seed {trial.seed}: {named} ({trial.seconds:.1f} s)")

    for cause in chosen:
        for seed in seeds:
            add(_trial((cause,), seed, n, dtype, model))
    for seed in seeds if pairs else ():
        for pair in _pairs(chosen, pairs, seed, n, dtype, model):
            add(_trial(pair, seed, n, dtype, model))
    for k in range(clean):
        add(_clean(seeds[0] + 1000 + k, k, n, model))
    return Confusion(tuple(trials))


def _clean(seed: int, k: int, n: int, model: str | LabModel | None) -> Trial:
    dtype, tokens = ("float32", "bfloat16")[k % 2], (80, 80, 24, 120)[k // 4 % 4]
    where = model or ("dense", "dense", "moe", "moe")[k % 4]
    switches = {"temperature": 0.6, "logprobs_mode": "processed", "trainer.temperature": 0.6} if k // 2 % 3 == 2 else {}
    return _named(
        plant(None, seed=seed, n=n, dtype=dtype, model=where, max_tokens=tokens, switches=switches), seed, dtype, (), 0.0
    )


def _trial(causes: tuple[str, ...], seed: int, n: int, dtype: str, model: str | LabModel | None) -> Trial:
    planted = plant(causes, seed=seed, n=n, dtype=dtype, model=model)
    floor = _floor(seed, n, dtype, planted.model)
    effects = [
        _effect(planted.trace if len(causes) == 1 else plant(
            cause, seed=seed, n=n, dtype=dtype, model=planted.model, parameters=planted.causes).trace, floor)
        for cause in causes
    ]  # fmt: skip
    return _named(planted, seed, dtype, tuple(effects), floor)


def _named(planted: Planted, seed: int, dtype: str, effects: tuple[float, ...], floor: float) -> Trial:
    started = time.perf_counter()
    verdict = name_cause(planted.trace, planted.model)
    seconds = time.perf_counter() - started
    found = {c.id: dict(c.parameters) for c in verdict.causes}
    named = [c for c in verdict.causes if c.severity != "info"]
    return Trial(
        planted=tuple(planted.causes), seed=seed, model=planted.model.name, dtype=dtype, parameters=planted.causes, effects=effects,
        floor=floor, named=tuple(c.id for c in named), classes=named[0].cls if named else (), found=found,
        errors=_errors(planted.causes, found), verdict=verdict.verdict, seconds=round(seconds, 3),
        forward_passes=verdict.cost["forward_passes"],
    )  # fmt: skip


def _errors(planted: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    out = {}
    for cause, parameters in planted.items():
        for name, value in parameters.items():
            if CAUSES[cause].fitted and isinstance(value, float) and isinstance(found.get(cause, {}).get(name), (int, float)):
                natural = _NATURAL.get(name, lambda x: x)
                out[f"{cause}.{name}"] = abs(natural(found[cause][name]) - natural(value)) / abs(natural(value) or 1.0)
    return out


def _pairs(
    causes: Sequence[str], count: int, seed: int, n: int, dtype: str, model: str | LabModel | None
) -> list[tuple[str, str]]:
    """Random pairs that can be planted together and whose parts each exceed three times the floor."""
    rng, out = np.random.default_rng(seed), []
    candidates = [pair for pair in combinations(causes, 2) if _composable(*pair)]
    for k in rng.permutation(len(candidates)):
        if len(out) == count:
            break
        pair = candidates[k]
        planted = plant(pair, seed=seed, n=n, dtype=dtype, model=model)
        floor = _floor(seed, n, dtype, planted.model)
        parts = [plant(c, seed=seed, n=n, dtype=dtype, model=planted.model, parameters=planted.causes) for c in pair]
        if all(_effect(part.trace, floor) > 3 * floor for part in parts):
            out.append(pair)
    return out


def _composable(a: str, b: str) -> bool:
    first, second = CAUSES[a], CAUSES[b]
    if "lint" in (first.kind, second.kind) or "sampling.silent" in (a, b) or first.plants_in != second.plants_in:
        return False
    rng = np.random.default_rng(0)
    changes = [cause.intervene(**cause.draw(rng)) for cause in (first, second)]
    switches = [cause.switches(**cause.draw(rng)) for cause in (first, second)]
    return sum(bool(c.scorer) for c in changes) < 2 and not (set(switches[0]) & set(switches[1]) - {"logprobs_mode"})


@cache
def _floor(seed: int, n: int, dtype: str, model: LabModel) -> float:
    """σ̂ of the run with every fault off, nats."""
    return max(_noise(plant(None, seed=seed, n=n, dtype=dtype, model=model).trace), _LEAST)


def _effect(trace: Trace, floor: float) -> float:
    """σ̂ of what the fault adds to the run without it, nats."""
    return math.sqrt(max(_noise(trace) ** 2 - floor**2, 0.0))


def _noise(trace: Trace) -> float:
    d = trace.tokens("old_logp").astype(np.float64) - trace.tokens("rollout_logp")
    use = trace.mask & np.isfinite(d)
    return logit_noise(d[use], trace.tokens("noise_scale")[use].astype(np.float64))


def name_cause(trace: Trace, model: str | LabModel) -> Verdict:
    """Diagnose a lab trace with its model and what belongs to it."""
    model = model if isinstance(model, LabModel) else lab_model(model)
    return diagnose(trace, model.scorers(), decode=lambda token: model.tokenizer.decode([token]))
