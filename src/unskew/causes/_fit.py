"""Fitting the parameter of a cause, and asking on few tokens whether a cause is worth a whole forward pass."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unskew.causes._base import Cause, Gap, Intervention

__all__ = ["Probe", "fit_factor", "fit_pair", "fit_parameter", "minimise", "probe", "worthwhile"]

_UNSURE = 1.0 / (0.05**2 + 0.05**2)
_PROMISING, _FOLLOWS = 0.1, 0.25
_FAR = 20.0
_GOLDEN = (3 - math.sqrt(5)) / 2


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

    Args:
        share: of their loss that it removes.
        follows: cosine of the signed roots of its move and of the gap: roots keep the few largest tokens from deciding,
            and a step of a parameter far too small still points along the gap.
        size: of its move relative to the gap.
        roots: Σ √|gap left|, which falls towards the right parameter from afar.
        predicted: float64 (N,), NaN elsewhere.
    """

    intervention: Intervention
    share: float
    follows: float
    size: float
    roots: float
    predicted: np.ndarray


def probe(gap: Gap, interventions: Sequence[Intervention]) -> list[Probe]:
    """Each intervention on top of the accepted ones, on the screened tokens."""
    tokens = gap.screened
    if not len(tokens) or not len(interventions):
        return []
    out = []
    predicted = gap.counterfactual.predict([(*gap.accepted, new) for new in interventions], tokens=tokens)
    before = float(gap.loss(gap.predicted)[tokens].sum())
    residual = _weighted(gap, gap.predicted)
    for new, logp in zip(interventions, predicted, strict=True):
        after = _weighted(gap, logp)
        move = residual - after
        out.append(
            Probe(
                new,
                share=1.0 - float(gap.loss(logp)[tokens].sum()) / before if before else 0.0,
                follows=_cosine(_signed_root(move), _signed_root(residual)),
                size=float(np.linalg.norm(move) / np.linalg.norm(residual)) if residual.any() else 0.0,
                roots=float(np.sqrt(np.abs(after)).sum()),
                predicted=logp,
            )
        )
    return out


def _weighted(gap: Gap, predicted: np.ndarray) -> np.ndarray:
    """Recorded − predicted on the screened tokens in units of their noise; 0 where there is no prediction."""
    tokens = gap.screened
    with np.errstate(invalid="ignore"):
        left = gap.recorded[tokens] - predicted[tokens]
    return np.nan_to_num(np.clip(left, -_FAR, _FAR)) * np.sqrt(gap.weight[tokens])


def _signed_root(values: np.ndarray) -> np.ndarray:
    return np.copysign(np.sqrt(np.abs(values)), values)


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size else 0.0


def worthwhile(gap: Gap, interventions: Iterable[Intervention], *, most: int = 2) -> list[Intervention]:
    """The interventions that remove a tenth of the loss of the screened tokens, best first, at most `most`."""
    found = sorted(probe(gap, list(interventions)), key=lambda p: -p.share)
    return [p.intervention for p in found[:most] if p.share > _PROMISING]


def fit_factor(gap: Gap, make: Callable[[float], Intervention], paths: Sequence[Sequence[float]]) -> Intervention | None:
    """The intervention whose positive parameter fits the screened tokens; None where no first step points along the gap.

    Args:
        gap: the gap.
        make: from the parameter to the intervention.
        paths: for each direction, values ever farther from the neutral one. A path is walked as long as the gap that is
            left falls; between the last three points secant steps in log θ follow, golden sections where they fail.
    """
    firsts = probe(gap, [make(float(path[0])) for path in paths])
    if not firsts or max(p.follows for p in firsts) < _FOLLOWS:
        return None
    which = max(range(len(firsts)), key=lambda k: firsts[k].follows)
    path, known = [math.log(value) for value in paths[which]], [firsts[which]]
    while len(known) < len(path):
        known += probe(gap, [make(math.exp(path[len(known)]))])
        if known[-1].roots > known[-2].roots:
            break
    points = dict(zip(path, known, strict=False))
    best = min(points, key=lambda x: points[x].roots)
    k = path.index(best)
    low, high = (path[j] if 0 <= j < len(path) else 2 * best - path[k + (k == 0) - (k > 0)] for j in (k - 1, k + 1))
    low, high = min(low, high), max(low, high)
    for _ in range(16):
        step = _secant(gap, points, best)
        if step is None or not low < best + step < high:
            step = _GOLDEN * (high - best if high - best > best - low else low - best)
        if abs(step) < 3e-4:
            break
        (points[best + step],) = probe(gap, [make(math.exp(best + step))])
        new = min(points, key=lambda x: points[x].roots)
        if new == best:
            low, high = (low, best + step) if step > 0 else (best + step, high)
        else:
            low, high = (best, high) if step > 0 else (low, best)
            best = new
    return make(math.exp(best))


def _secant(gap: Gap, points: dict[float, Probe], best: float) -> float | None:
    """The Gauss-Newton step in log θ from the best point, the derivative by the nearest other one; None with no other."""
    others = [x for x in points if x != best]
    if not others:
        return None
    near = min(others, key=lambda x: abs(x - best))
    left = _weighted(gap, points[best].predicted)
    slope = (_weighted(gap, points[near].predicted) - left) / (near - best)
    size = float(slope @ slope)
    return -float(slope @ left) / size if size else None
