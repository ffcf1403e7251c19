"""Figures beyond the moments: by hand, and intervals against a bootstrap over sequences."""

import numpy as np
import pytest

from unskew.measure import MismatchState, compute, measure, share_outside
from unskew.trace import Trace


def batch(seed: int, sequences: int = 300):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 60, sequences)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    scale = rng.uniform(0.1, 1, cu[-1])
    # Noise of a sequence of its own size: tokens of one sequence are not independent.
    d = rng.normal(0, 0.1, cu[-1]) * scale * np.repeat(rng.uniform(0.5, 2, sequences), lengths)
    return d, scale, cu


def state_of(d, cu, **more):
    rollout = np.full(len(d), -3.0)
    return MismatchState.from_packed(rollout, rollout + d, mask=np.ones(len(d)), cu_seqlens=cu, **more)


@pytest.mark.parametrize("name", ["logit_noise", "ess_token", "kl_rollout_old_k3", "mean_ratio"])
def test_interval_is_as_wide_as_a_bootstrap_over_sequences(name):
    d, scale, cu = batch(0)
    low, high = compute(state_of(d, cu, noise_scale=scale))[name].interval
    rng, values = np.random.default_rng(1), []
    rows = [slice(a, b) for a, b in zip(cu[:-1], cu[1:], strict=True)]
    for _ in range(300):
        pick = rng.integers(0, len(rows), len(rows))
        x, s = np.concatenate([d[rows[k]] for k in pick]), np.concatenate([scale[rows[k]] for k in pick])
        r = np.exp(x)
        values.append({
            "logit_noise": np.sqrt((x**2).sum() / (s**2).sum()), "ess_token": r.sum() ** 2 / (r**2).sum() / len(r),
            "kl_rollout_old_k3": (np.expm1(x) - x).mean(), "mean_ratio": r.mean(),
        }[name])  # fmt: skip
    assert (high - low) / 2 / 1.96 == pytest.approx(np.std(values), rel=0.15)


def test_interval_of_sequence_chi2_is_that_of_a_mean():
    d, _, cu = batch(3)
    figure = compute(state_of(d / 10, cu))["chi2_sequence"]
    w2 = np.exp(2 * np.add.reduceat(d / 10, cu[:-1]))
    assert figure.value == pytest.approx(w2.mean() - 1)
    assert (figure.interval[1] - figure.interval[0]) / 2 == pytest.approx(1.96 * w2.std(ddof=1) / np.sqrt(len(w2)), rel=1e-3)


def test_intervals_merge():
    d, scale, cu = batch(5)
    half = 150
    parts = [
        state_of(d[cu[a] : cu[b]], cu[a : b + 1] - cu[a], noise_scale=scale[cu[a] : cu[b]], advantage=scale[cu[a] : cu[b]] - 0.5)
        for a, b in ((0, half), (half, 300))
    ]
    whole = compute(state_of(d, cu, noise_scale=scale, advantage=scale - 0.5))
    merged = compute(parts[0].merge(parts[1]))
    for name in ("logit_noise", "ess_token", "chi2_sequence", "advantage_skew_positive", "advantage_weight_skew_negative"):
        assert merged[name].value == pytest.approx(whole[name].value, rel=1e-12)
        assert merged[name].interval == pytest.approx(whole[name].interval, rel=1e-9)


def test_skew_by_the_sign_of_the_advantage():
    d = np.array([0.1, -0.2, 0.3, 0.4])
    m = compute(state_of(d, [0, 2, 4], advantage=np.array([2.0, -1.0, 0.0, -3.0])))
    assert m["advantage_skew_positive"].value == pytest.approx(0.2)
    assert m["advantage_skew_positive"].n == 1
    assert m["advantage_skew_negative"].value == pytest.approx((0.2 - 1.2) / 2)
    assert m["advantage_weight_skew_negative"].value == pytest.approx((-np.expm1(-0.2) - 3 * np.expm1(0.4)) / 2)


@pytest.mark.parametrize(("low", "high"), [(0.8, 1.2), (0.5, 2.0), (0.999, 1.001), (0.0, 1.5)])
def test_share_outside_brackets_the_exact_count(low, high):
    d = np.random.default_rng(2).standard_t(3, 5000) * 0.2
    exact = float(((np.exp(d) < low) | (np.exp(d) > high)).mean())
    figure = share_outside(state_of(d, [0, 5000]), low, high)
    assert figure.interval[0] <= exact <= figure.interval[1]
    assert figure.interval[1] - figure.interval[0] < 0.02


def trace_with(**more) -> Trace:
    rng = np.random.default_rng(4)
    rows = []
    for k in range(20):
        n = int(rng.integers(2, 40))
        rollout = -rng.exponential(1, n)
        old = np.minimum(rollout + rng.normal(0, 0.1, n), 0)
        row = {
            "response_ids": [1] * n, "rollout_logp": rollout.tolist(), "old_logp": old.tolist(),
            "logp": np.minimum(old + rng.normal(0.02, 0.05, n), 0).tolist(), "turn_ids": [t // 10 for t in range(n)], "entropy": rng.exponential(0.5, n).tolist(),
            "weight_version": [k % 3] * n, "old_version": 3, "source": {"engine": "vllm", "dtype": ["bfloat16", "float16"][k % 2]},
            "finish_reason": ["stop", "length"][k % 2], "advantage": [float((-1) ** k)] * n,
        }  # fmt: skip
        rows.append(row | more)
    return Trace.from_rows(rows)


def test_slices_part_the_tokens():
    trace = trace_with()
    found = measure(trace)
    for kind in (
        "position",
        "probability",
        "entropy",
        "length",
        "turn",
        "last_token",
        "version",
        "version_lag",
        "environment",
        "finish_reason",
    ):
        assert sum(part["mean_abs"].n for part in found.slices[kind].values()) == trace.n_tokens, kind
    assert list(found.slices["environment"]) == ["vllm bfloat16", "vllm float16"]
    assert list(found.slices["version_lag"]) == ["1", "2", "3"]


def test_mismatch_times_update_is_the_whole_ratio():
    trace = trace_with()
    factors = measure(trace).factors
    mean = {name: factors[name]["mean_log_ratio"].value for name in ("mismatch", "update", "total")}
    assert mean["total"] == pytest.approx(mean["mismatch"] + mean["update"])
    d = trace.tokens("old_logp").astype(float) - trace.tokens("rollout_logp")
    u = trace.tokens("logp").astype(float) - trace.tokens("old_logp")
    assert factors["total"]["correlation"].value == pytest.approx(np.corrcoef(d, u)[0, 1], rel=1e-6)
    assert factors["update"]["kl_rollout_old_k3"].value == pytest.approx((np.expm1(u) - u).mean(), rel=1e-6)
    assert not measure(trace, old="prefill_logp" if trace.has("prefill_logp") else "logp").factors


def test_probability_figures_by_hand():
    q, p = np.array([0.5, 0.1, 0.8]), np.array([0.4, 0.2, 0.8])
    m = compute(MismatchState.from_packed(np.log(q), np.log(p), mask=np.ones(3), cu_seqlens=[0, 2, 3], probabilities=True))
    assert m["probability_gap"].value == pytest.approx(0.2 / 3)
    assert m["probability_gap_max"].value == pytest.approx(0.1)
    assert m["probability_correlation"].value == pytest.approx(np.corrcoef(p, q)[0, 1])
    assert m["mean_exp_abs"].value == pytest.approx((1.25 + 2 + 1) / 3)


def test_js_over_all_tokens_is_the_divergence():
    rng = np.random.default_rng(0)
    q, p = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    times = np.round(q * 1_000_000).astype(int)  # every token as often as the sampler draws it
    ids = np.repeat(np.arange(6), times)
    q = times / times.sum()
    got = compute(MismatchState.from_packed(
        np.log(q[ids]), np.log(p[ids]), mask=np.ones(len(ids)), cu_seqlens=[0, len(ids)], probabilities=True
    ))["js"].value  # fmt: skip
    m = (p + q) / 2
    assert got == pytest.approx(0.5 * (p * np.log(p / m)).sum() + 0.5 * (q * np.log(q / m)).sum(), rel=1e-9)


def test_js_of_small_and_huge_gaps():
    for d, expected in ((1e-6, 1.25000063e-13), (-40.0, np.log(2) / 2), (0.0, 0.0)):
        m = compute(
            MismatchState.from_packed(np.array([-50.0]), np.array([-50.0 + d]), mask=[1], cu_seqlens=[0, 1], probabilities=True)
        )
        assert m["js"].value == pytest.approx(expected, rel=1e-6)


def test_probability_figures_are_absent_where_not_asked_for():
    assert "js" not in compute(state_of(np.zeros(3), np.array([0, 3]))).figures
