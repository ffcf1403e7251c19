"""Numerics causes: the same function in another arithmetic."""

from collections.abc import Iterable

import numpy as np

from unskew.causes._base import Cause, Gap, Intervention, Parameter, Side

__all__ = ["Body", "LogpStorage", "round_to"]

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
