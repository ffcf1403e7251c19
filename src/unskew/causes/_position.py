"""Position causes: the trainer's padding or packing reaches into the forward pass."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from unskew.causes._base import Cause, Facts, Gap, Intervention, Parameter, Reading
from unskew.causes._contrast import contrast
from unskew.score import Inputs
from unskew.trace import Trace

__all__ = ["LeftPad", "Packing"]


class _Padded(Cause):
    """A cause that a column of the record points at: rows with a positive value disagree, the others do not."""

    sides = frozenset({"trainer"})
    needs_model = True
    costly = True
    fitted = 1
    planted = "trainer"


class LeftPad(_Padded):
    """Left padding is attended to, or counted by the position ids (methods 13)."""

    id = "position.left-pad"
    says = "rows with left padding disagree, the others do not: padding is attended to, or position ids count it"
    screens_on = "|d| of rows with pad_left > 0 against rows without; scoring with that padding reproduces it"
    refute = "rows with and without left padding differ alike (under RoPE position ids that count it change nothing)"
    remedy = "pass the attention mask, and derive position ids from it"
    settings = ("trainer.position_ids",)

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"padding": "attended"}

    def intervene(self, **parameters: Parameter) -> Intervention:
        change = _LeftPadded(str(parameters["padding"]))
        return Intervention(self.id, {"padding": change.padding}, inputs=change, sampled=_with_pad_left)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if any(gap.trace.rows("pad_left")):
            yield from (self.intervene(padding=how) for how in ("attended", "counted"))

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        yield from contrast(self, trace, "pad_left", "trainer")


class Packing(_Padded):
    """Attention leaks between packed samples (methods 14)."""

    id = "position.packing"
    says = "the first sample of each pack agrees, later ones do not: attention leaks between packed samples"
    screens_on = "|d| of rows with pack_index > 0 against the first of each pack; scoring after the earlier samples reproduces it"
    refute = "first and later samples of a pack differ alike"
    remedy = "use a block-diagonal mask (cu_seqlens) and restart position ids for each packed sample"
    settings = ("trainer.packing", "trainer.position_ids")

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"positions": str(rng.choice(["continue", "restart"]))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        change = _Packed(str(parameters["positions"]))
        return Intervention(self.id, {"positions": change.positions}, inputs=change, sampled=_in_packs)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if any(gap.trace.rows("pack_index")):
            yield from (self.intervene(positions=how) for how in ("continue", "restart"))

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        yield from contrast(self, trace, "pack_index", "trainer")


@dataclass(frozen=True, slots=True)
class _LeftPadded:
    """Each prompt behind its left padding, which is "attended" to, or only "counted" by the position ids."""

    padding: str

    def __call__(self, inputs: Inputs, trace: Trace, facts: Facts) -> Inputs:
        widths = [int(width or 0) for width in trace.rows("pad_left")]
        if self.padding == "counted":
            lengths = [len(p) + len(r) for p, r in zip(inputs.prompts, inputs.responses, strict=True)]
            return replace(inputs, positions=[width + np.arange(n) for width, n in zip(widths, lengths, strict=True)])
        pad = facts.pad_id if facts.pad_id is not None else facts.eos_ids[0] if facts.eos_ids else 0
        prompts = [np.concatenate([np.full(w, pad, np.int64), p]) for w, p in zip(widths, inputs.prompts, strict=True)]
        return replace(inputs, prompts=prompts)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Each row behind the earlier samples of its pack, which it attends to; position ids "continue" or "restart"."""

    positions: str

    def __call__(self, inputs: Inputs, trace: Trace, facts: Facts) -> Inputs:
        packs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, (pack, index) in enumerate(zip(trace.rows("pack_id"), trace.rows("pack_index"), strict=True)):
            if pack is not None and index is not None:
                packs[pack].append((index, row))
        prompts = [np.asarray(prompt, np.int64) for prompt in inputs.prompts]
        positions = [np.arange(len(p) + len(r)) for p, r in zip(prompts, inputs.responses, strict=True)]
        out, places = list(prompts), list(positions)
        for members in packs.values():
            before: list[int] = []
            for _, row in sorted(members):
                out[row] = np.concatenate([*(part for k in before for part in (prompts[k], inputs.responses[k])), prompts[row]])
                places[row] = np.concatenate([positions[k] for k in (*before, row)])
                before.append(row)
        return replace(inputs, prompts=out, positions=places if self.positions == "restart" else None)


def _with_pad_left(trace: Trace, _: Facts) -> Trace:
    """Rows as a batch padded to its longest prompt declares them."""
    prompts = np.array([len(prompt) for prompt in trace.contexts()])
    return trace.with_rows(pad_left=(prompts.max(initial=0) - prompts).tolist())


def _in_packs(trace: Trace, _: Facts) -> Trace:
    """Rows in packs of three."""
    rows = range(len(trace))
    return trace.with_rows(pack_id=[row // 3 for row in rows], pack_index=[row % 3 for row in rows])
