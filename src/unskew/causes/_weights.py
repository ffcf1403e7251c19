"""Weights causes: the engine holds other weights than the trainer."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from unskew.causes._base import Cause, Facts, Gap, Intervention, Parameter, Reading
from unskew.causes._contrast import contrast
from unskew.causes._edited import FormatCause
from unskew.causes._fit import probe
from unskew.score import Inputs
from unskew.trace import Trace

__all__ = [
    "AdapterMissing",
    "AdapterTwice",
    "PartialSync",
    "Quantized",
    "RecomputeHides",
    "Stale",
    "StalePrefixCache",
    "TiedHead",
]

_SAME = 1e-3
"""Nats within which two trainer passes count as one."""
_FOLLOWS = 0.15
"""Cosine with the gap above which an older checkpoint is taken apart."""


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
        if not _hidden(gap.trace).any():
            yield from (self.intervene(lag=lag) for lag in _lags(gap))

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        lag = _lag(trace)
        behind = trace.mask & (lag > 0) & ~_hidden(trace)
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


class AdapterTwice(Cause):
    """The adapter was merged and then applied again (methods 24)."""

    id = "weights.adapter-twice"
    says = "the engine applies the adapter to weights that have it merged already"
    sides = frozenset({"rollout"})
    screens_on = "the gap is 0 at step 0 and grows; the recorded log-probs equal those with the adapter merged twice"
    refute = "log-probs with the adapter merged twice differ from the recorded ones"
    remedy = "push merged weights or load the adapter, not both; unmerge before the next push"
    settings = ("rollout.lora", "rollout.weight_sync")
    needs_model = True
    planted, plants_in = "rollout", "lora"

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, scorer="twice")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if "twice" in gap.counterfactual.scorers:
            yield self.intervene()


class PartialSync(Cause):
    """Some tensors are of an older checkpoint (methods 25)."""

    id = "weights.partial-sync"
    says = "some of one side's tensors are current and some are of an older checkpoint: the weight push was not complete"
    sides = frozenset({"rollout", "trainer"})
    screens_on = "older tensors of a few layers move the log-probs as the gap does"
    refute = "no group of older tensors brings the clean scorer nearer to the recorded log-probs"
    remedy = "wait for every bucket and every pipeline stage before sampling; compare a fingerprint a tensor after each sync"
    settings = ("rollout.weight_sync",)
    needs_model = True
    costly = True
    fitted = 2
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        first = int(rng.integers(0, 3))
        groups = [f"layers.{layer}" for layer in range(first, min(first + int(rng.integers(1, 3)), 4))]
        return {"lag": int(rng.integers(1, 4)), "groups": ",".join(groups)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        lag, groups = int(parameters["lag"]), str(parameters["groups"])
        return Intervention(self.id, {"lag": lag, "groups": groups}, scorer=f"of:older:{lag}:{groups}")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        groups = gap.counterfactual.tensors()
        for lag in _lags(gap):
            if any(i.scorer for i in gap.accepted) or not any(
                p.follows > _FOLLOWS for p in probe(gap, [Stale().intervene(lag=lag)])
            ):
                continue
            probes = probe(gap, [self.intervene(lag=lag, groups=group) for group in groups])
            tokens = gap.screened
            weight = np.sqrt(gap.weight[tokens])
            moves = np.stack([(p.predicted - gap.predicted)[tokens] * weight for p in probes], axis=1)
            sizes = np.linalg.lstsq(np.nan_to_num(moves), gap.residual[tokens] * weight, rcond=None)[0]
            old = [group for group, size in zip(groups, sizes, strict=True) if size > 0.5]
            if old and len(old) < len(groups) and old != ["head"]:
                yield self.intervene(lag=lag, groups=",".join(old))


class Quantized(FormatCause):
    """Weights in a low-precision format (methods 27)."""

    id = "weights.quantized"
    says = "one side's linear layers hold weights rounded to a low-precision format"
    sides = frozenset({"rollout", "trainer"})
    screens_on = "noise larger than the dtype's, the same for every pass over the same tokens"
    refute = "rounding the clean scorer's weights to the format leaves the gap as large as before"
    remedy = "sample with unquantised weights, or train on the quantised forward; correct what is left token by token"
    settings = ("rollout.quantization",)
    edit = "weights"
    formats = (
        "fp8-e4m3/tensor", "fp8-e4m3/channel", "fp8-e4m3/block128", "int8/channel", "int8/group32", "int4/group128", "int4/group32",
        "int4-asym/group32", "nvfp4/group16", "int3/group32",
    )  # fmt: skip


class StalePrefixCache(Cause):
    """K/V from before a weight update, on cache hits only (methods 29)."""

    id = "weights.stale-prefix-cache"
    says = "only requests that hit the prefix cache disagree: their K/V are from before the weight update"
    sides = frozenset({"rollout"})
    screens_on = "|d| of rows with cached_tokens > 0 against rows without; older K/V in those prefixes reproduce it"
    refute = "rows with and without a cache hit differ alike"
    remedy = "reset the prefix cache after every weight update"
    settings = ("rollout.prefix_cache",)
    costly = True
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"lag": int(rng.integers(1, 4))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        lag = int(parameters["lag"])
        return Intervention(self.id, {"lag": lag}, inputs=_Cached(f"older:{lag}"), sampled=_with_hits)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if any(gap.trace.rows("cached_tokens")):
            yield from (self.intervene(lag=lag) for lag in _lags(gap))

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        yield from contrast(self, trace, "cached_tokens", "rollout")


@dataclass(frozen=True, slots=True)
class _Cached:
    """The first `cached_tokens` tokens of each row read through the K/V of another scorer."""

    scorer: str

    def __call__(self, inputs: Inputs, trace: Trace, _: Facts) -> Inputs:
        return replace(inputs, cached=([int(hit or 0) for hit in trace.rows("cached_tokens")], self.scorer))


def _with_hits(trace: Trace, _: Facts) -> Trace:
    """Every second row hits the cache with all but its prompt's last tokens."""
    prompts = [len(prompt) for prompt in trace.contexts()]
    return trace.with_rows(cached_tokens=[n // 8 * 8 if row % 2 else 0 for row, n in enumerate(prompts)])


class RecomputeHides(Cause):
    """old_logp recomputed with newer weights than those that sampled."""

    id = "weights.recompute-hides"
    says = "old_logp was recomputed with newer weights than those that sampled, so the training ratio is 1 and hides the lag"
    sides = frozenset({"rollout"})
    screens_on = "weight_version < old_version = train_version, and logp equals old_logp while rollout_logp differs"
    refute = "old_logp is that of the weights that sampled, or the loss uses rollout_logp in its ratio"
    remedy = "keep rollout_logp as the old log-prob of stale rows, or weight them by old/rollout, or limit the lag"
    settings = ("trainer.max_staleness", "rollout.weight_sync")
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"lag": int(rng.integers(1, 4))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        lag = int(parameters["lag"])
        return Intervention(self.id, {"lag": lag}, scorer=f"older:{lag}", rows=lambda trace: _recomputed(trace, lag))

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if _hidden(gap.trace).any():
            yield from (self.intervene(lag=lag) for lag in _lags(gap))

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        hidden = _hidden(trace)
        if hidden.any():
            lag = int(_lag(trace)[hidden].max())
            says = (
                f"{hidden.sum() / trace.mask.sum():.1%} of the tokens were sampled up to {lag} versions before the weights that "
                "computed old_logp, and logp equals old_logp there"
            )
            yield Reading(self.id, "rollout", "warn", (says,), {"lag": lag}, np.flatnonzero(hidden))


def _recomputed(trace: Trace, lag: int) -> Trace:
    """Rows sampled `lag` versions before the one that both trainer passes ran at."""
    out = trace.with_tokens(logp=trace.tokens("old_logp"), weight_version=np.full(trace.n_tokens, 10 - lag))
    return out.with_rows(old_version=[10] * len(trace), train_version=[10] * len(trace))


def _lag(trace: Trace) -> np.ndarray:
    """Versions between the weights that sampled a token and those of old_logp, NaN where not declared, float64 (N,)."""
    if not (trace.has("weight_version") and "old_version" in trace.columns):
        return np.full(trace.n_tokens, np.nan)
    old = np.array([np.nan if version is None else version for version in trace.rows("old_version")], np.float64)
    return np.repeat(old, trace.lengths) - trace.tokens("weight_version")


def _hidden(trace: Trace) -> np.ndarray:
    """Tokens of older weights whose two trainer passes are one, at the newer version; bool (N,)."""
    if not (trace.has("logp") and trace.has("old_logp")):
        return np.zeros(trace.n_tokens, bool)
    versions = zip(trace.rows("old_version"), trace.rows("train_version"), strict=True)
    same = np.array([old is not None and old == train for old, train in versions], bool)[trace.row_of_token]
    close = np.abs(trace.tokens("logp").astype(np.float64) - trace.tokens("old_logp")) < _SAME
    return trace.mask & same & close & (_lag(trace) > 0)


def _lags(gap: Gap) -> list[int]:
    """Lags of the older checkpoints that were given."""
    return sorted(int(name.removeprefix("older:")) for name in gap.counterfactual.scorers if name.startswith("older:"))
