"""Routing causes: a mixture-of-experts model chose other experts."""

from collections.abc import Iterable

from unskew.causes._base import Cause, Gap, Intervention, Parameter

__all__ = ["Flips"]


class Flips(Cause):
    """Expert choice differs between the two sides (methods 43)."""

    id = "routing.flips"
    says = "a mixture-of-experts router chose other experts for some tokens on one side"
    sides = frozenset({"rollout", "trainer"})
    screens_on = "a heavy tail of |d| at tokens after a flip; recorded expert ids differ from the scorer's"
    refute = "forcing the recorded expert ids leaves the gap as large as before"
    remedy = (
        "replay the engine's expert ids (and gate weights) in the trainer (R3), with the router in the same precision"
    )
    settings = ("rollout.return_routed_experts", "trainer.router_replay")
    needs_model = True

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, dict(parameters), scorer="routing")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if "routing" in gap.counterfactual.scorers and gap.side == "rollout":
            yield self.intervene()
