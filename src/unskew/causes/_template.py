"""Template causes: the two sides read different prompts."""

from collections.abc import Iterable

from unskew.causes._base import Cause, Gap, Intervention, Parameter

__all__ = ["Bos"]


class Bos(Cause):
    """One BOS more or less in the prompt (methods 20)."""

    id = "template.bos"
    says = "one side's prompt begins with a BOS token that the other side's lacks"
    sides = frozenset({"rollout", "trainer"})
    screens_on = "the gap is largest at the first response tokens and decays; prompt lengths differ by one"
    refute = "scoring with the BOS toggled leaves the gap as large as before"
    remedy = "send token ids to the engine; apply the chat template once, and tokenize its text without special tokens"
    settings = ("rollout.prompt_ids", "rollout.add_bos")
    needs_model = True

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, scorer="bos")

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if "bos" in gap.counterfactual.scorers:
            yield self.intervene()
