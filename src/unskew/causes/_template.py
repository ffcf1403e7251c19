"""Template causes: the two sides read different prompts."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from unskew.causes._base import Cause, Facts, Gap, Intervention, Parameter
from unskew.score import Inputs
from unskew.trace import Trace

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
    planted = "rollout"

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, inputs=_toggled_bos)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.counterfactual.facts.bos_id is not None:
            yield self.intervene()


def _toggled_bos(inputs: Inputs, _: Trace, facts: Facts) -> Inputs:
    """Prompts without the BOS that they begin with, or with the one that they lack."""
    return replace(inputs, prompts=[_toggled(np.asarray(prompt), facts.bos_id) for prompt in inputs.prompts])


def _toggled(prompt: np.ndarray, bos_id: int | None) -> np.ndarray:
    if not len(prompt) or bos_id is None:
        return prompt
    if len(prompt) > 1 and prompt[0] == bos_id:
        return prompt[1:]
    return np.concatenate([[bos_id], prompt]).astype(np.int64)
