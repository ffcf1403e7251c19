"""The plots of a report, from a trace with both log-prob streams."""

from math import ceil, floor, log10

import numpy as np

from unskew.report._svg import Axis, Plot
from unskew.trace import Trace

__all__ = ["plots"]

_LINEAR = 1e-5
_POINTS = 400


def plots(trace: Trace, floor_noise: float | None) -> list[tuple[str, str, str]]:
    """(heading, caption, svg) of each plot; empty without `old_logp`.

    Args:
        trace: usable rows with `rollout_logp` and `old_logp`.
        floor_noise: σ̂ of the noise floor, nats of logit noise, or None where it is not known.
    """
    if not trace.has("old_logp"):
        return []
    rollout, old = (trace.tokens(name).astype(np.float64) for name in ("rollout_logp", "old_logp"))
    keep = trace.mask & np.isfinite(rollout) & np.isfinite(old)
    if not keep.any():
        return []
    d = np.where(keep, old - rollout, 0.0)
    return [
        ("Distribution of the log-ratio", _distribution_words(d[keep]), _distribution(d[keep])),
        (
            "Against position in the response",
            "Mean |d| by position, with the 10–90 % range.",
            _by_position(d, keep, trace.position),
        ),
        ("Against the rollout's probability", _probability_words(floor_noise), _by_probability(d, keep, rollout, floor_noise)),
        ("By sequence", "One dot a sequence: Σ d against its length. e^Σd is the sequence weight.", _by_sequence(d, keep, trace)),
    ]


def _signed_log(d: np.ndarray) -> np.ndarray:
    return np.sign(d) * np.maximum(np.log10(np.maximum(np.abs(d), _LINEAR) / _LINEAR), 0.0)


def _distribution(d: np.ndarray) -> str:
    top = max(ceil(log10(max(np.abs(d).max(), 1e-3) / _LINEAR)), 1)
    edges = np.linspace(-top, top, 81)
    counts, _ = np.histogram(np.clip(_signed_log(d), -top, top), edges)
    heights = np.where(counts > 0, np.log10(np.maximum(counts, 1)) + 0.15, 0.0)
    peak = max(ceil(heights.max()), 1)
    tail = np.log10(np.log(1.1) / _LINEAR)
    marks = [(0.0, "0")]
    for k in range(1, top + 1):
        label = f"{10.0**k * _LINEAR:g}"
        marks += [(float(k), label), (-float(k), f"−{label}")] if k % 2 == top % 2 else []
    plot = Plot(
        "Histogram of the log-ratio d, both axes logarithmic", Axis("log-ratio d = old − rollout (nat)", -top, top, tuple(marks)),
        Axis("tokens", 0.0, float(peak), tuple((k + 0.15 if k else 0.15, f"{10**k:,}") for k in range(peak))),
    )  # fmt: skip
    middle = (edges[:-1] + edges[1:]) / 2
    plot.bars(edges.tolist(), heights.tolist(), ["tail" if abs(m) > tail else "bar" for m in middle])
    return plot.svg()


def _distribution_words(d: np.ndarray) -> str:
    far = float((np.abs(d) > np.log(1.1)).mean())
    return f"Tail (ratio beyond 1.1 or below 1/1.1) in the second colour: {far:.2%} of {len(d):,} tokens. Left: the rollout likes them more."


def _by_position(d: np.ndarray, keep: np.ndarray, position: np.ndarray) -> str:
    last = int(position[keep].max()) + 1
    width = max(1, ceil(last / 60))
    label, size = position[keep] // width, np.abs(d[keep])
    order = np.argsort(label, kind="stable")
    groups = np.split(size[order], np.flatnonzero(np.diff(label[order])) + 1)
    xs = [(float(k) + 0.5) * width for k in np.unique(label)]
    low, high, mean = (
        [float(f(g)) for g in groups] for f in (lambda g: np.quantile(g, 0.1), lambda g: np.quantile(g, 0.9), np.mean)
    )
    plot = Plot(
        "Mean absolute log-ratio by position",
        Axis("position in the response (token)", 0, last),
        Axis("|d| (nat)", 0, max(*high, *mean, 1e-9) * 1.05),
    )
    plot.band(xs, low, high)
    plot.line(xs, mean)
    return plot.svg()


def _by_probability(d: np.ndarray, keep: np.ndarray, rollout: np.ndarray, floor_noise: float | None) -> str:
    logp, size = np.maximum(rollout[keep], -14.0) / np.log(10), np.abs(d[keep])
    edges = np.linspace(min(float(logp.min()), -0.5), 0.0, 25)
    cell = np.clip(np.digitize(logp, edges) - 1, 0, 23)
    used = np.flatnonzero(np.bincount(cell, minlength=24) >= 3)
    xs = ((edges[:-1] + edges[1:]) / 2)[used]
    mean = [float(size[cell == k].mean()) for k in used]
    expected = floor_noise * np.sqrt(2 / np.pi) * (1 - 10**xs) * 1.1 if floor_noise else np.zeros(len(xs))
    top = max([*mean, *expected.tolist(), 1e-9]) * 1.05
    first = floor(edges[0])
    marks = tuple((float(k), f"1e{k}" if k < -2 else f"{10.0**k:g}") for k in range(first, 1))
    plot = Plot(
        "Mean absolute log-ratio by probability of the token",
        Axis("rollout probability of the token", float(edges[0]), 0.0, marks),
        Axis("mean |d| (nat)", 0, top),
    )
    if floor_noise and len(xs):
        plot.band(xs.tolist(), [0.0] * len(xs), expected.tolist(), "floor")
    plot.line(xs.tolist(), mean)
    plot.points(xs.tolist(), mean)
    return plot.svg()


def _probability_words(floor_noise: float | None) -> str:
    words = "Mean |d| of tokens by how likely the rollout found them; rounding noise grows as 1 − p."
    return words + (" Shaded: expected at the noise floor." if floor_noise else "")


def _by_sequence(d: np.ndarray, keep: np.ndarray, trace: Trace) -> str:
    sums = np.bincount(trace.row_of_token, np.where(keep, d, 0.0), len(trace))
    rows = np.unique(np.linspace(0, len(trace) - 1, min(len(trace), _POINTS)).astype(int))
    lengths, ids = trace.lengths, trace.rows("id")
    reach = max(float(np.abs(sums[rows]).max()), 1e-9) * 1.1
    plot = Plot(
        "Sum of log-ratios by sequence length",
        Axis("length (tokens)", 0, float(lengths[rows].max()) * 1.02),
        Axis("Σ d (nat)", -reach, reach),
    )
    plot.points(
        lengths[rows].tolist(),
        sums[rows].tolist(),
        [f"{ids[r] or f'row {r}'}: Σd {sums[r]:+.3g} nat over {lengths[r]} tokens" for r in rows],
    )
    return plot.svg()
