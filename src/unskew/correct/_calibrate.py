"""Thresholds from the user's own clean run, by length."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from unskew._errors import UnskewError
from unskew.correct._batch import Batch
from unskew.correct._correction import Correction, Term
from unskew.correct._weights import Weights

__all__ = ["Bin", "Calibrated", "calibrate"]

_MOST_BINS = 6


@dataclass(frozen=True, slots=True)
class Bin:
    """Bounds for sequences of some lengths.

    Args:
        shortest, longest: tokens in the loss, both included; `longest` is None in the last bin.
        n: clean sequences behind it.
        correction: with the calibrated bounds.
        false_reject: share of the clean tokens (or sequences) of one half of the bin that bounds from the other half reject.
    """

    shortest: int
    longest: int | None
    n: int
    correction: Correction
    false_reject: float


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A correction whose bounds depend on the length of the sequence.

    Args:
        written: the correction whose bounds were replaced.
        bins: in order of length, without gaps.
    """

    written: Correction
    bins: tuple[Bin, ...]

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the bin with the longest sequences."""
        return self.bins[-1].correction.terms

    @property
    def weighting(self) -> Term | None:
        """Term of the bin with the longest sequences that is an importance weight."""
        return self.bins[-1].correction.weighting

    def __str__(self) -> str:
        return f"{self.written} calibrated on {sum(b.n for b in self.bins)} clean sequences"

    def apply(self, batch: Batch) -> Weights:
        """Weights of a batch, each sequence under the bounds of its length."""
        layout, xp = batch.layout, batch.layout.xp
        length = xp.sum(xp.astype(batch.mask, xp.int64), axis=1, keepdims=True)
        whole = [layout.padded(x) for x in _fields(self.bins[0].correction.apply(batch))]
        for part in self.bins[1:]:
            here = xp.broadcast_to(length >= part.shortest, layout.shape)
            new = [layout.padded(x) for x in _fields(part.correction.apply(batch))]
            whole = [xp.where(here, b, a) for a, b in zip(whole, new, strict=True)]
        return Weights(*(layout.restore(x) for x in whole))


def calibrate(correction: Correction, clean: Batch, *, false_reject: float) -> Calibrated:
    """Replace every bound of a correction by the quantile of its statistic on a clean run.

    A clean run is one with nothing to correct: its share outside the bounds is a false rejection. Statistics of whole
    sequences are calibrated in up to 6 bins of length, since the spread of a mean falls, and that of a sum grows, with
    √length; each bin has at least max(100, 2 / false_reject) sequences.

    Args:
        correction: its terms with bounds are calibrated, in the form they are written: one bound or two.
        clean: a batch of the clean run.
        false_reject: share of tokens (or sequences) of a clean run that each term may reject.

    Raises:
        UnskewError: nothing in it has a bound, too few clean sequences, or a share that is not between 0 and 1.
    """
    if not 0 < false_reject < 1:
        raise UnskewError(f"a false-reject share of {false_reject:g}", hint="give one between 0 and 1, such as 0.01", exit_code=2)
    bounded = [term for term in correction.terms if term.method.unit and term.args]
    if not bounded:
        raise UnskewError(f"{correction} has no bound to calibrate", hint="name one with a bound, such as geo-mask", exit_code=2)
    mask = np.asarray(_numpy(clean.mask))
    lengths = mask.sum(axis=1)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    least = int(max(100, np.ceil(2 / false_reject)))
    if len(order) < 2:
        raise UnskewError("the clean run has fewer than 2 sequences", hint="record more of it")
    parts = np.array_split(order, int(np.clip(len(order) // least, 1, _MOST_BINS)))
    starts = [0, *dict.fromkeys(int(lengths[part[0]]) for part in parts[1:])]
    bins = []
    for k, shortest in enumerate(starts):
        longest = starts[k + 1] - 1 if k + 1 < len(starts) else None
        rows = np.flatnonzero((lengths > 0) & (lengths >= shortest) & (lengths <= (np.inf if longest is None else longest)))
        if not len(rows):
            continue
        terms, held = [], []
        for term in correction.terms:
            if term not in bounded:
                terms.append(term)
                continue
            values = np.broadcast_to(np.asarray(_numpy(term.statistic(clean)[0])), mask.shape)
            terms.append(_with_bounds(term, _values(term, values, mask, rows), false_reject))
            held.append(np.mean([
                _outside(_with_bounds(term, _values(term, values, mask, rows[k::2]), false_reject), _values(term, values, mask, rows[1 - k :: 2]))
                for k in (0, 1)
            ]))  # fmt: skip
        bins.append(Bin(shortest, longest, len(rows), Correction(tuple(terms)), float(max(held))))
    return Calibrated(correction, tuple(bins))


def _values(term: Term, values: np.ndarray, mask: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The statistic once a token, or once a sequence where it is one of the whole."""
    if term.method.level in ("seq", "geo"):
        return values[rows, mask[rows].argmax(axis=1)]
    return values[rows][mask[rows]]


def _outside(term: Term, values: np.ndarray) -> float:
    """Share of the values outside the term's bounds."""
    low, high = term.method.bounds(None, *term.args)
    return float(((values < low) | (values > high)).mean()) if len(values) else float("nan")


def _with_bounds(term: Term, values: np.ndarray, false_reject: float) -> Term:
    """The term with bounds that leave this share of the values outside, half on each side where it has two."""
    values = np.sort(values[np.isfinite(values)])
    low, high = term.method.bounds(None, *term.args)
    two = np.isfinite(low) and np.isfinite(high)
    outside = int(np.floor(false_reject / (2 if two else 1) * (len(values) + 1)))
    below, above = values[min(outside, len(values) - 1)], values[max(len(values) - 1 - outside, 0)]
    below, above = (_short(np.exp(x) if term.method.unit == "ratio" else x) for x in (below, above))
    if len(term.args) == 2:
        return Term(term.name, (below, above))
    if two:
        return Term(term.name, (max(abs(below), abs(above)),))
    return Term(term.name, (above if np.isfinite(high) else below,))


def _short(value: float) -> float:
    """Six digits: what a person copies into a configuration."""
    return float(f"{value:.6g}")


def _fields(weights: Weights) -> tuple[Any, ...]:
    return weights.weight, weights.keep, weights.non_finite


def _numpy(values: Any) -> Any:
    return values.cpu() if hasattr(values, "cpu") else values
