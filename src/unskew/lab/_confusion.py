"""How often diagnosis names the cause that was planted."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unskew.diagnose import Verdict, diagnose, load_scorers
from unskew.diagnose._floor import ABOVE, FLOORS, logit_noise
from unskew.lab._faults import FAULTS, plant, scorer
from unskew.lab._models import model_path
from unskew.trace import Trace

__all__ = ["Confusion", "Trial", "confusion"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One planted cause (or None), what diagnosis named first, and whether the fault could be seen at all.

    `effect` is σ̂ of the planted change in nats, against the same rollouts with the fault off; `visible` whether it
    is above the floor. A silent fault changes no log-prob: it is visible where it was declared shaped.
    """

    planted: str | None
    seed: int
    dtype: str
    parameters: Mapping[str, Any]
    named: tuple[str, ...]
    found: Mapping[str, Any]
    verdict: str
    effect: float
    visible: bool
    exact: bool
    seconds: float
    forward_passes: int


@dataclass(frozen=True, slots=True)
class Confusion:
    """All trials and their rates; rates are over visible faults, and over clean runs."""

    trials: tuple[Trial, ...]

    @property
    def single_exact_rate(self) -> float:
        """Share of visible single faults whose cause is named first."""
        faults = [t for t in self.trials if t.planted and t.visible]
        return sum(t.exact for t in faults) / max(len(faults), 1)

    @property
    def false_alarm_rate(self) -> float:
        """Share of clean runs with a cause above severity info."""
        clean = [t for t in self.trials if t.planted is None]
        return sum(t.verdict != "clean" for t in clean) / max(len(clean), 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: rates, one row a cause, all trials."""
        rows = []
        for cause in dict.fromkeys(t.planted for t in self.trials):
            trials = [t for t in self.trials if t.planted == cause]
            visible = [t for t in trials if t.visible]
            others = [t.named[0] if t.named else t.verdict for t in visible if not t.exact]
            rows.append({"cause": cause or "clean", "trials": len(trials), "visible": len(visible),
                         "exact": sum(t.exact for t in visible), "called": sorted(set(others))})  # fmt: skip
        return {
            "schema_version": 1, "single_exact_rate": self.single_exact_rate, "false_alarm_rate": self.false_alarm_rate,
            "n_faults": sum(t.planted is not None for t in self.trials), "n_visible": sum(t.visible for t in self.trials if t.planted),
            "n_clean": sum(t.planted is None for t in self.trials), "seconds": sum(t.seconds for t in self.trials),
            "forward_passes": sum(t.forward_passes for t in self.trials), "rows": rows, "trials": [asdict(t) for t in self.trials],
        }  # fmt: skip


def confusion(
    *, seeds: Sequence[int], causes: Sequence[str] | None = None, clean: int = 0, n: int = 48,
    progress: Callable[[str], None] = lambda _: None,
) -> Confusion:  # fmt: skip
    """Plant each cause once a seed, and `clean` runs with no fault (fp32 and bf16 in turn), and diagnose them all."""
    trials = []
    for cause in causes if causes is not None else FAULTS:
        for seed in seeds:
            trials.append(_trial(cause, seed, n, "float32"))
            progress(f"{cause} seed {seed}: {', '.join(trials[-1].named[:2]) or trials[-1].verdict}")
    for k in range(clean):
        trials.append(
            _trial(None, seeds[0] + 1000 + k, n, ("float32", "bfloat16")[k % 2], model=("dense", "dense", "moe", "moe")[k % 4])
        )
        progress(f"clean {k}: {trials[-1].verdict}")
    return Confusion(tuple(trials))


def _trial(cause: str | None, seed: int, n: int, dtype: str, *, model: str | None = None) -> Trial:
    trace, parameters = plant(cause, seed=seed, n=n, dtype=dtype, model=model)
    model = model or (FAULTS[cause].model if cause else "dense")
    started = time.perf_counter()
    verdict = name_cause(trace, model)
    seconds = time.perf_counter() - started
    named = tuple(c.id for c in verdict.causes if c.severity != "info")
    effect = _effect(trace, model)
    return Trial(
        planted=cause, seed=seed, dtype=dtype, parameters=parameters, named=named,
        found=dict(verdict.causes[0].parameters) if verdict.causes else {}, verdict=verdict.verdict, effect=effect,
        visible=cause in ("sampling.silent", "record.prompt-in-mask") or effect > ABOVE * FLOORS["float32"],
        exact=bool(named) and named[0] == cause, seconds=round(seconds, 3), forward_passes=verdict.cost["forward_passes"],
    )  # fmt: skip


def name_cause(trace: Trace, model: str) -> Verdict:
    """Diagnose a lab trace with its model, the dense one with its older snapshots."""
    older = [str(model_path(f"dense-old-{k}")) for k in (1, 2, 3)] if model == "dense" else []
    scorers = load_scorers(str(model_path(model)), older=older)
    tokenizer = scorer(model).tokenizer
    return diagnose(trace, scorers, bos_id=tokenizer.bos_token_id, decode=lambda token: tokenizer.decode([token]))


def _effect(trace: Trace, model: str) -> float:
    """σ̂ between the two recorded streams, nats: the clean pair differs by less than the fp32 floor."""
    d = trace.tokens("old_logp").astype(np.float64) - trace.tokens("rollout_logp")
    use = trace.mask & np.isfinite(d)
    return logit_noise(d[use], trace.tokens("noise_scale")[use].astype(np.float64))
