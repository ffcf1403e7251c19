"""Figures of a mismatch from its sufficient statistics: value, interval, unit, n."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log, nan, sqrt
from typing import Any

import numpy as np

from unskew.measure._psis import psis_of_tail
from unskew.measure._state import MEANS, TAUS, MismatchState

__all__ = ["Figure", "Mismatch", "compute", "share_outside"]

_Z95 = 1.959964
_QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with what it takes to read it.

    `value` is None where it is withheld or undefined, and `why` says so; `interval` is 95 %, over clusters.
    """

    value: float | None
    unit: str
    n: int
    interval: tuple[float, float] | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `why` only where it is set."""
        out: dict[str, Any] = {"value": self.value, "interval": self.interval, "unit": self.unit, "n": self.n}
        return {**out, "why": self.why} if self.why else out


@dataclass(frozen=True, slots=True)
class Mismatch:
    """All figures of one set of tokens, by name; `unskew explain NAME` says what each is."""

    figures: Mapping[str, Figure]

    def __getitem__(self, name: str) -> Figure:
        return self.figures[name]

    def to_dict(self) -> dict[str, Any]:
        """{name: {"value", "interval", "unit", "n"}}."""
        return {name: figure.to_dict() for name, figure in self.figures.items()}


def compute(state: MismatchState, *, withhold: str = "") -> Mismatch:
    """Figures of a state. `withhold`: why figures that assume sampling from μ cannot be given (rows were selected).

    Means over tokens carry a ratio-estimator interval over clusters: Σ_c (y_c − ȳ n_c)² with G/(G − 1).
    """
    n, sequences = state.n_tokens, state.n_sequences
    if not n:
        none = Figure(None, "", 0, why="no token to measure")
        return Mismatch({name: none for name in ("mean_abs", "kl_rollout_old_k1", "kl_rollout_old_k3", "mean_ratio")})
    mean = {name: _mean(state, index) for index, name in enumerate(MEANS)}
    ratio_excess = _with_big(state, mean["ratio"][0] * n, power=1) / n
    square_excess = _with_big(state, mean["ratio_square"][0] * n, power=2) / n
    k3 = mean["k3"][0] + (_big_sum(state, 1) - state.big[0] - state.big[3]) / n
    k3_reverse = mean["k3_reverse"][0] + _big_reverse(state) / n
    out: dict[str, Figure] = {
        "n_tokens": Figure(n, "tokens", n), "n_sequences": Figure(sequences, "sequences", sequences),
        "n_nan": Figure(state.n_nan, "tokens", n), "n_inf": Figure(state.n_inf, "tokens", n),
        "mean_abs": _figure(mean["abs"], "nat", n), "max_abs": Figure(state.max_abs, "nat", n),
        "mean_log_ratio": _figure(mean["d"], "nat", n),
        "kl_rollout_old_k1": _figure((-mean["d"][0], mean["d"][1]), "nat", n),
        "kl_rollout_old_k2": _figure((mean["square"][0] / 2, mean["square"][1] / 2), "nat", n),
        "kl_rollout_old_k3": _figure((k3, mean["k3"][1]), "nat", n),
        "kl_old_rollout_k1": _figure((k3_reverse + ratio_excess, mean["k3_reverse"][1]), "nat", n),
        "kl_old_rollout_k3": _figure((k3_reverse, mean["k3_reverse"][1]), "nat", n),
        "chi2_token": _figure((square_excess, mean["ratio_square"][1]), "1", n),
    }  # fmt: skip
    out |= {f"abs_quantile_{q:g}": Figure(_quantile(state, q), "nat", n) for q in _QUANTILES}
    out |= {f"share_above_{tau:g}": Figure(int(c) / n, "share of tokens", n) for tau, c in zip(TAUS, state.above, strict=True)}
    out |= _assuming_mu(state, mean, ratio_excess, k3, withhold)
    out |= _weights(state, ratio_excess, square_excess)
    out |= _sequences(state)
    out["logit_noise"] = _logit_noise(state)
    for name, index in (("advantage_skew", 12), ("advantage_weight_skew", 14)):
        for sign, k in (("positive", 0), ("negative", 1)):
            count = int(state.counts[index + k])
            if count:
                out[f"{name}_{sign}"] = _figure(mean[MEANS[index + k]], "nat" if index == 12 else "1", count)
    return Mismatch(out | _probabilities(state, mean))


def share_outside(state: MismatchState, low: float, high: float) -> Figure:
    """Share of tokens with ρ outside [low, high], from the histogram.

    The interval holds what the bins that a bound cuts through leave open (each is 1/128 of d wide), not sampling error.

    Example:
        >>> state = MismatchState.from_packed(np.zeros(4), np.log([0.5, 0.9, 1.1, 2.0]), mask=np.ones(4), cu_seqlens=[0, 4])
        >>> share_outside(state, 0.8, 1.2).value
        0.5
    """
    n = state.n_tokens
    if not n:
        return Figure(None, "share of tokens", 0, why="no token to measure")
    half = len(state.histogram) // 2
    up, down = state.histogram[:half], state.histogram[half:]
    sure = maybe = 0
    for counts, bound in ((up, log(high)), (down, -log(low) if low > 0 else inf)):
        cell = int(np.float32(min(max(bound, 0.0), 3e38)).view(np.uint32) >> np.uint32(16))
        sure, maybe = sure + int(counts[cell + 1 :].sum()), maybe + int(counts[cell])
    return Figure((sure + maybe / 2) / n if maybe else sure / n, "share of tokens", n, (sure / n, (sure + maybe) / n))


def _logit_noise(state: MismatchState) -> Figure:
    """σ̂ = √(Σd² / Σs²) with the interval of a ratio of two sums over clusters."""
    noise, scale, g = float(state.sums[10]), float(state.sums[11]), state.n_clusters
    count = int(state.counts[10])
    if not scale > 0:
        return Figure(None, "nat", count, why="noise_scale is not known")
    ratio = noise / scale
    spread = float(state.cluster_square[10] - 2 * ratio * state.cluster_more[1] + ratio**2 * state.cluster_square[11])
    if g < 2 or not ratio > 0:
        return Figure(sqrt(ratio), "nat", count)
    error = sqrt(max(spread, 0.0) * g / (g - 1)) / scale / (2 * sqrt(ratio))
    return _figure((sqrt(ratio), error), "nat", count)


def _mean(state: MismatchState, index: int) -> tuple[float, float]:
    """Mean over the tokens that have this statistic and its standard error over clusters."""
    n, g = float(state.counts[index]), state.n_clusters
    if not n:
        return nan, nan
    value = float(state.sums[index]) / n
    spread = state.cluster_square[index] - 2 * value * state.cluster_cross[index] + value**2 * state.cluster_size[index]
    return value, sqrt(max(float(spread), 0.0) * g / (g - 1)) / n if g > 1 else nan


def _figure(mean: tuple[float, float], unit: str, n: int) -> Figure:
    value, error = mean
    if not isfinite(error):
        return Figure(value, unit, n)
    return Figure(value, unit, n, (value - _Z95 * error, value + _Z95 * error))


def _big_sum(state: MismatchState, power: int) -> float:
    """Σ ρ^power over the tokens with d > 30, inf where that exceeds a float."""
    if not state.big[0]:
        return 0.0
    if power == 1:
        return _exp(state.big[1]) * state.big[2]
    tail = np.sort(state.top[state.top > 30])
    return float(sum(_exp(2 * d) for d in tail))


def _big_reverse(state: MismatchState) -> float:
    """Σ ρ d − (ρ − 1) over the tokens with d > 30."""
    return _exp(state.big[1]) * float(state.big[4] - state.big[2]) + float(state.big[0]) if state.big[0] else 0.0


def _with_big(state: MismatchState, small: float, *, power: int) -> float:
    return small + _big_sum(state, power) - (float(state.big[0]) if state.big[0] else 0.0)


def _exp(value: float) -> float:
    return exp(value) if value < 709 else inf


def _assuming_mu(
    state: MismatchState, mean: Mapping[str, tuple[float, float]], ratio_excess: float, k3: float, withhold: str
) -> dict[str, Figure]:
    """Figures that assume that tokens were drawn from what was logged."""
    n = state.n_tokens
    names = ("mean_ratio", "mean_ratio_z", "kappa", "calibration", "calibration_z")
    if withhold:
        return {name: Figure(None, "1", n, why=withhold) for name in names}
    error = mean["ratio"][1]
    ratio = _figure((1 + ratio_excess, error), "1", n)
    z = ratio_excess / error if error and isfinite(error) else nan
    kappa = -mean["d"][0] / k3 if k3 > 0 and isfinite(k3) else None
    out = {
        "mean_ratio": ratio, "mean_ratio_z": Figure(z if isfinite(z) else None, "1", n),
        "kappa": Figure(kappa, "1", n, why="" if kappa is not None else "d is 0 everywhere, or k3 is infinite"),
    }  # fmt: skip
    known = int(state.counts[9])
    if not known:
        why = "entropy is not recorded"
        return out | {"calibration": Figure(None, "nat", 0, why=why), "calibration_z": Figure(None, "1", 0, why=why)}
    square, clusters, total = float(state.cluster_square[9]), float(state.cluster_more[0]), float(state.sums[9])
    spread = (square - total**2 / clusters) * clusters / (clusters - 1) if clusters > 1 else nan
    z = total / sqrt(spread) if spread > 0 else nan
    out["calibration"] = _figure(mean["calibration"], "nat", known)
    out["calibration_z"] = Figure(z if isfinite(z) else None, "1", known)
    return out


def _weights(state: MismatchState, ratio_excess: float, square_excess: float) -> dict[str, Figure]:
    """ESS and PSIS of token ratios and of sequence products, raw."""
    n, sequences = state.n_tokens, state.n_sequences
    token = psis_of_tail(state.top, n)
    product = psis_of_tail(state.top_product, sequences)
    top, first, second, fourth = (float(x) for x in state.product)
    chi2, error = nan, nan
    if sequences:
        chi2 = _exp(2 * top) * second / sequences - 1
        spread = fourth / sequences - (second / sequences) ** 2
        error = _exp(2 * top) * sqrt(max(spread, 0.0) / (sequences - 1)) if sequences > 1 else nan
    fails = "" if product.khat < 0.5 else "k̂ ≥ 0.5 or unknown: this estimate fails"
    out = {
        "ess_token": _ess(state, ratio_excess, square_excess),
        "ess_sequence": Figure(first**2 / second / sequences, "share of sequences", sequences),
        "chi2_sequence": replace(_figure((chi2, error), "1", sequences), why=fails),
    }
    for name, tail, count in (("token", token, n), ("sequence", product, sequences)):
        why = "" if isfinite(tail.khat) else "too few weights" if np.isnan(tail.khat) else "the tail is constant"
        out[f"khat_{name}"] = Figure(None, "1", count, why=why) if why else _figure((tail.khat, tail.error), "1", count)
        out[f"khat_{name}_n_needed"] = Figure(tail.n_needed if isfinite(tail.n_needed) else None, "weights", count, why=why)
    return out


def _ess(state: MismatchState, m: float, q: float) -> Figure:
    """(1 + m)² / (1 + q) with m = mean ρ − 1, q = mean ρ² − 1, and its interval to first order."""
    n, g = state.n_tokens, state.n_clusters
    if not isfinite(q):
        return Figure(1 / n, "share of tokens", n, why="ρ² overflows: one token holds all the weight")
    if q <= -1:
        return Figure(None, "share of tokens", n, why="every ρ is 0 to rounding")
    value = (1 + m) ** 2 / (1 + q)
    a, b = 2 * (1 + m) / (1 + q), -((1 + m) ** 2) / (1 + q) ** 2
    square, cross, size = state.cluster_square, state.cluster_cross, float(state.cluster_size[4])
    mm = float(square[4] - 2 * m * cross[4]) + m * m * size
    qq = float(square[5] - 2 * q * cross[5]) + q * q * size
    mq = float(state.cluster_more[2] - m * cross[5] - q * cross[4]) + m * q * size
    spread = a * a * mm + 2 * a * b * mq + b * b * qq
    error = sqrt(max(spread, 0.0) * g / (g - 1)) / n if g > 1 and not state.big[0] else nan
    return _figure((min(value, 1.0), error), "share of tokens", n)


def _sequences(state: MismatchState) -> dict[str, Figure]:
    count = state.n_sequences
    total, square, absolute, geo, geo_square, geo_abs, ppl_rollout, ppl_old, length = (float(v) / count for v in state.sequence)
    rollout, old = (float(state.sums[k]) / state.n_tokens for k in (7, 8))
    return {
        "sequence_product_mean": Figure(total, "nat", count), "sequence_product_mean_abs": Figure(absolute, "nat", count),
        "sequence_product_sd": Figure(sqrt(max(square - total**2, 0)), "nat", count),
        "sequence_product_max_abs": Figure(float(state.sequence_max[0]), "nat", count),
        "sequence_geometric_mean": Figure(geo, "nat", count), "sequence_geometric_mean_abs": Figure(geo_abs, "nat", count),
        "sequence_geometric_sd": Figure(sqrt(max(geo_square - geo**2, 0)), "nat", count),
        "sequence_geometric_max_abs": Figure(float(state.sequence_max[1]), "nat", count),
        "perplexity_rollout": Figure(ppl_rollout, "1", count), "perplexity_old": Figure(ppl_old, "1", count),
        "log_perplexity_gap": Figure(rollout - old, "nat", state.n_tokens), "length_mean": Figure(length, "tokens", count),
    }  # fmt: skip


def _probabilities(state: MismatchState, mean: Mapping[str, tuple[float, float]]) -> dict[str, Figure]:
    """Figures in probability space; none where they were not asked for."""
    n = int(state.counts[16])
    if not n:
        return {}
    p, q, pp, qq, pq = (mean[name][0] for name in MEANS[19:24])
    spread = sqrt(max(pp - p * p, 0.0) * max(qq - q * q, 0.0))
    flat = "" if spread > 1e-14 else "one side has the same probability at every token"
    excess, error = mean["spread"]
    return {
        "js": _figure(mean["js"], "nat", n), "mean_exp_abs": _figure((1 + excess, error), "1", n),
        "probability_gap": _figure(mean["probability_gap"], "1", n),
        "probability_gap_max": Figure(state.max_probability_gap, "1", n),
        "probability_correlation": Figure(None if flat else (pq - p * q) / spread, "1", n, why=flat),
    }  # fmt: skip


def _quantile(state: MismatchState, q: float) -> float:
    """Quantile of |d| from the histogram, right within 1/128 of its value."""
    half = len(state.histogram) // 2
    counts = state.histogram[:half] + state.histogram[half:]
    cell = int(np.searchsorted(np.cumsum(counts), q * counts.sum()))
    edges = (np.array([cell, cell + 1], np.uint32) << np.uint32(16)).view(np.float32)
    return float(min(edges.mean(), state.max_abs)) if np.isfinite(edges).all() else state.max_abs
