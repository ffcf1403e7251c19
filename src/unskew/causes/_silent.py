"""The sampling cause that no gap shows: both sides log the same and the sampler differs."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from unskew.causes._base import Cause, Gap, Intervention, Parameter, Reading, mean_and_z
from unskew.causes._fit import minimise
from unskew.causes._penalty import PENALTIES
from unskew.causes._sampling import KS, NUCLEI, TEMPERATURES

__all__ = ["Silent"]

_NEAR_T = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
_NEAR_P = (-0.04, -0.03, -0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.04)
_OUTSIDE = 1e-3
_CERTAIN = 12.0


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

        temperatures = tuple(t * gap.counterfactual.trainer_temperature for t in TEMPERATURES)
        ks = [{"top_k": float(k)} for k in KS]
        options = [
            best("temperature", temperatures, {}),
            best("top_p", NUCLEI, {}),
            best("repetition_penalty", PENALTIES, {}),
            max(zip(gains(ks, some), ks, strict=True), key=lambda option: option[0]),
        ]
        pairs = [{"temperature": t, "top_p": p} for t in temperatures for p in NUCLEI]
        t, p = pairs[int(np.argmax(gains(pairs, some)))].values()
        near = [{"temperature": t * a, "top_p": min(p + b, 1.0)} for a in _NEAR_T for b in _NEAR_P]
        both = max(zip(gains(near, np.flatnonzero(use)), near, strict=True), key=lambda option: option[0])
        samplers = [sampler for _, sampler in (*options, both)]
        whole = gains(samplers, np.flatnonzero(use))
        top = int(np.argmax(whole))
        return float(whole[top]), {name: round(float(value), 3) for name, value in samplers[top].items()}
