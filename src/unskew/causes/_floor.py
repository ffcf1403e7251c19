"""The floor: nothing to name."""

from unskew.causes._base import Cause

__all__ = ["Noise"]


class Noise(Cause):
    """Nothing above the noise floor."""

    id = "floor.noise"
    says = "the gap is what two correct engines at their dtypes differ by"
    sides = frozenset({"rollout", "trainer", "record"})
    kind = "matched"
    severity = "info"
    screens_on = "σ̂ within the range of the floor on both sides"
    refute = "a conditional statistic (position, segment, version, cache hit) above the floor"
    remedy = "nothing to fix; watch that it stays so"
