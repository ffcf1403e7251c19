"""Fitting the parameter of a cause, and asking on few tokens whether a cause is worth a whole forward pass."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unskew.causes._base import CLIP_NATS, Cause, Gap, Intervention

__all__ = ["Probe", "fit_factor", "fit_pair", "fit_parameter", "minimise", "probe", "worthwhile"]

_UNSURE = 1.0 / (0.05**2 + 0.05**2)
_PROMISING = 0.1


def minimise(loss: Callable[[np.ndarray], np.ndarray], grid: Sequence[float], *, rounds: int = 3) -> tuple[float, float]:
    """(argmin, min) of a function of one number given on arrays: a grid, a zoom, then parabolas through three points.

    Example:
        >>> x, y = minimise(lambda x: (x - 0.7123) ** 2, (0.5, 1.0, 2.0))
        >>> round(x, 6), bool(y < 1e-12)
        (0.7123, True)
    """
    values = np.asarray(grid, np.float64)
    scores = loss(values)
    best = int(np.argmin(scores))
    low, high = values[max(best - 1, 0)], values[min(best + 1, len(values) - 1)]
    at, least, step = float(values[best]), float(scores[best]), (high - low) / 8
    for _ in range(rounds):
        values = at + step * np.arange(-4, 5)
        values = values[(values > 0) & (values >= grid[0]) & (values <= grid[-1])]
        scores = loss(values)
        best = int(np.argmin(scores))
        if scores[best] <= least:
            at, least = float(values[best]), float(scores[best])
        if 0 < best < len(values) - 1:
            a, b, c = (float(v) for v in scores[best - 1 : best + 2])
            if a + c > 2 * b:
                vertex = float(values[best]) + step * (a - c) / (2 * (a - 2 * b + c))
                (score,) = loss(np.array([vertex]))
                if score <= least:
                    at, least = float(vertex), float(score)
        step /= 8
    return at, least


def fit_parameter(gap: Gap, cause: Cause, *, rounds: int = 3) -> Intervention:
    """The cause's intervention whose parameter minimises the loss on the fit sequences, on top of the accepted ones."""
    assert cause.parameter is not None
    loss = _fit_loss(gap, lambda values: [cause.intervene(**{str(cause.parameter): float(value)}) for value in values])
    return cause.intervene(**{cause.parameter: minimise(loss, cause.grid, rounds=rounds)[0]})


def fit_pair(gap: Gap, first: Cause, second: Cause) -> tuple[Intervention, Intervention]:
    """Both causes' interventions fitted together: every pair of grid points, then one parameter after the other.

    Two parameters trade off along a valley that alternate fits from one end of it do not leave.
    """
    assert first.parameter is not None and second.parameter is not None
    pairs = [
        (first.intervene(**{first.parameter: a}), second.intervene(**{second.parameter: b}))
        for a in first.grid
        for b in second.grid
    ]
    losses = _hypotheses_loss(gap, [(*gap.accepted, *pair) for pair in pairs])
    best = pairs[int(np.argmin(losses))]
    for _ in range(2):
        a = fit_parameter(replace(gap, accepted=(*gap.accepted, best[1])), first, rounds=2)
        best = (a, fit_parameter(replace(gap, accepted=(*gap.accepted, a)), second, rounds=2))
    return best


def _fit_loss(gap: Gap, make: Callable[[np.ndarray], list[Intervention]]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: _hypotheses_loss(gap, [(*gap.accepted, new) for new in make(values)])


def _hypotheses_loss(gap: Gap, hypotheses: Sequence[Sequence[Intervention]]) -> np.ndarray:
    tokens = None if any(i.stage == 1 for i in gap.accepted) else gap.some(gap.fit & (gap.weight < _UNSURE))
    return gap.loss(gap.counterfactual.predict(hypotheses, tokens=tokens))[:, gap.fit].sum(axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """What an intervention does to the screened tokens of a gap.

    `share` of their loss that it removes; `fit` the share that its move would remove at the best size, which one
    probe of a continuous parameter tells; `predicted` float64 (N,), NaN elsewhere.
    """

    intervention: Intervention
    share: float
    fit: float
    predicted: np.ndarray


def probe(gap: Gap, interventions: Sequence[Intervention]) -> list[Probe]:
    """Each intervention on top of the accepted ones, on the screened tokens."""
    tokens = gap.screened
    if not len(tokens) or not len(interventions):
        return []
    out = []
    predicted = gap.counterfactual.predict([(*gap.accepted, new) for new in interventions], tokens=tokens)
    before = float(gap.loss(gap.predicted)[tokens].sum())
    weight = np.sqrt(gap.weight[tokens])
    residual = np.clip(gap.residual[tokens], -CLIP_NATS, CLIP_NATS) * weight
    for new, logp in zip(interventions, predicted, strict=True):
        after = float(gap.loss(logp)[tokens].sum())
        with np.errstate(invalid="ignore"):
            move = np.nan_to_num(np.clip(logp[tokens] - gap.predicted[tokens], -CLIP_NATS, CLIP_NATS)) * weight
        size = float((move**2).sum()) * float((residual**2).sum())
        fit = float((move * residual).sum()) * abs(float((move * residual).sum())) / size if size else 0.0
        out.append(Probe(new, 1.0 - after / before if before else 0.0, fit, logp))
    return out


def worthwhile(gap: Gap, interventions: Iterable[Intervention], *, most: int = 2) -> list[Intervention]:
    """The interventions that remove a tenth of the loss of the screened tokens, best first, at most `most`."""
    found = sorted(probe(gap, list(interventions)), key=lambda p: -p.share)
    return [p.intervention for p in found[:most] if p.share > _PROMISING]


def fit_factor(
    gap: Gap, make: Callable[[float], Intervention], grid: Sequence[float], *, neutral: float = 1.0, steps: int = 6
) -> Intervention | None:
    """The intervention whose positive parameter fits the screened tokens, None where no probe of the grid points to it.

    From the best of the grid, Gauss-Newton steps in log θ with the derivative by the last two predictions: the moves of
    most parameters are nearly linear in it.
    """
    probes = probe(gap, [make(float(value)) for value in grid])
    if not probes or max(max(p.share, p.fit) for p in probes) < _PROMISING:
        return None
    tokens = gap.screened
    weight = np.sqrt(gap.weight[tokens])

    def residual(logp: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(np.clip(gap.recorded[tokens] - logp[tokens], -CLIP_NATS, CLIP_NATS)) * weight

    known = [(math.log(neutral), residual(gap.predicted))] if neutral > 0 else []
    known += [(math.log(value), residual(p.predicted)) for value, p in zip(grid, probes, strict=True)]
    known.sort(key=lambda pair: float((pair[1] ** 2).sum()))
    if len(known) < 2:
        return probes[0].intervention
    (at, best), (other, other_residual) = known[:2]
    low, high = min(k[0] for k in known), max(k[0] for k in known)
    for _ in range(steps):
        slope = (other_residual - best) / (at - other)
        size = float((slope**2).sum())
        step = float((slope * best).sum()) / size if size else 0.0
        step = min(max(step, -1.0), 1.0)
        new = min(max(at + step, low - 1.0), high + 1.0)
        if abs(new - at) < 5e-4:
            break
        (found,) = probe(gap, [make(math.exp(new))])
        value = residual(found.predicted)
        if float((value**2).sum()) < float((best**2).sum()):
            (at, best), (other, other_residual) = (new, value), (at, best)
        else:
            other, other_residual = new, value
    return make(math.exp(at)) if at != math.log(neutral) else None
