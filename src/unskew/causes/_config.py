"""Config causes: the same weights under other constants of the architecture."""

from collections.abc import Iterable

import numpy as np

from unskew.causes._base import Cause, Gap, Intervention, Parameter, Side
from unskew.causes._edited import FactorCause
from unskew.causes._fit import fit_factor, probe, worthwhile
from unskew.score import Edit

__all__ = ["AttentionScale", "NormEps", "Rope", "SlidingWindow", "Softcap", "VocabPadding"]

_BOTH: frozenset[Side] = frozenset({"rollout", "trainer"})


class Rope(Cause):
    """Another base or scaling of the rotary embedding (methods 46)."""

    id = "config.rope"
    says = "one side rotates queries and keys by other angles: another RoPE base, or a scaling that the other side lacks"
    sides = _BOTH
    screens_on = "the gap grows with the position and with the reach of attention"
    refute = "no base, linear factor or YaRN factor brings the clean scorer nearer to the recorded log-probs"
    remedy = "give both sides the same rope_theta and rope_scaling; compare the two config.json, and what the engine overrides"
    settings = ("rollout.rope",)
    needs_model = True
    costly = True
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        kind = str(rng.choice(["base", "linear", "yarn"]))
        low, high = {"base": (2.0, 50.0), "linear": (1.3, 4.0), "yarn": (1.5, 4.0)}[kind]
        return {"kind": kind, "factor": round(float(np.exp(rng.uniform(np.log(low), np.log(high)))), 3)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, dict(parameters), edits=(Edit(f"rope-{parameters['kind']}", float(parameters["factor"])),))

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if not gap.counterfactual.edits("rope-base"):
            return
        paths = {
            "base": ((1.5, 3.0, 8.0, 20.0, 50.0, 200.0), (0.67, 0.33, 0.12, 0.04)),
            "linear": ((1.5, 2.0, 3.0, 5.0, 8.0), (0.67, 0.5, 0.33, 0.2)),
            "yarn": ((1.5, 2.0, 3.0, 5.0, 8.0),),
        }
        fits = [
            fit_factor(gap, lambda factor, kind=kind: self.intervene(kind=kind, factor=factor), path)
            for kind, path in paths.items()
        ]
        yield from worthwhile(gap, [fit for fit in fits if fit is not None], most=1)


class AttentionScale(FactorCause):
    """Attention scores times another factor (methods 47)."""

    id = "config.attention-scale"
    says = "one side scales attention scores by another factor"
    sides = _BOTH
    screens_on = "the gap is there from the second token on and moves with the sharpness of attention"
    refute = "no factor on the attention scores brings the clean scorer nearer to the recorded log-probs"
    remedy = "give both sides the same attention scale: head_dim, query_pre_attn_scalar, mscale of YaRN, attention multiplier"
    settings = ("rollout.rope", "rollout.attention_backend")
    edit, parameter = "attention-scale", "scale"
    paths = ((1.1, 1.25, 1.6, 2.5), (0.9, 0.8, 0.6, 0.4))

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"scale": round(float(rng.choice([rng.uniform(0.6, 0.93), rng.uniform(1.08, 1.6)])), 3)}


class SlidingWindow(Cause):
    """A sliding window on one side only (methods 48)."""

    id = "config.sliding-window"
    says = "one side's attention sees only the last tokens, the other's sees all of them"
    sides = _BOTH
    screens_on = "the two sides agree up to one absolute position, the same in all rows, and disagree from there"
    refute = "tokens before and after that position differ alike"
    remedy = "switch the sliding window on in both or in neither (use_sliding_window, sliding_window, layer_types)"
    settings = ("rollout.attention_backend", "trainer.attention")
    needs_model = True
    costly = True
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"window": int(rng.integers(16, 48))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        window = int(parameters["window"])
        return Intervention(self.id, {"window": window}, edits=(Edit("sliding-window", window),))

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if not (gap.counterfactual.edits("sliding-window") and gap.trace.has("prompt_ids")):
            return
        prompts = np.array([len(prompt) for prompt in gap.trace.ragged("prompt_ids")])
        place = (prompts[gap.trace.row_of_token] + gap.trace.position)[gap.keep]
        size = (np.abs(gap.residual) * np.sqrt(gap.weight))[gap.keep]
        if not len(size) or place.max() < 3:
            return
        totals, counts = np.bincount(place, size), np.bincount(place)
        mean = totals[counts > 0] / counts[counts > 0]
        # The logits at place p come from the query at p − 1, which misses a key once p > W.
        onset = int(np.flatnonzero(counts)[np.argmax(mean > 0.1 * mean.max())]) - 1
        seen = place.min() <= onset
        grid = range(max(onset - 2, 2), onset + 2) if seen else {int(w) for w in np.geomspace(4, max(place.min(), 5), 6)}
        found = max(probe(gap, [self.intervene(window=w) for w in sorted(grid)]), key=lambda p: p.share, default=None)
        if found is None or found.share < 0.1:
            return
        best, step = found, max(int(found.intervention.parameters["window"]) // 4, 1)
        while step:
            now = int(best.intervention.parameters["window"])
            near = [w for w in (now - step, now + step) if w > 1]
            better = max(probe(gap, [self.intervene(window=w) for w in near]), key=lambda p: p.share)
            best, step = (better, step) if better.share > best.share else (best, step // 2)
        yield best.intervention


class Softcap(Cause):
    """Soft capping of attention scores or of the logits on one side only (methods 28, 49)."""

    id = "config.softcap"
    says = "one side caps attention scores or the logits softly, the other does not"
    sides = _BOTH
    screens_on = "the gap grows with the largest scores; for the logits, with the logit of the sampled token"
    refute = "no cap brings the clean scorer nearer to the recorded log-probs"
    remedy = "use an attention backend that applies the model's softcap on both sides; check final_logit_softcapping"
    settings = ("rollout.attention_backend", "trainer.attention", "trainer.fused_kernels")
    needs_model = True
    costly = True
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        where = str(rng.choice(["attention", "final"]))
        return {"where": where, "cap": round(float(rng.uniform(*((3.0, 10.0) if where == "attention" else (8.0, 30.0)))), 2)}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, dict(parameters), edits=(Edit(f"{parameters['where']}-softcap", float(parameters["cap"])),))

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        paths = {"attention": ((30.0, 15.0, 10.0, 7.0, 5.0, 3.0),), "final": ((50.0, 30.0, 20.0, 14.0, 10.0, 7.0, 5.0),)}
        fits = [
            fit_factor(gap, lambda cap, where=where: self.intervene(where=where, cap=cap), path)
            for where, path in paths.items()
            if gap.counterfactual.edits(f"{where}-softcap")
        ]
        yield from worthwhile(gap, [fit for fit in fits if fit is not None], most=1)


class NormEps(FactorCause):
    """Another epsilon in the norms (methods 49)."""

    id = "config.norm-eps"
    says = "one side's norms add another epsilon to the variance"
    sides = _BOTH
    screens_on = "a small gap everywhere that grows where hidden states are small"
    refute = "no epsilon brings the clean scorer nearer to the recorded log-probs"
    remedy = "give both sides the same rms_norm_eps (layer_norm_eps); a converted checkpoint often carries a default"
    settings = ("trainer.fused_kernels",)
    edit, parameter = "norm-eps", "eps"
    paths = ((1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1), (1e-8, 1e-9))

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"eps": float(f"{np.exp(rng.uniform(np.log(1e-4), np.log(1e-2))):.3g}")}


class VocabPadding(FactorCause):
    """The softmax runs over padded rows of the vocabulary (methods 49)."""

    id = "config.vocab-padding"
    says = "one side's softmax runs over padding rows of the vocabulary as if they were tokens with logit 0"
    sides = _BOTH
    screens_on = "the gap has one sign and grows as the log-sum-exp of the logits falls"
    refute = "no number of padding rows brings the clean scorer nearer to the recorded log-probs"
    remedy = "cut the logits to the tokenizer's vocabulary before the softmax, or set padded logits to −inf"
    settings = ("rollout.tensor_parallel",)
    edit, parameter = "vocab-padding", "rows"
    paths = ((8.0, 32.0, 128.0, 512.0, 4096.0),)
    planted, costly = "trainer", False

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"rows": float(rng.integers(32, 512))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        rows = max(round(float(parameters["rows"])), 1)
        return Intervention(self.id, {"rows": rows}, edits=(Edit(self.edit, rows),))
