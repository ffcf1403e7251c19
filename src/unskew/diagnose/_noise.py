"""The logit noise that each dtype is expected to have: from a table, or of this very model."""

from collections.abc import Sequence

import numpy as np

from unskew.diagnose._counterfactual import ModelCounterfactual
from unskew.diagnose._floor import ABOVE, FLOORS, logit_noise
from unskew.trace import Trace

__all__ = ["MeasuredNoise", "TableNoise"]


class TableNoise:
    """Logit noise of each dtype where there is no model: the table."""

    def of(self, dtype: str) -> float:
        return FLOORS[dtype]

    def measured(self, observed: float, declared: Sequence[str | None]) -> dict[str, float]:
        return {}


class MeasuredNoise:
    """Logit noise of this model in each dtype, run when first asked."""

    def __init__(self, counterfactual: ModelCounterfactual, clean: np.ndarray, noise_scale: np.ndarray, trace: Trace) -> None:
        self._counterfactual, self._clean, self._scale, self._trace = counterfactual, clean, noise_scale, trace
        self._known: dict[str, float] = {}

    def of(self, dtype: str) -> float:
        if dtype not in self._known:
            self._known[dtype] = max(FLOORS["float32"], self._alone() if dtype == "float32" else self._in(dtype))
        return self._known[dtype]

    def measured(self, observed: float, declared: Sequence[str | None]) -> dict[str, float]:
        """σ̂ of the dtypes that matter for this observation: the declared ones, and all where it is above theirs."""
        names = {"float32", *(d for d in declared if d)}
        if observed > ABOVE * sum(self.of(name) for name in names):
            names |= set(FLOORS)
        return {name: self.of(name) for name in names}

    def _alone(self) -> float:
        """fp32 against itself in another batch shape: up to six sequences scored one at a time."""
        rows = np.unique(np.linspace(0, len(self._trace) - 1, min(len(self._trace), 6)).astype(int))
        tokens = np.concatenate([np.arange(*self._trace.cu_seqlens[row : row + 2]) for row in rows])
        gap = self._counterfactual.alone(rows.tolist()) - self._clean[tokens]
        use = self._trace.mask[tokens] & np.isfinite(gap)
        return logit_noise(gap[use], self._scale[tokens][use])

    def _in(self, dtype: str) -> float:
        gap = self._counterfactual.scores(dtype).logp - self._clean
        use = self._trace.mask & np.isfinite(gap)
        return logit_noise(gap[use], self._scale[use])
