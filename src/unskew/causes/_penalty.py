"""Sampling causes that change single logits: penalties, biases, banned and allowed tokens."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from unskew.causes._base import Cause, Facts, Gap, Intervention, Parameter, Reading
from unskew.causes._fit import fit_parameter
from unskew.causes._sampling import BOTH, one_sided
from unskew.trace import Trace

__all__ = [
    "PENALTIES", "FrequencyPenalty", "Grammar", "Greedy", "LogitBias", "MinTokens", "PresencePenalty", "RepetitionPenalty",
]  # fmt: skip

_MOST_IDS = 16
_LARGEST = 8.0
"""A larger bias than this many nats is not looked for."""
_BANNED = 1e-8
_SURE = 0.02
"""Relative standard error up to which the factor of an id is reported."""

PENALTIES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.8, 2.2)


class RepetitionPenalty(Cause):
    """A repetition penalty on one side (methods 5)."""

    id = "sampling.repetition-penalty"
    says = "one side's logits carry a repetition penalty, often inherited from generation_config.json"
    sides = BOTH
    screens_on = "tokens already in the context and fresh ones move in opposite directions"
    refute = "tokens already in the context and fresh ones show the same mean gap"
    remedy = "set repetition_penalty to 1 in the engine, and check what generation_config.json sets"
    settings = ("rollout.repetition_penalty", "rollout.generation_config")
    needs_model = True
    fitted = 1
    parameter, grid = "repetition_penalty", PENALTIES
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


class _OutputPenalty(Cause):
    """A penalty on tokens of the output so far (methods 5)."""

    sides = BOTH
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


class LogitBias(Cause):
    """A bias on the logits of a few ids (methods 6)."""

    id = "sampling.logit-bias"
    says = "one side's logits carry a bias on a few token ids"
    sides = BOTH
    screens_on = "the odds of a few ids differ by one factor each, e^bias, wherever those ids were sampled"
    refute = "the log-odds of the sampled token do not differ by one constant an id"
    remedy = "drop logit_bias, or log raw log-probs"
    settings = ("rollout.logit_bias",)
    needs_model = True
    fitted = 2
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        ids = rng.choice(np.arange(4, 400), 6, replace=False)
        return {str(token): round(float(rng.choice([-1, 1]) * rng.uniform(1.0, 4.0)), 3) for token in ids}

    def intervene(self, **parameters: Parameter) -> Intervention:
        bias = {int(token): float(value) for token, value in parameters.items()}
        return Intervention(self.id, dict(parameters), sampling={"logit_bias": bias})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        system = _odds(gap)
        if system is None:
            return
        design, target = system
        size, chosen, factors, left = np.linalg.norm(design, axis=0), [], np.zeros(0), target
        for _ in range(_MOST_IDS):
            token = int(np.argmax(np.abs(design.T @ left) / np.where(size > 0, size, np.inf)))
            if token in chosen:
                break
            more = np.linalg.lstsq(design[:, [*chosen, token]], target, rcond=None)[0]
            after = target - design[:, [*chosen, token]] @ more
            if after @ after > 0.7 * (left @ left):
                break
            chosen, factors, left = [*chosen, token], more, after
        if not chosen:
            return
        variance = (
            np.diag(np.linalg.pinv(design[:, chosen].T @ design[:, chosen])) * (left @ left) / max(len(left) - len(chosen), 1)
        )
        odds = np.maximum(1 + factors, _BANNED)
        sure = np.sqrt(variance) < _SURE * np.maximum(odds, np.abs(factors))
        yield self.intervene(**{str(chosen[k]): round(math.log(odds[k]), 5) for k in np.flatnonzero(sure)})


class Grammar(Cause):
    """Log-probs over the tokens that a constraint allows (methods 7)."""

    id = "sampling.grammar"
    says = "log-probs are over the tokens that a grammar or a list of banned words leaves, on the other side over all"
    sides = BOTH
    screens_on = "the gap has one sign; its size is the log of the mass that a fixed set of never sampled ids has"
    refute = "a banned id was sampled, or the gap is not the log of the allowed mass"
    remedy = "log raw log-probs, or renormalise the trainer over the allowed tokens (record sampling_mask)"
    settings = ("rollout.grammar", "rollout.logprobs_mode", "trainer.sampling_mask")
    needs_model = True
    fitted = 3
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"first": int(rng.integers(8, 60)), "last": int(rng.integers(350, 500))}

    def switches(self, **parameters: Parameter) -> dict[str, Any]:
        first, last = int(parameters["first"]), int(parameters["last"])
        return {"allowed_ids": (*range(4), *range(first, last)), "logprobs_mode": "processed"}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, dict(parameters), sampling={"allowed_ids": self.switches(**parameters)["allowed_ids"]})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if not one_sided(gap):
            return
        system = _odds(gap)
        if system is None:
            return
        design, target = system
        unseen = np.setdiff1d(np.arange(design.shape[1]), gap.trace.tokens("response_ids"))
        unseen = unseen[np.argsort(-design[:, unseen].sum(0))][: len(target) // 2]
        share = -np.linalg.lstsq(design[:, unseen], target, rcond=1e-6)[0]
        banned = np.sort(unseen[share > 0.5])
        if len(banned):
            allowed = tuple(np.setdiff1d(np.arange(design.shape[1]), banned).tolist())
            shown = ",".join(str(token) for token in banned[:8]) + (",…" if len(banned) > 8 else "")
            yield Intervention(self.id, {"banned": len(banned), "ids": shown}, sampling={"allowed_ids": allowed})


class MinTokens(Cause):
    """EOS banned at the first positions (methods 7)."""

    id = "sampling.min-tokens"
    says = "the engine cannot end a response before a number of tokens and logs the log-probs that this leaves"
    sides = frozenset({"rollout"})
    screens_on = "the gap has one sign, is the log of the mass without EOS, and stops at one position of the response"
    refute = "the gap goes on after the fitted number of tokens, or is not −log(1 − p(EOS)) before it"
    remedy = "set min_tokens to 0, or log raw log-probs"
    settings = ("rollout.min_tokens", "rollout.logprobs_mode")
    needs_model = True
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"min_tokens": int(rng.integers(30, 70)), "stop_ids": "3"}

    def switches(self, **parameters: Parameter) -> dict[str, Any]:
        return {"min_tokens": int(parameters["min_tokens"]), "logprobs_mode": "processed"}

    def intervene(self, **parameters: Parameter) -> Intervention:
        stop = tuple(int(token) for token in str(parameters["stop_ids"]).split(","))
        return Intervention(self.id, dict(parameters), sampling={"min_tokens": int(parameters["min_tokens"]), "stop_ids": stop})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        stop = ",".join(str(token) for token in gap.counterfactual.facts.eos_ids)
        if not stop or not gap.keep.any():
            return
        use, position = gap.keep & gap.fit, gap.trace.position
        most = int(position.max()) + 1
        always = self.intervene(min_tokens=most, stop_ids=stop)
        (banned,) = gap.counterfactual.predict([(*gap.accepted, always)])
        with_ban, without = (np.bincount(position, np.where(use, gap.loss(p), 0.0), most) for p in (banned, gap.predicted))
        losses = np.concatenate([[0.0], np.cumsum(with_ban - without)])
        best = int(np.argmin(losses))
        if best:
            yield self.intervene(min_tokens=best, stop_ids=stop)


class Greedy(Cause):
    """T = 0, or the log-prob of the argmax under it (methods 8)."""

    id = "sampling.greedy"
    says = "the engine decoded greedily: every recorded log-prob is 0, that of a certain token"
    sides = frozenset({"rollout"})
    screens_on = "every recorded log-prob is exactly 0 and every token is the likeliest one"
    refute = "a recorded log-prob that is not 0, or a sampled token that is not the likeliest"
    remedy = "sample at a temperature above 0: a greedy rollout explores nothing and has no log-probs"
    settings = ("rollout.temperature",)
    needs_model = True
    planted = "rollout"

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, sampling={"top_k": 1})

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if _all_zero(gap.recorded[gap.keep]):
            yield self.intervene()

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        values = trace.tokens("rollout_logp")[trace.mask]
        if _all_zero(values):
            says = f"{(values == 0).mean():.1%} of {len(values)} recorded log-probs are exactly 0"
            yield Reading(self.id, "rollout", "error", (says,), tokens=np.flatnonzero(trace.mask)[:8])


def _all_zero(values: np.ndarray) -> bool:
    return len(values) > 1 and float((values == 0).mean()) > 0.98


def _odds(gap: Gap) -> tuple[np.ndarray, np.ndarray] | None:
    """The linear system (tokens, V) β = (tokens,) of the factors 1 + β = e^bias of all ids; None where no token can be used.

    A bias turns p_y into p_y (1 + β_y) / (1 + Σ_v p_v β_v), so with r = recorded − predicted, in which y is sampled:
    1 − e^r = Σ_v (e^r p_v − [v = y]) β_v. A banned id has β = −1.
    """
    tokens = gap.some(gap.fit & (np.abs(gap.residual) < _LARGEST) & np.isfinite(gap.predicted))
    if not len(tokens):
        return None
    rise = np.exp(gap.recorded - gap.predicted)[tokens]
    weight = np.sqrt(gap.weight[tokens]) / np.maximum(rise, 1.0)
    design = gap.counterfactual.probabilities(gap.accepted, tokens) * rise[:, None]
    design[np.arange(len(tokens)), gap.trace.tokens("response_ids")[tokens]] -= 1.0
    return design * weight[:, None], (1.0 - rise) * weight
