"""Counterfactual search on one side: which interventions reproduce what was recorded."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, factorial

import numpy as np

from unskew.causes import CAUSES, Cause, Gap, Intervention, fit_pair, probe

__all__ = ["MOST_CAUSES", "alike", "search", "shapley"]

MOST_CAUSES = 3
"""Causes composed on one side at most."""

_GAIN, _Z = 0.2, 3.0
_BODIES = 3

Hypothesis = tuple[Intervention, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A hypothesis, the parameters it fits, its loss on each token (N,), and whether it reaches the floor."""

    hypothesis: Hypothesis
    fitted: int
    loss: np.ndarray
    at_floor: bool


def search(
    gap: Gap, at_floor: Callable[[Gap], bool], *, causes: Iterable[Cause] = CAUSES.values()
) -> tuple[Gap, Mapping[str, tuple[str, ...]]]:
    """The gap under the causes that reproduce it, at most three, each needed on held-out blocks; and each one's rivals.

    A candidate is accepted where the held-out loss falls by at least 20 % of what is left and by more than 3 standard
    errors over blocks. The two best hypotheses of each size are grown; causes that spend forward passes of their own
    are asked where the others leave a gap. Among candidates that the data cannot tell apart the one with the fewest
    fitted parameters is taken, and the causes of the others are its rivals. All fitted parameters are fitted again
    after each step, so the order of discovery does not matter.
    """
    causes = [cause for cause in causes if gap.side in cause.sides or gap.side == "record"]
    if not gap.counterfactual.has_model:
        causes = [cause for cause in causes if not cause.needs_model]
    best, rivals = gap, dict[str, tuple[str, ...]]()
    frontier = [] if at_floor(gap) else [gap]
    while frontier and len(best.accepted) < MOST_CAUSES:
        grown = [c for g in frontier for c in _better(g, _grown(g, causes, costly=False), at_floor)]
        if not any(candidate.at_floor for candidate in grown):
            grown += [c for g in frontier for c in _better(g, [*_joint(g, causes), *_grown(g, causes, costly=True)], at_floor)]
        if not grown:
            break
        chosen, equal = _chosen(gap, grown)
        step = _refit(gap.under(chosen.hypothesis))
        if not _needed(best, step):
            break
        new = chosen.hypothesis[-1].cause
        rivals[new] = tuple(sorted({c.hypothesis[-1].cause for c in equal} - {i.cause for i in chosen.hypothesis}))
        best = step
        others = [c for c in grown if _ids(c) != _ids(chosen)]
        frontier = [step] if others == [] else [step, gap.under(min(others, key=lambda c: _held(gap, c.loss)).hypothesis)]
        if at_floor(best):
            break
    best = _prune(best)
    return best, {i.cause: rivals.get(i.cause, ()) for i in best.accepted}


def _grown(gap: Gap, causes: Iterable[Cause], *, costly: bool) -> list[Hypothesis]:
    """Hypotheses with one cause more; those that need another body are first asked on the screened tokens, the best few kept."""
    new = [i for i in _proposed(gap, causes, costly=costly) if _one_model((*gap.accepted, i))]
    bodies = probe(gap, [i for i in new if i.needs_body])
    best = sorted((p for p in bodies if p.share > _GAIN / 2), key=lambda p: -p.share)[:_BODIES]
    kept = [i for i in new if not i.needs_body] + [p.intervention for p in best if p.share > 0.5 * best[0].share]
    return [(*gap.accepted, i) for i in kept]


def _proposed(gap: Gap, causes: Iterable[Cause], *, costly: bool) -> list[Intervention]:
    used = {intervention.cause for intervention in gap.accepted}
    return [i for cause in causes if cause.costly == costly and cause.id not in used for i in cause.propose(gap)]


def _joint(gap: Gap, causes: Sequence[Cause]) -> list[Hypothesis]:
    """Hypotheses that fit a new continuous parameter together with the one already accepted."""
    out, used = [], {intervention.cause for intervention in gap.accepted}
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


def _better(gap: Gap, hypotheses: Sequence[Hypothesis], at_floor: Callable[[Gap], bool]) -> list[_Candidate]:
    """The hypotheses that are needed beside what is accepted."""
    out = []
    for hypothesis, predicted in zip(hypotheses, gap.counterfactual.predict(hypotheses) if hypotheses else (), strict=True):
        new = replace(gap, accepted=hypothesis, predicted=predicted)
        if _needed(gap, new):
            fitted = sum(CAUSES[i.cause].fitted for i in hypothesis)
            out.append(_Candidate(hypothesis, fitted, gap.loss(predicted), at_floor(new)))
    return out


def _needed(old: Gap, new: Gap) -> bool:
    """Whether the loss falls enough; on held-out blocks where the new hypothesis has fitted parameters."""
    fitted = any(CAUSES[i.cause].fitted for i in new.accepted if i not in old.accepted)
    use = old.keep & ~old.fit if fitted else old.keep
    before, after = (_by_block(gap.loss(gap.predicted), old, use) for gap in (old, new))
    return after.sum() <= (1 - _GAIN) * before.sum() and _falls(before, after)


def _chosen(gap: Gap, candidates: Sequence[_Candidate]) -> tuple[_Candidate, list[_Candidate]]:
    """The best candidate, the one with the fewest fitted parameters among its equals; and those."""
    top = min(candidates, key=lambda c: _held(gap, c.loss))
    before, least = _held(gap, gap.loss(gap.predicted)), _held(gap, top.loss)
    root = np.sqrt(_by_block(top.loss, gap, gap.keep))

    def same(candidate: _Candidate) -> bool:
        close = candidate.at_floor == top.at_floor and _held(gap, candidate.loss) - least < 0.01 * before
        return close or _z(np.sqrt(_by_block(candidate.loss, gap, gap.keep)) - root) < 1

    equal = [candidate for candidate in candidates if same(candidate)]
    return min(equal, key=lambda c: (len(c.hypothesis), c.fitted, _held(gap, c.loss))), equal


def _held(gap: Gap, loss: np.ndarray) -> float:
    return float(loss[gap.keep & ~gap.fit].sum())


def _ids(candidate: _Candidate) -> set[str]:
    return {i.cause for i in candidate.hypothesis}


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
