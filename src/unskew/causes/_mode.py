"""Mode causes: a trainer whose own passes disagree."""

from collections.abc import Iterable

import numpy as np

from unskew.causes._base import Cause, Facts, Reading
from unskew.trace import Trace

__all__ = ["TrainMode"]


class TrainMode(Cause):
    """Dropout on, or a trainer whose own passes disagree (methods 50, 51)."""

    id = "mode.train"
    says = "two trainer passes over the same tokens at the same weights disagree: dropout, or a batch-dependent forward"
    sides = frozenset({"trainer"})
    kind = "lint"
    screens_on = "|logp − old_logp| where train_version equals old_version"
    refute = "two trainer passes over the same rows give the same log-probs"
    remedy = "score old_logp in eval mode, set dropout to 0, and keep the micro-batch shape the same in both passes"
    settings = ("trainer.dropout", "trainer.micro_batch")

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        if not (trace.has("logp") and trace.has("old_logp")):
            return
        versions = zip(trace.rows("old_version"), trace.rows("train_version"), strict=True)
        same = np.array([a is not None and a == b for a, b in versions])
        use = trace.mask & same[trace.row_of_token]
        if not use.any():
            return
        gap = np.abs(trace.tokens("logp").astype(np.float64) - trace.tokens("old_logp"))
        if gap[use].mean() > 0.01:
            says = f"mean |logp − old_logp| = {gap[use].mean():.3g} nat over {int(use.sum())} tokens scored twice at one version"
            worst = np.argsort(np.where(use, -gap, 0.0))[:8]
            yield Reading(self.id, "trainer", "error", (says,), {"mean_abs": round(float(gap[use].mean()), 5)}, worst)
