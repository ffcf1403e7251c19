"""What other projects' own functions log about weights, masks and gaps (numbers only), from our figures and weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_golden import SAME

from unskew.correct import Correction
from unskew.measure import MismatchState, compute

DATA = Path(__file__).parent.parent / "data" / "golden"
METRICS = json.loads((DATA / "metrics.json").read_text())
INPUTS = {case: dict(np.load(DATA / f"inputs_{case}.npz")) for case in ("mild64", "holes")}
TOLERANCE = {"mild64": 1e-9, "holes": 5e-6}


def entries(peer, start):
    return [key for key in METRICS if key.split("|")[1] == peer and key.split("|")[2].startswith(start)]


def batch(key):
    case = key.split("|")[0]
    rollout, old = (INPUTS[case][k] for k in ("rollout", "old"))
    return rollout, old, INPUTS[case]["mask"] != 0, pytest.approx, TOLERANCE[case]


def figures(rollout, old, mask):
    bounds = np.array([0, rollout.size])
    state = MismatchState.from_packed(rollout.reshape(-1), old.reshape(-1), mask=mask.reshape(-1), cu_seqlens=bounds)
    return compute(state)


@pytest.mark.parametrize("key", [k for k in entries("verl", "is_") if k.split("|", 1)[1] in SAME])
def test_verls_weights(key):
    """mean, std and effective sample size are of the bounded weights over tokens; high and low of the raw ratios."""
    rollout, old, mask, near, tolerance = batch(key)
    entry, theirs = key.split("|", 1)[1], METRICS[key]
    found = Correction.parse(SAME[entry].split("+")[0])(rollout, old, mask=mask).weight[mask].astype(np.float64)
    assert found.mean() == near(theirs["mean"], rel=tolerance)
    assert found.std() == near(theirs["std"], rel=100 * tolerance)
    assert found.mean() ** 2 / (found**2).mean() == near(
        theirs["eff_sample_size"], rel=max(1e-7, tolerance)
    )  # they add 1e-8 to the mean
    level = "token" if "|is_token" in key else "seq"
    raw = Correction.parse(f"{level}-is")(rollout, old, mask=mask).weight[mask]
    high = float(entry.split("_")[-2])
    assert (raw > high).mean() == near(theirs["ratio_fraction_high"], abs=1e-7)
    assert raw.max() == near(theirs["max"], rel=tolerance)
    if "+" in SAME[entry]:
        weights = Correction.parse(SAME[entry])(rollout, old, mask=mask).weight[mask]
        assert found[0] / weights[0] == near(theirs["batch_norm_factor"], rel=tolerance)


@pytest.mark.parametrize("key", [k for k in entries("verl", "rs_") if k.split("|", 1)[1] in SAME])
def test_verls_rejected_shares(key):
    rollout, old, mask, near, _ = batch(key)
    keep, theirs = Correction.parse(SAME[key.split("|", 1)[1]])(rollout, old, mask=mask).keep, METRICS[key]
    assert 1 - keep[mask].mean() == near(theirs["masked_fraction"], abs=1e-6)
    # A sequence without a token counts as one that keeps all.
    assert ((mask & ~keep).any(axis=1)).mean() == near(theirs["seq_masked_fraction"], abs=1e-6)


@pytest.mark.parametrize("key", entries("slime", "mis_metrics_only"))
def test_slimes_metrics_are_sums_over_sequences_of_their_means(key):
    rollout, old, mask, near, tolerance = batch(key)
    names = {"kl": "kl_rollout_old_k1", "k3_kl": "kl_rollout_old_k3", "training_ppl": "perplexity_old", "rollout_ppl": "perplexity_rollout",
             "chi2_token": "chi2_token", "chi2_seq": "chi2_sequence"}  # fmt: skip
    rows = [figures(rollout[i], old[i], mask[i]) for i in range(len(mask)) if mask[i].any()]
    for theirs, ours in names.items():
        total = sum(row[ours].value for row in rows)
        # Their χ² loses digits of its float32 mean ρ² before it takes 1 away.
        assert total == near(METRICS[key][theirs], rel=tolerance, abs=2e-5 if "holes" in key else 1e-9), theirs


@pytest.mark.parametrize("key", entries("slime", "mis_"))
def test_slimes_weights(key):
    entry, theirs = key.split("|", 1)[1], METRICS[key]
    if entry not in SAME:
        return
    rollout, old, mask, near, tolerance = batch(key)
    found = Correction.parse(SAME[entry])(rollout, old, mask=mask)
    mean = [found.weight[i][mask[i]].mean(dtype=np.float64) for i in range(len(mask)) if mask[i].any()]
    if "is_ratio_mean_final" in theirs and "_mask_" not in entry and "_rs_" not in entry:
        assert sum(mean) == near(theirs["is_ratio_mean_final"], rel=tolerance)


@pytest.mark.parametrize("key", entries("nemo", "loss_ppo"))
def test_nemos_figures(key):
    rollout, old, mask, near, tolerance = batch(key)
    ours, theirs, d = figures(rollout, old, mask), METRICS[key], (old - rollout)[mask].astype(np.float64)
    assert ours["kl_rollout_old_k3"].value == near(theirs["gen_kl_error"], rel=tolerance)
    assert ours["mean_ratio"].value == near(theirs["sampling_importance_ratio"], rel=tolerance)
    assert np.exp(np.abs(d)).mean() == near(theirs["token_mult_prob_error"], rel=tolerance)
    # The "reverse" KL that they log swaps the sign of d under the sampler's mean. That is no estimate of
    # KL(old ‖ rollout), which weighs each token by its ratio.
    assert (np.expm1(-d) + d).mean() == near(theirs["policy_kl_error"], rel=10 * tolerance)
    assert ours["kl_old_rollout_k3"].value != near(theirs["policy_kl_error"], rel=1e-3)


@pytest.mark.parametrize("key", entries("nemo", "seq_logprob"))
def test_nemos_sequence_errors(key):
    rollout, old, mask, near, tolerance = batch(key)
    spread = [np.exp(np.abs((old - rollout)[i][mask[i]])).mean(dtype=np.float64) for i in range(len(mask)) if mask[i].any()]
    assert max(spread) == near(METRICS[key]["max_seq_mult_prob_error"], rel=tolerance)


@pytest.mark.parametrize("key", entries("skyrl", "opc_"))
def test_skyrls_ratio_statistics_count_padding_as_zero(key):
    rollout, old, mask, near, _ = batch(key)
    theirs, ours = METRICS[key], figures(rollout, old, mask)
    ratio = np.exp(np.where(mask, (old - rollout).astype(np.float64), -np.inf))
    assert ours["mean_ratio"].value == near(theirs["is_ratio_mean"], rel=1e-5)
    assert ratio.max() == near(theirs["is_ratio_max"], rel=1e-5)
    # Their minimum and deviation are of ratios times the mask: 0 wherever there is padding.
    assert theirs["is_ratio_min"] == 0.0 < ratio[mask].min()
    assert ratio.std(ddof=1) == near(theirs["is_ratio_std"], rel=1e-5)
    assert abs(theirs["is_ratio_std"] - ratio[mask].std()) > 0.1
    entry = key.split("|", 1)[1]
    share = next((v for k, v in theirs.items() if k.endswith(("masked_ratio", "token_mask_ratio"))), None)
    if share is not None:
        keep = Correction.parse(SAME[entry])(rollout, old, mask=mask).keep
        rejected = (mask & ~keep)[mask].mean() if "token_mask_ratio" in theirs else (mask & ~keep).any(axis=1).mean()
        assert rejected == near(share, abs=1e-6)
