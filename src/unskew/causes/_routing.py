"""Routing causes: a mixture-of-experts model chose other experts."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from unskew.causes._base import Cause, Facts, Gap, Intervention, Parameter, Reading
from unskew.score import Inputs
from unskew.trace import Trace

__all__ = ["Flips"]


class Flips(Cause):
    """Expert choice differs between the two sides (methods 43)."""

    id = "routing.flips"
    says = "a mixture-of-experts router chose other experts for some tokens on one side"
    sides = frozenset({"rollout", "trainer"})
    screens_on = "a heavy tail of |d| at tokens after a flip; recorded expert ids differ from the scorer's"
    refute = "forcing the recorded expert ids leaves the gap as large as before"
    remedy = "replay the engine's expert ids (and gate weights) in the trainer (R3), with the router in the same precision"
    settings = ("rollout.return_routed_experts", "trainer.router_replay")
    needs_model = True
    planted = "rollout"
    plants_in = "moe"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"mantissa_bits": int(rng.integers(2, 5))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, dict(parameters), inputs=_replayed)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if _recorded(gap) and gap.side == "rollout":
            yield self.intervene()

    def at_floor(self, gap: Gap) -> Iterable[Reading]:
        if not _recorded(gap):
            return
        before = float(gap.loss(gap.clean).sum())
        after = float(gap.loss(gap.counterfactual.predict([[self.intervene()]])[0]).sum())
        share = 1.0 - after / before if before else 0.0
        if share > 0.05:
            says = f"the gap is at its floor; replaying the recorded expert ids would still remove {share:.0%} of d²"
            yield Reading(self.id, "rollout", "info", (says,), explained=round(share, 4))


def _replayed(inputs: Inputs, trace: Trace, _: Facts) -> Inputs:
    return replace(inputs, routed_experts=trace.rows("routed_experts"))


def _recorded(gap: Gap) -> bool:
    """Whether there are expert ids to replay and a model to replay them in."""
    return gap.trace.has("routed_experts") and gap.counterfactual.edits("routing")
