"""Sampling causes: log-probs of another distribution than the one the other side scores."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from unskew.causes._base import Cause, Gap, Intervention, Parameter, Reading, Side, mean_and_z
from unskew.causes._fit import fit_parameter, minimise
from unskew.trace import Trace

__all__ = [
    "FrequencyPenalty", "MinP", "PresencePenalty", "RepetitionPenalty", "Silent", "Temperature", "TemperatureAfterSoftmax", "TemperatureRaw", "TopK", "TopP",
]  # fmt: skip

_BOTH: frozenset[Side] = frozenset({"rollout", "trainer"})
_TEMPERATURES = tuple(np.geomspace(0.3, 2.5, 13).tolist())
_NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.999)
_PENALTIES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.8, 2.2)
_KS = (*range(1, 17), 18, 20, 25, 30, 32, 40, 50, 64, 100, 128, 200)
_NEAR_T = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
_NEAR_P = (-0.04, -0.03, -0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.04)
_OUTSIDE = 1e-3
_CERTAIN = 12.0


class Temperature(Cause):
    """Rollout logged at one temperature, trainer scores at another (methods 1)."""

    id = "sampling.temperature"
    says = "the two sides' log-probs are of the same logits at different temperatures"
    sides = _BOTH
    screens_on = "the gap is linear in the centred logit; the temperature fitted on the logits differs from the trainer's"
    refute = "scoring with the fitted temperature leaves the gap as large as before"
    remedy = "divide the trainer's logits by the sampling temperature, or log raw log-probs and score at 1"
    settings = ("rollout.temperature", "trainer.temperature", "rollout.logprobs_mode")
    needs_model = True
    fitted = 1
    parameter, grid = "temperature", _TEMPERATURES
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

    def read(self, trace: Trace) -> Iterable[Reading]:
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

    def read(self, trace: Trace) -> Iterable[Reading]:
        yield from _declared(self, trace, processed=False, differs=lambda _, trainer: trainer != 1.0)


class TemperatureAfterSoftmax(Cause):
    """Log-prob divided by the temperature after the softmax."""

    id = "sampling.temperature-after-softmax"
    says = "log-probs at temperature 1 were divided by the temperature instead of the logits"
    sides = _BOTH
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
    sides = _BOTH
    screens_on = "the gap has one sign and never exceeds −log p; mean ratio = kept mass < 1"
    refute = (
        "more recorded tokens than rounding can move lie outside the fitted nucleus, or the gap is not the log of the kept mass"
    )
    remedy = "log raw log-probs, sample with top-p 1, or renormalise the trainer over the recorded support"
    settings = ("rollout.top_p", "rollout.logprobs_mode", "trainer.sampling_mask")
    needs_model = True
    fitted = 1
    parameter, grid = "top_p", _NUCLEI
    trades_with = frozenset({"sampling.temperature"})
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"top_p": round(float(rng.uniform(0.75, 0.97)), 3)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        top_p = float(parameters["top_p"])
        return Intervention(self.id, {"top_p": top_p}, sampling={"top_p": top_p})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.accepted or _one_sided(gap):
            yield fit_parameter(gap, self)

    def read(self, trace: Trace) -> Iterable[Reading]:
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
    sides = _BOTH
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
        if not (gap.accepted or _one_sided(gap)):
            return
        candidates = [self.intervene(top_k=k) for k in _KS]
        predicted = gap.counterfactual.predict([(*gap.accepted, candidate) for candidate in candidates])
        yield candidates[int(np.argmin(gap.loss(predicted)[:, gap.fit].sum(axis=1)))]


class RepetitionPenalty(Cause):
    """A repetition penalty on one side (methods 5)."""

    id = "sampling.repetition-penalty"
    says = "one side's logits carry a repetition penalty, often inherited from generation_config.json"
    sides = _BOTH
    screens_on = "tokens already in the context and fresh ones move in opposite directions"
    refute = "tokens already in the context and fresh ones show the same mean gap"
    remedy = "set repetition_penalty to 1 in the engine, and check what generation_config.json sets"
    settings = ("rollout.repetition_penalty", "rollout.generation_config")
    needs_model = True
    fitted = 1
    parameter, grid = "repetition_penalty", _PENALTIES
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"repetition_penalty": round(float(rng.uniform(1.05, 1.3)), 3)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        penalty = float(parameters["repetition_penalty"])
        return Intervention(self.id, {"repetition_penalty": penalty}, sampling={"repetition_penalty": penalty})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        fitted = fit_parameter(gap, self)
        if abs(float(fitted.parameters["repetition_penalty"]) - 1) > 0.003:
            yield fitted


class MinP(Cause):
    """Log-probs renormalised over tokens not much less likely than the likeliest (methods 4)."""

    id = "sampling.min-p"
    says = "log-probs are over the tokens that min-p keeps on one side and over the whole vocabulary on the other"
    sides = _BOTH
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
        if gap.accepted or _one_sided(gap):
            yield fit_parameter(gap, self)


class _OutputPenalty(Cause):
    """A penalty on tokens of the output so far (methods 5)."""

    sides = _BOTH
    refute = "tokens already in the output and fresh ones show the same mean gap"
    needs_model = True
    fitted = 1
    grid = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {str(self.parameter): round(float(rng.uniform(0.1, 1.0)), 3)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        penalty = float(parameters[str(self.parameter)])
        return Intervention(self.id, {str(self.parameter): penalty}, sampling={str(self.parameter): penalty})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        fitted = fit_parameter(gap, self)
        if float(fitted.parameters[str(self.parameter)]) > 0.003:
            yield fitted


class PresencePenalty(_OutputPenalty):
    """A presence penalty on one side (methods 5)."""

    id = "sampling.presence-penalty"
    says = "one side's logits carry a presence penalty: a constant off every token that the output has already"
    screens_on = "tokens already in the output are lower by one constant, whatever their count and logit"
    remedy = "set presence_penalty to 0 in the engine, or log raw log-probs"
    settings = ("rollout.presence_penalty", "rollout.generation_config")
    parameter = "presence_penalty"


class FrequencyPenalty(_OutputPenalty):
    """A frequency penalty on one side (methods 5)."""

    id = "sampling.frequency-penalty"
    says = "one side's logits carry a frequency penalty: a constant off a token for each time that the output has it"
    screens_on = "tokens already in the output are lower in proportion to their count"
    remedy = "set frequency_penalty to 0 in the engine, or log raw log-probs"
    settings = ("rollout.frequency_penalty", "rollout.generation_config")
    parameter = "frequency_penalty"


class Silent(Cause):
    """Both sides log the same and the sampler differs (methods 3): entropy calibration names it."""

    id = "sampling.silent"
    says = "both sides log the same numbers, but the tokens were not drawn from them: shaped sampler, raw log-probs"
    sides = frozenset({"rollout"})
    kind = "matched"
    screens_on = "the gap is at its floor while C = mean(log π + H) differs from 0"
    refute = "C over uniformly kept rows is within 3 standard errors of 0"
    remedy = "log processed log-probs, or sample at temperature 1 without truncation or penalties"
    settings = ("rollout.logprobs_mode", "rollout.temperature", "rollout.top_p", "rollout.top_k")
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        if rng.random() < 0.5:
            return {"temperature": round(float(rng.uniform(0.5, 0.8)), 3)}
        return {"top_p": round(float(rng.uniform(0.7, 0.9)), 3)}

    def switches(self, **parameters: Parameter) -> dict[str, Any]:
        return {**parameters, "logprobs_mode": "raw"}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, dict(parameters))

    def at_floor(self, gap: Gap) -> Iterable[Reading]:
        if gap.entropy is None:
            return
        use = gap.keep & gap.uniform
        n = int(use.sum())
        mean, z = mean_and_z(np.where(use, gap.clean + gap.entropy, 0.0), gap.trace.cu_seqlens, n)
        gain, sampler = self._sampler(gap, use) if gap.counterfactual.has_model and abs(z) > 2 else (0.0, {})
        off = abs(z) > 4.5 and abs(mean) > 0.005
        if not off and gain < _CERTAIN:
            return
        says = [f"C = mean(log π + H) = {mean:+.4f} nat, z = {z:+.1f} over {n} tokens; 0 if sampled from what was scored"]
        if sampler:
            named = ", ".join(f"{name} {value:.3g}" for name, value in sampler.items())
            says.append(f"a sampler with {named} gives the sampled tokens a log-likelihood {gain:.0f} nat higher")
        parameters = {"calibration": round(mean, 5), "z": round(z, 2), **sampler}
        yield Reading(self.id, "rollout", "error", tuple(says), parameters)

    def _sampler(self, gap: Gap, use: np.ndarray) -> tuple[float, dict[str, Parameter]]:
        """The sampler under which the sampled tokens are likeliest, and by how many nats beyond BIC's price.

        A token outside a truncated support costs log ε, not −inf: rounding moves tokens across its edge.
        """
        some = gap.some(gap.uniform)

        def gains(settings: list[dict[str, float]], tokens: np.ndarray) -> np.ndarray:
            hypotheses = [[Intervention(self.id, sampling=s)] for s in settings]
            logp = gap.counterfactual.predict(hypotheses, tokens=tokens)[:, tokens]
            clean = gap.clean[tokens]
            mixed = np.logaddexp(math.log1p(-_OUTSIDE) + logp, math.log(_OUTSIDE) + clean)
            price = 0.5 * math.log(len(clean)) * np.array([len(s) for s in settings])
            return (mixed - clean).sum(axis=1) - price

        def best(name: str, grid: Sequence[float], more: dict[str, float]) -> tuple[float, dict[str, float]]:
            at, least = minimise(lambda values: -gains([{**more, name: float(v)} for v in values], some), grid, rounds=2)
            return -least, {**more, name: at}

        temperatures = tuple(t * gap.counterfactual.trainer_temperature for t in _TEMPERATURES)
        ks = [{"top_k": float(k)} for k in _KS]
        options = [
            best("temperature", temperatures, {}),
            best("top_p", _NUCLEI, {}),
            best("repetition_penalty", _PENALTIES, {}),
            max(zip(gains(ks, some), ks, strict=True), key=lambda option: option[0]),
        ]
        pairs = [{"temperature": t, "top_p": p} for t in temperatures for p in _NUCLEI]
        t, p = pairs[int(np.argmax(gains(pairs, some)))].values()
        near = [{"temperature": t * a, "top_p": min(p + b, 1.0)} for a in _NEAR_T for b in _NEAR_P]
        both = max(zip(gains(near, np.flatnonzero(use)), near, strict=True), key=lambda option: option[0])
        samplers = [sampler for _, sampler in (*options, both)]
        whole = gains(samplers, np.flatnonzero(use))
        top = int(np.argmax(whole))
        return float(whole[top]), {name: round(float(value), 3) for name, value in samplers[top].items()}


def _away_from_one(rng: np.random.Generator) -> float:
    return round(float(rng.choice([rng.uniform(0.55, 0.9), rng.uniform(1.1, 1.4)])), 3)


def _one_sided(gap: Gap) -> bool:
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
