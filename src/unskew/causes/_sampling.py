"""Sampling causes: log-probs of another distribution than the one the other side scores."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from unskew.causes._base import Cause, Facts, Gap, Intervention, Parameter, Reading, Side
from unskew.causes._fit import fit_parameter
from unskew.trace import Trace

__all__ = [
    "BOTH", "KS", "NUCLEI", "TEMPERATURES", "MinP", "Temperature", "TemperatureAfterSoftmax", "TemperatureRaw", "TopK", "TopP", "one_sided",
]  # fmt: skip

BOTH: frozenset[Side] = frozenset({"rollout", "trainer"})
TEMPERATURES = tuple(np.geomspace(0.3, 2.5, 13).tolist())
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.999)
KS = (*range(1, 17), 18, 20, 25, 30, 32, 40, 50, 64, 100, 128, 200)


class Temperature(Cause):
    """Rollout logged at one temperature, trainer scores at another (methods 1)."""

    id = "sampling.temperature"
    says = "the two sides' log-probs are of the same logits at different temperatures"
    sides = BOTH
    screens_on = "the gap is linear in the centred logit; the temperature fitted on the logits differs from the trainer's"
    refute = "scoring with the fitted temperature leaves the gap as large as before"
    remedy = "divide the trainer's logits by the sampling temperature, or log raw log-probs and score at 1"
    settings = ("rollout.temperature", "trainer.temperature", "rollout.logprobs_mode")
    needs_model = True
    fitted = 1
    parameter, grid = "temperature", TEMPERATURES
    trades_with = frozenset({"sampling.top-p"})
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"temperature": _away_from_one(rng)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        temperature = float(parameters["temperature"])
        return Intervention(self.id, {"temperature": temperature}, sampling={"temperature": temperature})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        fitted = fit_parameter(gap, self)
        if abs(math.log(float(fitted.parameters["temperature"]) / gap.counterfactual.trainer_temperature)) > 0.005:
            yield fitted

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        yield from _declared(self, trace, processed=True, differs=lambda rollout, trainer: rollout != trainer)


class TemperatureRaw(Cause):
    """Rollout logged raw log-probs, trainer divides by the temperature (methods 2)."""

    id = "sampling.temperature-raw"
    says = "the engine sampled at a temperature but logged log-probs at 1; the trainer scores at the temperature"
    sides = frozenset({"rollout"})
    screens_on = "declared temperature ≠ 1 and the log-probs fit temperature 1; mean ratio 1 + χ² > 1"
    refute = "the recorded log-probs do not equal the clean scorer's at temperature 1"
    remedy = "make the engine log processed log-probs (after temperature)"
    settings = ("rollout.logprobs_mode",)
    needs_model = True
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"temperature": _away_from_one(rng)}

    def switches(self, **parameters: Parameter) -> dict[str, Any]:
        temperature = parameters["temperature"]
        return {"temperature": temperature, "logprobs_mode": "raw", "trainer.temperature": temperature}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, sampling={"temperature": 1.0})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        declared = {value for value in gap.trace.setting("sampling", "temperature") if value is not None}
        if gap.counterfactual.trainer_temperature != 1.0 and declared != {1.0}:
            yield self.intervene()

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        yield from _declared(self, trace, processed=False, differs=lambda _, trainer: trainer != 1.0)


class TemperatureAfterSoftmax(Cause):
    """Log-prob divided by the temperature after the softmax."""

    id = "sampling.temperature-after-softmax"
    says = "log-probs at temperature 1 were divided by the temperature instead of the logits"
    sides = BOTH
    screens_on = "recorded log-prob × T equals the log-prob at temperature 1; probabilities do not sum to 1"
    refute = "the recorded log-probs times the fitted temperature differ from the clean scorer's at 1"
    remedy = "divide the logits by the temperature before the log-softmax"
    settings = ("trainer.temperature",)
    needs_model = True
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"temperature": _away_from_one(rng)}

    def switches(self, **parameters: Parameter) -> dict[str, Any]:
        temperature = parameters["temperature"]
        return {"temperature": temperature, "logprobs_mode": "raw", "trainer.temperature": temperature}

    def intervene(self, **parameters: Parameter) -> Intervention:
        temperature = float(parameters["temperature"])
        return Intervention(
            self.id,
            {"temperature": temperature},
            sampling={"temperature": 1.0},
            logp=lambda logp, _: logp / temperature,
        )

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        raw = gap.counterfactual.predict([[Intervention(self.id, sampling={"temperature": 1.0})]])[0]
        use = gap.keep & gap.fit & np.isfinite(raw)
        if not use.any() or not (raw[use] ** 2).sum():
            return
        slope = float((raw[use] * gap.recorded[use]).sum() / (raw[use] ** 2).sum())
        if slope > 0 and abs(slope - 1) > 0.02:
            yield self.intervene(temperature=1.0 / slope)


class TopP(Cause):
    """Log-probs renormalised over the nucleus (methods 4)."""

    id = "sampling.top-p"
    says = "log-probs are over the top-p nucleus on one side and over the whole vocabulary on the other"
    sides = BOTH
    screens_on = "the gap has one sign and never exceeds −log p; mean ratio = kept mass < 1"
    refute = (
        "more recorded tokens than rounding can move lie outside the fitted nucleus, or the gap is not the log of the kept mass"
    )
    remedy = "log raw log-probs, sample with top-p 1, or renormalise the trainer over the recorded support"
    settings = ("rollout.top_p", "rollout.logprobs_mode", "trainer.sampling_mask")
    needs_model = True
    fitted = 1
    parameter, grid = "top_p", NUCLEI
    trades_with = frozenset({"sampling.temperature"})
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"top_p": round(float(rng.uniform(0.75, 0.97)), 3)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        top_p = float(parameters["top_p"])
        return Intervention(self.id, {"top_p": top_p}, sampling={"top_p": top_p})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.accepted or one_sided(gap):
            yield fit_parameter(gap, self)

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        declared = {value for value in trace.setting("sampling", "top_p") if value is not None} or {1.0}
        if not (trace.has("old_logp") and trace.has("rollout_logp")) or len(declared) > 1:
            return
        (top_p,) = declared
        gap = (trace.tokens("old_logp").astype(np.float64) - trace.tokens("rollout_logp"))[trace.mask]
        gap = gap[np.isfinite(gap)]
        if not 0 < top_p < 1 or not len(gap):
            return
        inside = float(((gap <= 1e-3) & (gap >= math.log(top_p) - 1e-3)).mean())
        if inside > 0.995 and gap.mean() < 0.1 * math.log(top_p):
            says = f"top_p {top_p:g} is declared and {inside:.1%} of all log-ratios lie in [log {top_p:g}, 0]"
            yield Reading(self.id, "rollout", "error", (says,), {"top_p": top_p})


class TopK(Cause):
    """Log-probs renormalised over the k most likely tokens (methods 4)."""

    id = "sampling.top-k"
    says = "log-probs are over the k most likely tokens on one side and over the whole vocabulary on the other"
    sides = BOTH
    screens_on = "the gap has one sign, its size is the log of the mass of the top k; the sampled rank never exceeds k"
    refute = "a recorded token has a rank above the fitted k"
    remedy = "log raw log-probs, sample without top-k, or renormalise the trainer over the recorded support"
    settings = ("rollout.top_k", "rollout.logprobs_mode", "trainer.sampling_mask")
    needs_model = True
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"top_k": int(rng.integers(2, 8))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        top_k = int(parameters["top_k"])
        return Intervention(self.id, {"top_k": top_k}, sampling={"top_k": top_k})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if not (gap.accepted or one_sided(gap)):
            return
        candidates = [self.intervene(top_k=k) for k in KS]
        predicted = gap.counterfactual.predict([(*gap.accepted, candidate) for candidate in candidates])
        yield candidates[int(np.argmin(gap.loss(predicted)[:, gap.fit].sum(axis=1)))]


class MinP(Cause):
    """Log-probs renormalised over tokens not much less likely than the likeliest (methods 4)."""

    id = "sampling.min-p"
    says = "log-probs are over the tokens that min-p keeps on one side and over the whole vocabulary on the other"
    sides = BOTH
    screens_on = "the gap has one sign; no sampled token is less likely than min_p times the likeliest"
    refute = "a recorded token is less likely than the fitted min_p times the likeliest"
    remedy = "log raw log-probs, sample without min-p, or renormalise the trainer over the recorded support"
    settings = ("rollout.min_p", "rollout.logprobs_mode", "trainer.sampling_mask")
    needs_model = True
    fitted = 1
    parameter, grid = "min_p", (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"min_p": round(float(rng.uniform(0.02, 0.2)), 3)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        min_p = float(parameters["min_p"])
        return Intervention(self.id, {"min_p": min_p}, sampling={"min_p": min_p})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.accepted or one_sided(gap):
            yield fit_parameter(gap, self)


def _away_from_one(rng: np.random.Generator) -> float:
    return round(float(rng.choice([rng.uniform(0.55, 0.9), rng.uniform(1.1, 1.4)])), 3)


def one_sided(gap: Gap) -> bool:
    """Whether recorded log-probs lie above the prediction wherever the two clearly differ."""
    residual = gap.residual[gap.keep & gap.fit]
    clear = np.abs(residual) > max(1e-4, 0.25 * float(np.sqrt((residual**2).mean())) if len(residual) else 0.0)
    if not clear.any():
        return False
    up = float((residual[clear] > 0).mean())
    return max(up, 1 - up) > 0.8


def _declared(cause: Cause, trace: Trace, *, processed: bool, differs: Callable[[float, float], bool]) -> Iterable[Reading]:
    """A reading where the declared temperatures and logprobs_mode alone make the two sides differ."""
    modes = {(mode or "").startswith("processed") for mode in trace.setting("sampling", "logprobs_mode") if mode}
    rollout = {value for value in trace.setting("sampling", "temperature") if value is not None}
    trainer = {value for value in trace.setting("trainer", "temperature") if value is not None}
    if modes == {processed} and len(rollout) == 1 and len(trainer) == 1:
        (sampled,), (scored,) = rollout, trainer
        if differs(sampled, scored):
            mode = "processed" if processed else "raw"
            says = f"declared: sampled at temperature {sampled:g}, log-probs {mode}, trainer scores at {scored:g}"
            yield Reading(cause.id, "rollout", "error", (says,), {"temperature": sampled}, declared=True)
