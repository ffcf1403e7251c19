"""The plots of a report: each says in words what it shows, what the floor would give, and of how many tokens."""

from dataclasses import dataclass
from math import ceil, erf, floor, log, log10, sqrt

import numpy as np

from unskew.report._floor import NoiseFloor
from unskew.report._svg import Axis, Plot, log_marks, power
from unskew.report._words import number, percent, short
from unskew.trace import Trace

__all__ = ["Picture", "plots"]

_DECADES, _CELLS = 6, 8
_MAX_DOTS = 600
_TAILS = (1.1, 2.0, 10.0)


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot with its heading, its caption, its SVG and the (CSS class, label) pairs of its legend."""

    heading: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class _Gap:
    """Tokens that are drawn: log-ratio, rollout log-prob, position, row, expected |d| at the floor; all (n,)."""

    d: np.ndarray
    rollout: np.ndarray
    position: np.ndarray
    row: np.ndarray
    floor: np.ndarray | None


def plots(trace: Trace, at_floor: NoiseFloor | None) -> tuple[Picture, ...]:
    """The four plots; none without `old_logp` or without a token of the loss that has both log-probs.

    Args:
        trace: usable rows with `rollout_logp` and `old_logp`.
        at_floor: the floor on these tokens, or None where it is not known.
    """
    if not trace.has("old_logp"):
        return ()
    rollout, old = (trace.tokens(name).astype(np.float64) for name in ("rollout_logp", "old_logp"))
    keep = trace.mask & np.isfinite(rollout) & np.isfinite(old)
    if not keep.any():
        return ()
    gap = _Gap(
        (old - rollout)[keep], rollout[keep], trace.position[keep], trace.row_of_token[keep],
        None if at_floor is None else at_floor.mean_abs[keep],
    )  # fmt: skip
    lost = int(trace.mask.sum() - keep.sum())
    return (_distribution(gap, lost), _by_position(gap), _by_probability(gap), _by_sequence(gap, trace.rows("id")))


def _distribution(gap: _Gap, lost: int) -> Picture:
    size = np.abs(gap.d)
    top = max(ceil(2 * log10(max(size.max(), 1e-12)) + 0.2) / 2, -8.0)
    positive = size[size > 0]
    bottom = floor(max(top - _DECADES, min(log10(np.quantile(positive, 0.02)), top - 2))) if len(positive) else floor(top) - 2
    span = top - bottom
    half = 0.25
    outer = half + np.linspace(0, span, round(span * _CELLS) + 1)
    edges = np.concatenate([-outer[::-1], outer])
    with np.errstate(divide="ignore"):
        reach = half + np.clip(np.log10(size) - bottom, -half, span)
    counts, _ = np.histogram(np.where(size >= 10.0**bottom, np.sign(gap.d) * reach, 0.0), edges)
    peak = max(ceil(log10(max(counts.max(), 10))), 1)
    marks: list[tuple[float, str]] = [(0.0, "0")]
    for value, label in log_marks(bottom + 1, floor(top), at_most=3):
        marks += [(half + value - bottom, label), (-(half + value - bottom), f"−{label}")]
    plot = Plot(
        "Histogram of the log-ratio d of each token, logarithmic on both axes",
        Axis("log-ratio d = old − rollout (nat)", float(edges[0]), float(edges[-1]), tuple(marks)),
        Axis("tokens", log10(0.6), peak + 0.05, tuple((float(k), power(k)) for k in range(peak + 1))),
    )
    middle = (edges[:-1] + edges[1:]) / 2
    tail = half + log10(log(_TAILS[0])) - bottom
    with np.errstate(divide="ignore"):
        heights = np.log10(counts).tolist()
    plot.bars(edges.tolist(), heights, ["tail" if abs(m) > tail else "bar" for m in middle])
    if gap.floor is not None:
        plot.line(middle.tolist(), _expected_counts(gap.floor, outer, bottom, half), "line floorline", "expected at the floor")
    if tail < 0.97 * edges[-1]:
        plot.upright(tail, "ratio 1.1")
        plot.upright(-tail, "ratio 1/1.1")
    shares = ", ".join(f"{percent(float((size > log(t)).mean()))} beyond {t:g}" for t in _TAILS)
    words = (f"{len(size):,} tokens; right of 0 the trainer likes them more. Ratio either way: {shares}. "
             f"The bar at 0 holds |d| below {power(bottom)} nat.")  # fmt: skip
    return Picture(
        "Distribution of the log-ratio",
        words + (f" {lost:,} tokens without a finite d are not drawn." if lost else ""),
        plot.svg(),
        tuple(plot.legend),
    )


def _expected_counts(floor_abs: np.ndarray, outer: np.ndarray, bottom: int, half: float) -> list[float]:
    """log10 of the tokens that each bar would hold if d were Gaussian with the floor's mean |d|."""
    sigma = np.maximum(floor_abs * sqrt(np.pi / 2), 1e-12)
    cells, index = np.unique(np.round(np.log10(sigma) * 10).astype(int), return_inverse=True)
    many = np.bincount(index)
    bounds = 10.0 ** (outer - half + bottom)
    below = np.array([[erf(b / 10 ** (c / 10) / sqrt(2)) for b in bounds] for c in cells])
    side = (many[:, None] * np.diff(below, axis=1)).sum(axis=0) / 2
    counts = np.concatenate([side[::-1], [(many * below[:, 0]).sum()], side])
    return [log10(c) if c > 0.6 else float("nan") for c in counts]


def _by_position(gap: _Gap) -> Picture:
    last = int(gap.position.max()) + 1
    width = next(w for k in range(12) for w in (10**k, 2 * 10**k, 5 * 10**k) if last / w <= 50)
    label, size = gap.position // width, np.abs(gap.d)
    order = np.argsort(label, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(label[order])) + 1)
    groups = [g for g in groups if len(g) >= 3] or groups
    xs = [(int(label[g[0]]) + 0.5) * width for g in groups]
    mean, low, high = (
        [float(f(size[g])) for g in groups] for f in (np.mean, lambda v: np.quantile(v, 0.1), lambda v: np.quantile(v, 0.9))
    )
    noise = [] if gap.floor is None else [float(gap.floor[g].mean()) for g in groups]
    plot = Plot(
        "Mean absolute log-ratio by position in the response", Axis("position in the response (token)", 0, last),
        Axis("|d| (nat)", 0, max(*high, *mean, *noise, 1e-12) * 1.05),
    )  # fmt: skip
    plot.band(xs, low, high, "band", "10–90 % of tokens")
    if noise:
        plot.band(xs, [0.0] * len(xs), noise, "floor", "mean at the floor")
    plot.line(xs, mean, "line", "mean")
    if len(xs) < 3:
        plot.points(xs, mean)
    words = f"Bins of {width} token{'s' * (width > 1)}, those with fewer than three left out. A step at one place points at a length, cache or chunk boundary."
    return Picture("Against position in the response", words, plot.svg(), tuple(plot.legend))


def _by_probability(gap: _Gap) -> Picture:
    logp = np.minimum(gap.rollout, -1e-7)
    odds = np.clip((logp - np.log(-np.expm1(logp))) / log(10), -5, 5)
    size = np.abs(gap.d)
    edges = np.linspace(-5, 5, 41)
    cell = np.clip(np.digitize(odds, edges) - 1, 0, 39)
    used = [k for k in np.unique(cell).tolist() if (cell == k).sum() >= 3] or np.unique(cell).tolist()
    xs = [float(edges[k] + edges[k + 1]) / 2 for k in used]
    mean = np.array([size[cell == k].mean() for k in used])
    noise = np.array([] if gap.floor is None else [gap.floor[cell == k].mean() for k in used])
    every = np.concatenate([mean, noise])
    top = ceil(log10(every.max())) if every.max() > 0 else 0
    bottom = max(floor(log10(every[every > 0].min())), top - 8) if every.max() > 0 else -2
    with np.errstate(divide="ignore"):
        shown, shaded = (np.maximum(np.log10(v), bottom) for v in (mean, noise))
    shown = np.where(mean > 0, shown, np.nan)
    x = Axis("rollout probability of the token (logit scale)", max(min(xs) - 0.3, -5), min(max(xs) + 0.3, 5), tuple(
        (o, text) for o, text in ((-4, "10⁻⁴"), (-3, "0.001"), (-2, "0.01"), (-0.9542, "0.1"), (0, "0.5"), (0.9542, "0.9"), (2, "0.99"),
                                  (3, "0.999"), (4, "0.9999")) if min(xs) - 0.3 <= o <= max(xs) + 0.3))  # fmt: skip
    plot = Plot(
        "Mean absolute log-ratio by the rollout's probability of the token",
        x,
        Axis("mean |d| (nat)", bottom, max(top, bottom + 1), log_marks(bottom, max(top, bottom + 1))),
    )
    if gap.floor is not None:
        plot.band(xs, [float(bottom)] * len(xs), shaded.tolist(), "floor", "mean at the floor")
    plot.line(xs, shown.tolist(), "line", "mean")
    plot.points(xs, shown.tolist())
    words = "Rounding noise falls as 1 − p, as the floor does, down to the precision of the stored log-probs."
    return Picture("Against the rollout's probability", words, plot.svg(), tuple(plot.legend))


def _by_sequence(gap: _Gap, ids: list[str | None]) -> Picture:
    present, index = np.unique(gap.row, return_inverse=True)
    sums, lengths = np.bincount(index, gap.d), np.bincount(index)
    shown = np.unique(np.linspace(0, len(present) - 1, min(len(present), _MAX_DOTS)).astype(int))
    last = float(lengths.max()) * 1.04
    spread = 0.0 if gap.floor is None else 2 * sqrt(float((gap.floor**2).mean()) * np.pi / 2)
    reach = max(float(np.abs(sums[shown]).max()) * 1.1, spread * sqrt(last), 1e-12)
    plot = Plot(
        "Sum of the log-ratios of each sequence by its length",
        Axis("tokens of the loss in the sequence", 0, last),
        Axis("Σ d (nat)", -reach, reach),
    )
    if spread:
        xs = [last * k / 40 for k in range(41)]
        plot.band(xs, [-spread * sqrt(x) for x in xs], [spread * sqrt(x) for x in xs], "floor", "95 % at the floor")
    plot.line([0, last], [0, 0], "axis")
    plot.points(lengths[shown].tolist(), sums[shown].tolist(), [
        f"{short(ids[present[k]] or f'row {present[k]}', 40)}: Σd {number(float(sums[k]), 3)} nat over {lengths[k]} tokens" for k in shown
    ])  # fmt: skip
    some = "" if len(shown) == len(present) else f" {len(shown):,} of {len(present):,} sequences, evenly spaced."
    words = f"One dot a sequence; e^Σd is the weight that a sequence-level correction would give it.{some}"
    return Picture("By sequence", words, plot.svg(), tuple(plot.legend))
