import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.measure import MismatchState, compute, measure
from unskew.trace import Trace

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


def state_of(rollout, old, mask=None, cu=None, **more):
    rollout = np.asarray(rollout)
    mask = np.ones(len(rollout), bool) if mask is None else mask
    cu = np.array([0, len(rollout)]) if cu is None else cu
    return MismatchState.from_packed(rollout, np.asarray(old), mask=mask, cu_seqlens=np.asarray(cu), **more)


def test_hand_worked_figures_of_three_tokens():
    # d = 0, log 2, −log 2: ρ = 1, 2, 1/2.
    log2 = np.log(2.0)
    m = compute(state_of([-1.0, -1.0, -1.0], [-1.0, -1.0 + log2, -1.0 - log2], cu=[0, 2, 3]))
    assert m["n_tokens"].value == 3
    assert m["n_sequences"].value == 2
    assert m["mean_abs"].value == pytest.approx(2 * log2 / 3)
    assert m["max_abs"].value == pytest.approx(log2)
    assert m["kl_rollout_old_k1"].value == pytest.approx(0.0, abs=1e-15)
    assert m["kl_rollout_old_k2"].value == pytest.approx(log2**2 / 3)
    assert m["kl_rollout_old_k3"].value == pytest.approx((0 + (1 - log2) + (log2 - 0.5)) / 3)
    assert m["kl_old_rollout_k1"].value == pytest.approx((2 * log2 - 0.5 * log2) / 3)
    assert m["kl_old_rollout_k3"].value == pytest.approx(((2 * log2 - 1) + (0.5 - 0.5 * log2)) / 3)
    assert m["mean_ratio"].value == pytest.approx(3.5 / 3)
    assert m["chi2_token"].value == pytest.approx((1 + 4 + 0.25) / 3 - 1)
    assert m["ess_token"].value == pytest.approx(3.5**2 / (3 * 5.25))
    assert m["ess_sequence"].value == pytest.approx((2 + 0.5) ** 2 / (2 * (4 + 0.25)))
    assert m["share_above_1.5"].value == pytest.approx(2 / 3)
    assert m["share_above_5"].value == 0.0
    assert m["sequence_product_mean_abs"].value == pytest.approx(log2)
    assert m["sequence_geometric_mean_abs"].value == pytest.approx((log2 / 2 + log2) / 2)
    assert m["perplexity_rollout"].value == pytest.approx(np.e)
    assert m["log_perplexity_gap"].value == pytest.approx(0.0, abs=1e-15)


def test_interval_is_the_ratio_estimators():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 50)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    d = rng.normal(0, 0.1, cu[-1])
    y, n = np.add.reduceat(np.abs(d), cu[:-1]), lengths
    mean = y.sum() / n.sum()
    error = np.sqrt(((y - mean * n) ** 2).sum() * 50 / 49) / n.sum()
    low, high = compute(state_of(np.zeros(cu[-1]), d, cu=cu))["mean_abs"].interval
    assert (low, high) == pytest.approx((mean - 1.959964 * error, mean + 1.959964 * error))


def test_calibration_and_its_z_from_sequence_sums():
    old, entropy = np.array([-1.0, -2.0, -0.5]), np.array([1.5, 1.0, 0.25])
    m = compute(state_of(old, old, cu=[0, 2, 3], entropy=entropy))
    sums = np.array([0.5 - 1.0, -0.25])
    assert m["calibration"].value == pytest.approx(-0.75 / 3)
    assert m["calibration_z"].value == pytest.approx(sums.sum() / (sums.std(ddof=1) * np.sqrt(2)))


@pytest.mark.parametrize("case", ["mild64", "holes", "extreme"])
def test_equals_what_verl_and_nemo_compute(case):
    inputs = np.load(GOLDEN / f"inputs_{case}.npz")
    verl = json.loads((GOLDEN / "verl.json").read_text())[case]["verl"]
    mask = inputs["mask"] != 0
    rows, length = mask.shape
    m = compute(
        state_of(inputs["rollout"].reshape(-1), inputs["old"].reshape(-1), mask.reshape(-1), np.arange(rows + 1) * length)
    )
    tolerance = 1e-12 if case == "mild64" else 2e-6
    assert m["kl_rollout_old_k1"].value == pytest.approx(verl["kl"], rel=tolerance, abs=tolerance)
    if case == "extreme":  # their float32 form overflows, and they clamp d at 20 in chi2
        assert verl["k3_kl"] == "inf"
        assert np.isfinite(m["kl_rollout_old_k3"].value)
        return
    nemo_gen_kl_error = {"mild64": 0.0006288816983718739, "holes": 0.002761317417025566}[case]
    assert m["kl_rollout_old_k3"].value == pytest.approx(verl["k3_kl"], rel=1e-5 if case == "holes" else 1e-12)
    assert m["kl_rollout_old_k3"].value == pytest.approx(nemo_gen_kl_error, rel=1e-5 if case == "holes" else 1e-9)
    assert m["chi2_token"].value == pytest.approx(verl["chi2_token"], rel=1e-9 if case == "mild64" else 1e-3)
    if case == "mild64":  # no empty row, which they count as perplexity 1
        assert m["perplexity_old"].value == pytest.approx(verl["training_ppl"], rel=1e-12)
        assert m["perplexity_rollout"].value == pytest.approx(verl["rollout_ppl"], rel=1e-12)
        assert m["chi2_sequence"].value == pytest.approx(verl["chi2_seq"], rel=1e-9)


@pytest.mark.parametrize("shards", [1, 7, 64])
def test_merged_shards_equal_the_pooled_state(shards):
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 80, 640)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    rollout = -rng.exponential(1, cu[-1])
    old = rollout + rng.standard_t(3, cu[-1]) * 0.05
    mask = rng.random(cu[-1]) < 0.9
    entropy, scale = rng.random(cu[-1]), rng.random(cu[-1])
    pooled = state_of(rollout, old, mask, cu, entropy=entropy, noise_scale=scale)
    merged = MismatchState.empty()
    for rows in np.array_split(np.arange(640), shards):
        part = slice(cu[rows[0]], cu[rows[-1] + 1])
        cut = cu[rows[0] : rows[-1] + 2] - cu[rows[0]]
        merged = merged.merge(state_of(rollout[part], old[part], mask[part], cut, entropy=entropy[part], noise_scale=scale[part]))
    for name in ("n_tokens", "n_sequences", "n_clusters", "n_masked", "max_abs"):
        assert getattr(merged, name) == getattr(pooled, name)
    for name in ("counts", "histogram", "above", "sequence_max"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(pooled, name))
    for name in ("top", "top_product"):
        np.testing.assert_allclose(np.sort(getattr(merged, name)), np.sort(getattr(pooled, name)), rtol=1e-15)
    for name in ("sums", "cluster_square", "cluster_cross", "cluster_size", "product", "sequence"):
        np.testing.assert_allclose(getattr(merged, name), getattr(pooled, name), rtol=1e-12, atol=1e-12)
    assert compute(merged)["khat_token"].value == compute(pooled)["khat_token"].value


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.sampled_from([np.nan, np.inf, -1e300, 5.0])
)
def test_what_is_masked_changes_nothing(lengths, seed, junk):
    rng = np.random.default_rng(seed)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    rollout, old, mask = rng.normal(size=cu[-1]), rng.normal(size=cu[-1]), rng.random(cu[-1]) < 0.6
    a = compute(state_of(rollout, old, mask, cu)).to_dict()
    b = compute(state_of(np.where(mask, rollout, junk), np.where(mask, old, 1.0), mask, cu)).to_dict()
    assert a == b


def test_log_ratios_of_ten_thousand_do_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        m = compute(state_of([0.0, 0.0, 0.0], [1e4, -1e4, 0.0], cu=[0, 1, 2, 3]))
    assert m["max_abs"].value == 1e4
    assert m["kl_rollout_old_k3"].value == np.inf
    assert m["mean_ratio"].value == np.inf
    assert m["ess_sequence"].value == pytest.approx(1 / 3)
    assert np.isfinite(m["kl_rollout_old_k1"].value)


def test_what_is_not_finite_is_counted_and_left_out():
    m = compute(state_of([-1.0, np.nan, -1.0, -np.inf], [-1.0, -1.0, -np.inf, -np.inf]))
    assert (m["n_tokens"].value, m["n_nan"].value, m["n_inf"].value) == (1, 1, 2)


def test_nothing_to_measure_is_said():
    m = compute(state_of([-1.0], [-1.0], np.zeros(1, bool)))
    assert m["mean_abs"].value is None
    assert m["mean_abs"].why


def test_float32_torch_and_numpy_agree():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    rollout = rng.normal(size=200).astype(np.float32)
    old = (rollout + rng.normal(size=200) * 0.1).astype(np.float32)
    a = compute(state_of(rollout, old)).to_dict()
    b = compute(
        MismatchState.from_packed(
            torch.tensor(rollout), torch.tensor(old), mask=torch.ones(200), cu_seqlens=torch.tensor([0, 200])
        )
    )
    assert a == b.to_dict()


def test_kappa_tells_an_honest_gap_from_a_rescored_log():
    rng = np.random.default_rng(4)
    n, sd = 400_000, 0.2
    z = rng.normal(0, sd, n)
    honest = compute(state_of(np.zeros(n), z - sd**2 / 2, cu=np.arange(0, n + 1, 100)))["kappa"].value
    rescored = compute(state_of(np.zeros(n), z + sd**2 / 2, cu=np.arange(0, n + 1, 100)))["kappa"].value
    assert honest == pytest.approx(1, abs=0.1)
    assert rescored < -0.8


def test_rows_selected_by_reward_withhold_what_assumes_sampling():
    rows = [{"response_ids": [1, 2], "rollout_logp": [-1.0, -0.5], "old_logp": [-1.1, -0.4], "selection": "reward"}] * 3
    result = measure(Trace.from_rows(rows))
    assert result.overall["mean_ratio"].value is None
    assert result.overall["mean_abs"].value == pytest.approx(0.1, rel=1e-5)


def test_slices_add_up():
    rng = np.random.default_rng(5)
    rows = []
    for _ in range(20):
        n = int(rng.integers(1, 40))
        logp = -rng.exponential(1, n)
        rows.append({"response_ids": [1] * n, "rollout_logp": logp.tolist(), "old_logp": (logp + rng.normal(0, 0.1, n)).tolist()})
    result = measure(Trace.from_rows(rows))
    total = result.overall["n_tokens"].value
    for kind in ("position", "probability", "last_token"):
        assert sum(part["n_tokens"].value for part in result.slices[kind].values()) == total
