"""Weights causes: the engine holds other weights than the trainer."""

from collections.abc import Iterable

import numpy as np

from unskew.causes._base import Cause, Gap, Intervention, Parameter, Reading
from unskew.causes._contrast import contrast
from unskew.trace import Trace

__all__ = ["AdapterMissing", "Stale", "StalePrefixCache", "TiedHead"]


class Stale(Cause):
    """One side holds an older checkpoint (methods 23)."""

    id = "weights.stale"
    says = "one side's log-probs are those of an older checkpoint"
    sides = frozenset({"rollout", "trainer"})
    screens_on = "the gap grows with the version lag; an older checkpoint reproduces the recorded log-probs"
    refute = "no older checkpoint is nearer to the recorded log-probs than the current one"
    remedy = "sync weights before sampling, reset the prefix cache after the sync, and record weight_version"
    settings = ("rollout.weight_sync", "trainer.max_staleness")
    needs_model = True
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"lag": int(rng.integers(1, 4))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        lag = int(parameters["lag"])
        return Intervention(self.id, {"lag": lag}, scorer=f"older:{lag}")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        for lag in _lags(gap):
            yield self.intervene(lag=lag)

    def read(self, trace: Trace) -> Iterable[Reading]:
        if not (trace.has("weight_version") and "old_version" in trace.columns):
            return
        lag = np.repeat([np.nan if v is None else v for v in trace.rows("old_version")], trace.lengths) - trace.tokens(
            "weight_version"
        )
        behind = trace.mask & (lag > 0)
        if behind.any():
            yield Reading(
                self.id, "rollout", "info",
                (f"{behind.sum() / trace.mask.sum():.1%} of the tokens were sampled by weights up to {int(lag[behind].max())} versions "
                 "older than those of old_logp",),
                {"lag": int(lag[behind].max())}, np.flatnonzero(behind),
            )  # fmt: skip


class AdapterMissing(Cause):
    """The LoRA adapter never reached the engine (methods 24)."""

    id = "weights.adapter-missing"
    says = "the engine samples from the base model: the adapter never reached it"
    sides = frozenset({"rollout"})
    screens_on = "the gap is 0 at step 0 and grows; the recorded log-probs equal the base (reference) model's"
    refute = "the base model's log-probs differ from the recorded ones"
    remedy = "load the adapter in the engine or merge it before the weight push; verify a fingerprint after the sync"
    settings = ("rollout.lora", "rollout.weight_sync")
    planted = "rollout"
    plants_in = "lora"

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, scorer="base")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if "base" in gap.counterfactual.scorers:
            yield self.intervene()
        elif gap.side != "trainer" and gap.trace.has("ref_logp"):
            reference = gap.trace.tokens("ref_logp").astype(np.float64)
            yield Intervention(self.id, {}, logp=lambda logp, _: reference)


class TiedHead(Cause):
    """The body is current and the head is not: a tied embedding was pushed once, its copy in the head stayed (methods 26)."""

    id = "weights.tied-head"
    says = (
        "one side's log-probs are those of the current body under an older head: the tied embedding was synced, its copy was not"
    )
    sides = frozenset({"rollout", "trainer"})
    screens_on = "the gap depends on the token id and grows with every update; an older head on the current body reproduces it"
    refute = "no older head under the current body is nearer to the recorded log-probs than the current head"
    remedy = "push lm_head.weight as well as embed_tokens.weight, or tie them again after the push; compare a fingerprint of both after a sync"
    settings = ("rollout.weight_sync",)
    needs_model = True
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"lag": int(rng.integers(1, 4))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        lag = int(parameters["lag"])
        return Intervention(self.id, {"lag": lag}, scorer=f"of:older:{lag}:head")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        for lag in _lags(gap):
            yield self.intervene(lag=lag)


class StalePrefixCache(Cause):
    """K/V from before a weight update, on cache hits only (methods 29)."""

    id = "weights.stale-prefix-cache"
    says = "only requests that hit the prefix cache disagree: their K/V are from before the weight update"
    sides = frozenset({"rollout"})
    kind = "lint"
    screens_on = "|d| of rows with cached_tokens > 0 against rows without"
    refute = "rows with and without a cache hit differ alike"
    remedy = "reset the prefix cache after every weight update"
    settings = ("rollout.prefix_cache",)

    def read(self, trace: Trace) -> Iterable[Reading]:
        yield from contrast(self, trace, "cached_tokens", "rollout")


def _lags(gap: Gap) -> list[int]:
    """Lags of the older checkpoints that were given."""
    return sorted(int(name.removeprefix("older:")) for name in gap.counterfactual.scorers if name.startswith("older:"))
