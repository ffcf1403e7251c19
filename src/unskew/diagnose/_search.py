"""Counterfactual search on one side: which interventions reproduce what was recorded."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb, factorial

import numpy as np

from unskew.causes import CAUSES, Cause, Gap, Intervention, fit_pair

__all__ = ["MOST_CAUSES", "alike", "search", "shapley"]

MOST_CAUSES = 3
"""Causes composed on one side at most."""

_GAIN, _Z = 0.2, 3.0


def search(gap: Gap, at_floor: Callable[[Gap], bool], *, causes: Iterable[Cause] = CAUSES.values()) -> Gap:
    """The gap under the causes that reproduce it, at most three, each needed on held-out blocks.

    A candidate is accepted where the held-out loss falls by at least 20 % of what is left and by more than 3 standard
    errors over blocks. Among candidates that the data cannot tell apart, the one with the fewest fitted parameters
    is taken. After each acceptance all fitted parameters are fitted again, so the order of discovery does not matter.
    """
    causes = [cause for cause in causes if gap.side in cause.sides or gap.side == "record"]
    if not gap.counterfactual.has_model:
        causes = [cause for cause in causes if not cause.needs_model]
    while len(gap.accepted) < MOST_CAUSES and not at_floor(gap):
        used = {intervention.cause for intervention in gap.accepted}
        free = [cause for cause in causes if cause.id not in used]
        best = (
            _best(gap, _additions(gap, [cause for cause in free if not cause.costly]))
            or _best(gap, _joint(gap, causes, used))
            or _best(gap, _additions(gap, [cause for cause in free if cause.costly]))
        )
        if best is None:
            break
        gap = _refit(gap.under(best))
    return _prune(gap)


def _additions(gap: Gap, causes: Iterable[Cause]) -> list[tuple[Intervention, ...]]:
    """Hypotheses with one cause more than those accepted."""
    new = [intervention for cause in causes for intervention in cause.propose(gap)]
    return [both for i in new if _one_model(both := (*gap.accepted, i))]


def _joint(gap: Gap, causes: Sequence[Cause], used: set[str]) -> list[tuple[Intervention, ...]]:
    """Hypotheses that fit a new continuous parameter together with the one already accepted."""
    out = []
    for index, old in enumerate(gap.accepted):
        rest = replace(gap, accepted=tuple(i for k, i in enumerate(gap.accepted) if k != index))
        out += [
            (*rest.accepted, *fit_pair(rest, CAUSES[old.cause], cause))
            for cause in causes
            if cause.id not in used and cause.id in CAUSES[old.cause].trades_with
        ]
    return out


def _one_model(hypothesis: Sequence[Intervention]) -> bool:
    """Whether at most one of them puts other weights in the place of the clean scorer's."""
    return len({i.scorer for i in hypothesis if i.scorer}) <= 1


def _best(gap: Gap, candidates: Sequence[tuple[Intervention, ...]]) -> tuple[Intervention, ...] | None:
    if not candidates:
        return None
    fitted = np.array([sum(CAUSES[i.cause].fitted for i in candidate) for candidate in candidates])
    losses = gap.loss(gap.counterfactual.predict(candidates))
    now = gap.loss(gap.predicted)
    held = gap.keep & ~gap.fit
    share, good = np.zeros(len(candidates)), []
    for k in range(len(candidates)):
        use = held if fitted[k] else gap.keep
        before, after = _by_block(now, gap, use), _by_block(losses[k], gap, use)
        share[k] = 1.0 - after.sum() / max(float(before.sum()), 1e-300)
        if share[k] >= _GAIN and _falls(before, after):
            good.append(k)
    if not good:
        return None
    top = max(good, key=lambda k: share[k])
    roots = [np.sqrt(_by_block(loss, gap, gap.keep)) for loss in losses]
    equal = [k for k in good if share[top] - share[k] < 0.01 or _z(roots[k] - roots[top]) < 1]
    return candidates[min(equal, key=lambda k: (fitted[k], -share[k]))]


def _falls(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the loss of a block falls by more than its blocked error.

    Roots are compared, since a few blocks may hold most of the squares: z over blocks above 3, or, where the
    loss at least halves, a sign test over the blocks that change at all at 0.5 %.
    """
    gain = np.sqrt(before) - np.sqrt(after)
    if _z(gain) > _Z:
        return True
    changed = gain[np.abs(gain) > 1e-9 * np.sqrt(before.max(initial=0.0))]
    up, n = int((changed > 0).sum()), len(changed)
    tail = sum(comb(n, k) for k in range(up, n + 1)) / 2.0**n if n else 1.0
    return tail < 0.005 and after.sum() < 0.5 * before.sum()


def _refit(gap: Gap, *, least: int = 2) -> Gap:
    """All fitted parameters fitted again, one after the other, twice or until they stay."""
    if len(gap.accepted) < least:
        return gap
    for _ in range(2):
        before = gap.accepted
        for index, old in enumerate(gap.accepted):
            if not CAUSES[old.cause].fitted:
                continue
            rest = gap.under([i for k, i in enumerate(gap.accepted) if k != index])
            options = [old, *CAUSES[old.cause].propose(rest)]
            losses = gap.loss(gap.counterfactual.predict([(*rest.accepted, option) for option in options]))
            chosen = options[int(np.argmin(losses[:, gap.fit].sum(axis=1)))]
            gap = gap.under([chosen if k == index else i for k, i in enumerate(gap.accepted)])
        if all(alike(a, b, tolerance=1e-4) for a, b in zip(before, gap.accepted, strict=True)):
            break
    return gap


def alike(a: Intervention, b: Intervention, *, tolerance: float = 0.02) -> bool:
    """Whether two interventions of one cause have the same parameters, numbers within `tolerance`."""
    return all(
        a.parameters[name] == value or (isinstance(value, float) and abs(float(a.parameters[name]) - value) < tolerance)
        for name, value in b.parameters.items()
    )


def _prune(gap: Gap) -> Gap:
    """Without the causes that the others, fitted again, explain within 20 %."""
    held = gap.keep & ~gap.fit
    for intervention in gap.accepted:
        rest = _refit(gap.under([i for i in gap.accepted if i is not intervention]), least=1)
        if (1 - _GAIN) * gap.loss(rest.predicted)[held].sum() < gap.loss(gap.predicted)[held].sum():
            gap = rest
    return gap


def shapley(values: dict[frozenset[int], np.ndarray], n: int) -> np.ndarray:
    """Shapley share of each of n players from the value of every coalition; values may be arrays (...,).

    Example:
        >>> value = {frozenset(): 0.0, frozenset({0}): 0.5, frozenset({1}): 0.1, frozenset({0, 1}): 1.0}
        >>> shapley({k: np.asarray(v) for k, v in value.items()}, 2).round(2).tolist()
        [0.7, 0.3]

    Reference: Shapley (1953).
    """
    shares = []
    for player in range(n):
        others = [k for k in range(n) if k != player]
        share = np.zeros_like(values[frozenset()], dtype=np.float64)
        for size in range(n):
            weight = factorial(size) * factorial(n - size - 1) / factorial(n)
            for coalition in combinations(others, size):
                share = share + weight * (values[frozenset({*coalition, player})] - values[frozenset(coalition)])
        shares.append(share)
    return np.stack(shares)


def _by_block(loss: np.ndarray, gap: Gap, use: np.ndarray) -> np.ndarray:
    return np.bincount(gap.block, np.where(use, loss, 0.0))[np.bincount(gap.block, use) > 0]


def _z(values: np.ndarray) -> float:
    if len(values) < 2:
        return float("inf") if values.sum() > 0 else 0.0
    spread = float(values.std(ddof=1) * np.sqrt(len(values)))
    return float(values.sum() / spread) if spread else (float("inf") if values.sum() > 0 else 0.0)
