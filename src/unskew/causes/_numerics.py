"""Numerics causes: the same function in another arithmetic."""

from collections.abc import Iterable

import numpy as np

from unskew.causes._base import Cause, Gap, Intervention, Parameter, Side
from unskew.causes._edited import FormatCause
from unskew.causes._fit import worthwhile
from unskew.score import Edit

__all__ = [
    "Activations", "AttentionKernel", "Body", "FusedKernel", "Head", "KVCache", "LogpStorage", "RopePrecision", "TensorParallel",
    "round_to",
]  # fmt: skip

_BOTH: frozenset[Side] = frozenset({"rollout", "trainer"})


class Body(Cause):
    """A body in another precision than declared, or noisier than its precision predicts (methods 32)."""

    id = "numerics.body"
    says = "the gap has the size and shape of rounding noise"
    sides = _BOTH
    kind = "matched"
    screens_on = "zero-mean, light-tailed noise in proportion to the logit-noise scale; σ̂ as of a bf16 or fp16 forward"
    refute = "σ̂ outside the range of the dtype's own forward, or a gap that does not follow the noise scale"
    remedy = "run both sides in the same dtype (fp16 is 8 times finer than bf16), or accept it as the floor of that dtype"
    settings = ("rollout.dtype", "trainer.dtype")
    needs_model = True
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"dtype": "bfloat16"}

    def intervene(self, **parameters: Parameter) -> Intervention:
        dtype = str(parameters["dtype"])
        return Intervention(self.id, {"dtype": dtype}, scorer=dtype)


class LogpStorage(Cause):
    """Log-probs rounded to bf16 or fp16 when stored (methods 30)."""

    id = "numerics.logp-storage"
    says = "log-probs were rounded to a 16-bit format on their way into the record"
    sides = _BOTH
    severity = "warn"
    screens_on = "every recorded log-prob lies on the grid of bf16 or fp16"
    refute = "a recorded log-prob that is not a bf16 (fp16) number"
    remedy = "keep log-probs in float32 from the log-softmax to the loss"
    settings = ("rollout.logp_dtype", "trainer.logits_dtype")
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"dtype": str(rng.choice(["bfloat16", "float16"]))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        dtype = str(parameters["dtype"])
        return Intervention(self.id, {"dtype": dtype}, logp=lambda logp, _: round_to(logp, dtype), stage=3)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        values = gap.recorded[gap.keep]
        values = values[np.abs(values) > 1e-3]
        if len(values) < 30:
            return
        for dtype in ("bfloat16", "float16"):
            if (round_to(values, dtype) == values).mean() > 0.995:
                yield self.intervene(dtype=dtype)
                return


class Head(Cause):
    """Head or logits in low precision on one side (methods 31)."""

    id = "numerics.head"
    says = "one side computes the output head, or stores its logits, in a 16-bit format"
    sides = _BOTH
    screens_on = "a gap in proportion to the logit's size that needs no deeper layer; logits on a 16-bit grid"
    refute = "rounding head or logits leaves the gap as large as before"
    remedy = "the same precision for the head on both sides, float32 best: one side alone in float32 is worse than both in bf16"
    settings = ("trainer.logits_dtype", "rollout.logits_dtype")
    severity = "warn"
    needs_model = True
    fitted = 1
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"where": str(rng.choice(["head", "logits"])), "dtype": str(rng.choice(["bfloat16", "float16"]))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        edit = Edit(f"{parameters['where']}-precision", str(parameters["dtype"]))
        return Intervention(self.id, dict(parameters), edits=(edit,))

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.counterfactual.edits("head-precision"):
            options = [(where, dtype) for where in ("head", "logits") for dtype in ("bfloat16", "float16")]
            yield from worthwhile(gap, [self.intervene(where=where, dtype=dtype) for where, dtype in options])


class KVCache(FormatCause):
    """Keys and values in a low-precision cache (methods 33)."""

    id = "numerics.kv-cache"
    says = "the engine keeps keys and values in a low-precision format"
    sides = frozenset({"rollout"})
    screens_on = "rounding noise that is there from the second token on and absent at the first"
    refute = "rounding keys and values to the format leaves the gap as large as before"
    remedy = "keep the KV cache in the model's dtype, or calibrate its scales after every weight update"
    settings = ("rollout.kv_cache_dtype",)
    edit = "kv-cache"
    formats = ("fp8-e4m3/one", "fp8-e5m2/one", "int8/token", "int8/group32", "int4/group32")


class Activations(FormatCause):
    """Quantised activations (methods 34)."""

    id = "numerics.activations"
    says = "one side quantises the inputs of its linear layers"
    sides = _BOTH
    screens_on = "rounding noise larger than the dtype's that follows outliers of the hidden states"
    refute = "rounding the inputs of the linear layers leaves the gap as large as before"
    remedy = "sample without activation quantisation, or quantise the trainer's forward alike"
    settings = ("rollout.quantization",)
    edit = "activations"
    formats = ("fp8-e4m3/token", "fp8-e4m3/group32", "int8/token", "int4/token")


class TensorParallel(FormatCause):
    """Partial sums of row-parallel layers, rounded and reduced (methods 39)."""

    id = "numerics.tensor-parallel"
    says = "one side sums its row-parallel layers from rounded parts, as tensor parallelism does"
    sides = _BOTH
    severity = "warn"
    screens_on = "rounding noise of the size of the working dtype; it changes with the number of ranks"
    refute = "splitting the sums into that many parts leaves the gap as large as before"
    remedy = "the same tensor-parallel size on both sides, or a reduction that does not depend on it"
    settings = ("rollout.tensor_parallel", "rollout.batch_invariant")
    edit = "split-sums"
    formats = ("2/bfloat16", "4/bfloat16", "8/bfloat16", "2/float16", "4/float16")

    @staticmethod
    def dtype(value: Parameter) -> str:
        return str(value).partition("/")[2]


class AttentionKernel(FormatCause):
    """Scores and probabilities of attention in low precision (methods 40)."""

    id = "numerics.attention-kernel"
    says = "one side's attention kernel keeps scores and probabilities in a 16-bit format"
    sides = _BOTH
    severity = "warn"
    screens_on = "rounding noise that starts at the second token"
    refute = "rounding scores and probabilities leaves the gap as large as before"
    remedy = "the same attention backend on both sides, with float32 scores"
    settings = ("rollout.attention_backend", "trainer.attention")
    edit, parameter = "attention-kernel", "dtype"
    formats = ("bfloat16", "float16")


class FusedKernel(FormatCause):
    """Norms in low precision, as some fused kernels compute them (methods 42)."""

    id = "numerics.fused-kernel"
    says = "one side's fused norm kernels round their input, scale and output to a 16-bit format"
    sides = _BOTH
    severity = "warn"
    screens_on = "rounding noise of the size of the working dtype from the first token on"
    refute = "rounding inside the norms leaves the gap as large as before"
    remedy = "the same norm kernels on both sides, with float32 inside"
    settings = ("trainer.fused_kernels",)
    edit, parameter = "norm-precision", "dtype"
    formats = ("bfloat16", "float16")


class RopePrecision(FormatCause):
    """cos and sin of the rotary embedding in low precision (methods 46)."""

    id = "numerics.rope-precision"
    says = "one side computes cos and sin of the rotary embedding in a 16-bit format"
    sides = _BOTH
    severity = "warn"
    screens_on = "the gap grows with the position"
    refute = "rounding cos and sin leaves the gap as large as before"
    remedy = "compute the rotary embedding in float32 on both sides"
    settings = ("rollout.rope",)
    edit, parameter = "rope-precision", "dtype"
    formats = ("bfloat16", "float16")


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Nearest bf16 or fp16 number of each value, ties to even, float64 of the same shape.

    Example:
        >>> round_to(np.array([-1.2345]), "bfloat16").tolist(), round_to(np.array([-1.2345]), "float16").tolist()
        ([-1.234375], [-1.234375])
    """
    if dtype == "float16":
        return np.asarray(values, np.float16).astype(np.float64)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values).astype(np.float64)
