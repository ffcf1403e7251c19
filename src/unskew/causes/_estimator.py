"""Estimator causes: tokens agree, a weight built from them does not work."""

from collections.abc import Iterable

import numpy as np

from unskew.causes._base import Cause, Gap, Reading

__all__ = ["SequenceWeight"]


class SequenceWeight(Cause):
    """Tokens at the floor, sequence weights degenerate with length (methods 0.6)."""

    id = "estimator.sequence-weight"
    says = "tokens agree within their noise floor, but products over whole sequences degenerate with length"
    sides = frozenset({"record"})
    kind = "lint"
    screens_on = "ESS of the sequence products against ESS of the token ratios"
    refute = "the ESS of sequence products stays above half of the number of sequences"
    remedy = "use token-level weights (TIS) or a geometric mask; the product of a long sequence has no usable variance"
    settings = ("correction.level",)

    def at_floor(self, gap: Gap) -> Iterable[Reading]:
        clean = np.where(gap.keep, gap.clean - gap.recorded, 0.0)
        sums = np.bincount(gap.trace.row_of_token, clean, len(gap.trace))
        if len(sums) < 20:
            return
        weights = np.exp(sums - sums.max())
        ess = float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
        if ess < 0.5:
            length = float(gap.trace.lengths.mean())
            says = f"ESS of sequence products = {ess:.3g} of {len(sums)} sequences at a mean length of {length:.0f} tokens"
            yield Reading(self.id, "record", "info", (says,), {"ess": round(ess, 4), "length": round(length, 1)})
