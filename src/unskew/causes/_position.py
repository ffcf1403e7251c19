"""Position causes: the trainer's padding or packing reaches into the forward pass."""

from collections.abc import Iterable

from unskew.causes._base import Cause, Facts, Reading
from unskew.causes._contrast import contrast
from unskew.trace import Trace

__all__ = ["LeftPad", "Packing"]


class LeftPad(Cause):
    """Position ids ignore left padding (methods 13)."""

    id = "position.left-pad"
    says = "rows with left padding disagree, the others do not: position ids count the padding"
    sides = frozenset({"trainer"})
    kind = "lint"
    screens_on = "|d| of rows with pad_left > 0 against rows without"
    refute = "rows with and without left padding differ alike (they do under RoPE, which is blind to a constant offset)"
    remedy = "derive position ids from the attention mask"
    settings = ("trainer.position_ids",)

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        yield from contrast(self, trace, "pad_left", "trainer")


class Packing(Cause):
    """Attention leaks between packed samples (methods 14)."""

    id = "position.packing"
    says = "the first sample of each pack agrees, later ones do not: attention leaks between packed samples"
    sides = frozenset({"trainer"})
    kind = "lint"
    screens_on = "|d| of rows with pack_index > 0 against the first of each pack"
    refute = "first and later samples of a pack differ alike"
    remedy = "use a block-diagonal mask (cu_seqlens) and restart position ids for each packed sample"
    settings = ("trainer.packing", "trainer.position_ids")

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        yield from contrast(self, trace, "pack_index", "trainer")
