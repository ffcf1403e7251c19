"""Other projects' metric names: found as they are logged, and what they say holds on numbers."""

from pathlib import Path

import numpy as np
import pytest

from unskew.measure import MismatchState, compute, find_metrics, metrics
from unskew.measure._explain import FIGURES
from unskew.measure._names import page


def test_the_page_is_the_data():
    assert (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8") == page()


def test_every_figure_named_is_one_of_ours():
    state = MismatchState.from_packed(
        np.log([0.5, 0.4]), np.log([0.4, 0.5]), mask=np.ones(2), cu_seqlens=[0, 1, 2], probabilities=True
    )
    known = {*compute(state).figures, "share_outside"}
    assert {name for m in metrics() for name in m.ours} <= known
    assert all(any(name.startswith(base) for base in FIGURES) for m in metrics() for name in m.ours if "perplexity" not in name)
    assert {m.over for m in metrics()} == {"tokens", "sequences", "samples", "ranks"}
    assert {m.of for m in metrics()} == {"raw", "truncated", "kept"}
    assert all(len(m.ours) in (0, 1, len(m.names)) for m in metrics())


@pytest.mark.parametrize(
    ("name", "frameworks", "figure"),
    [
        ("training/rollout_corr/k3_kl", {"verl"}, "kl_rollout_old_k3"),
        ("rollout_corr/training_ppl", {"verl"}, "perplexity_old"),
        ("rollout_probs_diff_mean", {"verl"}, "probability_gap"),
        ("k3_kl", {"verl", "ms-swift"}, "kl_rollout_old_k3"),
        ("chi2_seq", {"verl", "ms-swift"}, None),
        ("mismatch_kl/math/mean", {"prime-rl"}, "kl_rollout_old_k3"),
        ("rollout_corr/rollout_rs_seq_mean_k1_seq_mean", {"verl"}, None),
        ("train/max_seq_mult_prob_error_after_mask", {"NeMo RL"}, None),
        ("kl", {"verl", "ms-swift"}, "kl_rollout_old_k1"),
        ("ppo_actor/update/behave_approx_kl", {"AReaL"}, "kl_rollout_old_k1"),
        ("no/such/metric", set(), None),
        ("_mean", set(), None),
    ],
)
def test_found_as_logged(name, frameworks, figure):
    found = find_metrics(name)
    assert {m.framework for m in found} == frameworks
    if figure:
        assert {m.figure(name) for m in found} == {figure}


def test_the_formulas_are_those_figures():
    rng = np.random.default_rng(0)
    q = rng.uniform(0.05, 0.9, 60)
    p = q * np.exp(rng.normal(0, 0.05, 60))
    d, rho = np.log(p / q), p / q
    m = compute(MismatchState.from_packed(np.log(q), np.log(p), mask=np.ones(60), cu_seqlens=[0, 20, 60], probabilities=True))
    theirs = {
        "rollout_corr/kl": (-d).mean(), "rollout_corr/k3_kl": (rho - d - 1).mean(), "rollout_corr/chi2_token": (rho**2).mean() - 1,
        "rollout_corr/chi2_seq": np.mean([np.exp(2 * d[:20].sum()), np.exp(2 * d[20:].sum())]) - 1,
        "rollout_corr/log_ppl_diff": -np.mean([d[:20].mean(), d[20:].mean()]), "train/token_mult_prob_error": np.exp(abs(d)).mean(),
        "rollout_corr/log_ppl_abs_diff": np.mean([abs(d[:20].mean()), abs(d[20:].mean())]),
        "training/rollout_probs_diff_mean": abs(p - q).mean(), "training/rollout_probs_diff_max": abs(p - q).max(),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1], "vllm_kl": (-d).mean(),
        "ppo_actor/update/behave_approx_kl": d.mean(), "optim/kl_sample_train_v2": (d**2).mean() / 2,
        "mean_piold_to_inf_prob": rho.mean(), "policy/rollout_train_logprobs_abs_diff_mean": abs(d).mean(),
        "rollout_corr/rollout_ppl": np.mean([q[:20].prod() ** (-1 / 20), q[20:].prod() ** (-1 / 40)]),
    }  # fmt: skip
    for name, value in theirs.items():
        (metric,) = find_metrics(name)
        assert m[metric.figure(name)].value * metric.factor == pytest.approx(value, rel=1e-9), name
