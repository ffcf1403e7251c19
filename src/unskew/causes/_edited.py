"""Causes that are one edit of a model's arithmetic: their formats are tried, their factors fitted, on few tokens first."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from unskew.causes._base import Cause, Gap, Intervention, Parameter
from unskew.causes._fit import fit_factor, worthwhile
from unskew.score import Edit

__all__ = ["FactorCause", "FormatCause"]


class _EditedCause(Cause):
    needs_model = True
    costly = True
    fitted = 1
    planted = "rollout"
    edit: ClassVar[str]

    def intervene(self, **parameters: Parameter) -> Intervention:
        (value,) = parameters.values()
        return Intervention(self.id, dict(parameters), edits=(Edit(self.edit, value),))


class FormatCause(_EditedCause):
    """One edit whose value is one of a few formats."""

    parameter = "format"
    formats: ClassVar[Sequence[Parameter]]

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {str(self.parameter): self.formats[int(rng.integers(len(self.formats)))]}

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.counterfactual.edits(self.edit):
            yield from worthwhile(gap, [self.intervene(**{str(self.parameter): value}) for value in self.formats])


class FactorCause(_EditedCause):
    """One edit whose value is a positive number, fitted."""

    neutral: ClassVar[float] = 1.0

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.counterfactual.edits(self.edit):
            found = fit_factor(gap, lambda value: self.intervene(**{str(self.parameter): value}), self.grid, neutral=self.neutral)
            if found is not None:
                yield found
