"""Figures of a mismatch from its sufficient statistics: value, interval, unit, n."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, isfinite, nan, sqrt
from typing import Any

import numpy as np

from unskew.measure._psis import psis_of_tail
from unskew.measure._state import MEANS, TAUS, MismatchState

__all__ = ["Figure", "Mismatch", "compute"]

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
    noise = sqrt(state.sums[10] / state.sums[11]) if state.sums[11] > 0 else None
    out["logit_noise"] = Figure(noise, "nat", int(state.counts[10]), why="" if noise is not None else "noise_scale is not known")
    return Mismatch(out)


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
    tail = state.top[state.top > 30]
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
    square, clusters = (float(v) for v in state.cluster_calibration)
    total = float(state.sums[9])
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
    ess = (1 + ratio_excess) ** 2 / (1 + square_excess) if isfinite(square_excess) else 1 / n
    _, first, second = state.product
    chi2 = _exp(2 * state.product[0]) * second / sequences - 1 if sequences else nan
    out = {
        "ess_token": Figure(min(ess, 1.0), "share of tokens", n),
        "ess_sequence": Figure(float(first**2 / second / sequences), "share of sequences", sequences),
        "chi2_sequence": Figure(
            chi2, "1", sequences, why="" if product.khat < 0.5 else "k̂ ≥ 0.5 or unknown: this estimate fails"
        ),
    }
    for name, tail, unit in (("token", token, n), ("sequence", product, sequences)):
        why = "" if isfinite(tail.khat) else "too few weights" if np.isnan(tail.khat) else "the tail is constant"
        out[f"khat_{name}"] = Figure(tail.khat if isfinite(tail.khat) else None, "1", unit, why=why)
        out[f"khat_{name}_n_needed"] = Figure(tail.n_needed if isfinite(tail.n_needed) else None, "weights", unit, why=why)
    return out


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


def _quantile(state: MismatchState, q: float) -> float:
    """Quantile of |d| from the histogram, right within 1/128 of its value."""
    half = len(state.histogram) // 2
    counts = state.histogram[:half] + state.histogram[half:]
    cell = int(np.searchsorted(np.cumsum(counts), q * counts.sum()))
    edges = (np.array([cell, cell + 1], np.uint32) << np.uint32(16)).view(np.float32)
    return float(min(edges.mean(), state.max_abs)) if np.isfinite(edges).all() else state.max_abs
