"""Causes that are one edit of a model's arithmetic: their formats are tried, their factors fitted, on few tokens first."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from unskew import score
from unskew.causes._base import Cause, Gap, Intervention, Parameter
from unskew.causes._fit import fit_factor, probe, worthwhile
from unskew.score import Edit

__all__ = ["FactorCause", "FormatCause"]

_WITHIN = 5.0
"""A format is tried where its noise is within this factor of the gap."""


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
            yield from worthwhile(gap, [self.intervene(**{str(self.parameter): value}) for value in self._sized(gap)])

    def _sized(self, gap: Gap) -> list[Parameter]:
        """The formats whose noise can be of the size of the gap: it grows as their rounding error, from one that is probed."""
        errors = {value: score.rounding_error(self.dtype(value)) for value in self.formats}
        order = sorted(self.formats, key=lambda value: errors[value])
        first = order[len(order) // 2]
        probes = probe(gap, [self.intervene(**{str(self.parameter): first})])
        if len(order) < 3 or not probes or not (size := probes[0].size):
            return list(order)
        return [value for value in order if 1 / _WITHIN < size * errors[value] / errors[first] < _WITHIN]

    @staticmethod
    def dtype(value: Parameter) -> str:
        """The format in a value of the edit."""
        return str(value)


class FactorCause(_EditedCause):
    """One edit whose value is a positive number, fitted."""

    paths: ClassVar[Sequence[Sequence[float]]]
    """Values ever farther from the neutral one, for each direction."""

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        if gap.counterfactual.edits(self.edit):
            found = fit_factor(gap, lambda value: self.intervene(**{str(self.parameter): value}), self.paths)
            if found is not None:
                yield found
