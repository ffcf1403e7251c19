"""The logit noise that each dtype is expected to have: from a table, or of this very model."""

from collections.abc import Sequence

import numpy as np

from unskew.causes import CAUSES, Intervention
from unskew.diagnose._counterfactual import ModelCounterfactual
from unskew.diagnose._floor import ABOVE, FLOORS, logit_noise
from unskew.trace import Trace

__all__ = ["MeasuredNoise", "TableNoise"]


_ALONE, _TOKENS = 6, 1024
"""Rows scored one at a time; tokens that the noise of a dtype is measured on."""


class TableNoise:
    """Logit noise of each dtype where there is no model: the table."""

    def of(self, dtype: str) -> float:
        return FLOORS[dtype]

    def measured(self, observed: float, declared: Sequence[str | None]) -> dict[str, float]:
        return {}

    def under(self, hypothesis: Sequence[Intervention]) -> float:
        return 0.0


class MeasuredNoise:
    """Logit noise of this model in each dtype, run when first asked."""

    def __init__(self, counterfactual: ModelCounterfactual, clean: np.ndarray, noise_scale: np.ndarray, trace: Trace) -> None:
        self._counterfactual, self._clean, self._scale, self._trace = counterfactual, clean, noise_scale, trace
        self._known: dict[str, float] = {}

    def of(self, dtype: str) -> float:
        if dtype not in self._known:
            self._known[dtype] = max(FLOORS["float32"], self.under(()) if dtype == "float32" else self._in(dtype))
        return self._known[dtype]

    def measured(self, observed: float, declared: Sequence[str | None]) -> dict[str, float]:
        """σ̂ of the dtypes that matter for this observation: the declared ones, and all where it is above theirs."""
        names = {"float32", *(d for d in declared if d)}
        if observed > ABOVE * sum(self.of(name) for name in names):
            names |= set(FLOORS)
        return {name: self.of(name) for name in names}

    def under(self, hypothesis: Sequence[Intervention]) -> float:
        """σ̂ of a hypothesis against itself in another batch shape: rounding that a fault adds falls out otherwise there."""
        now = self._counterfactual.predict([hypothesis])[0] if hypothesis else self._clean
        rows = self._some(_ALONE)
        return self._between(self._counterfactual.alone(rows.tolist(), hypothesis), now)

    def _in(self, dtype: str) -> float:
        rows = self._some(int(np.searchsorted(np.cumsum(np.sort(self._trace.lengths)), _TOKENS)) + 1)
        tokens = np.flatnonzero(np.isin(self._trace.row_of_token, rows))
        (logp,) = self._counterfactual.predict([[CAUSES["numerics.body"].intervene(dtype=dtype)]], tokens=tokens)
        return self._between(logp, self._clean)

    def _some(self, count: int) -> np.ndarray:
        """Rows spread evenly over the trace."""
        return np.unique(np.linspace(0, len(self._trace) - 1, min(len(self._trace), count)).astype(int))

    def _between(self, a: np.ndarray, b: np.ndarray) -> float:
        with np.errstate(invalid="ignore"):
            gap = a - b
        use = self._trace.mask & np.isfinite(gap)
        return logit_noise(gap[use], self._scale[use])
