"""What other projects' own functions give for the same inputs (numbers only), and where ours differ on purpose."""

from math import log
from pathlib import Path

import numpy as np
import pytest

from unskew.correct import Correction

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "golden" / "corrections.npz")

# Entry → the correction of the same meaning. verl's and slime's k1 bounds are ratios of μ/π; ours are nats of −d.
SAME = {
    "verl|is_token_2.0_bn0": "token-tis(2)",
    "verl|is_token_2.0_bn1": "token-tis(2)+batch-norm",
    "verl|is_token_5.0_bn0": "token-tis(5)",
    "verl|is_token_0.5_2.0_bn0": "icepop(0.5,2)",
    "verl|is_sequence_2.0_bn0": "seq-tis(2)",
    "verl|is_sequence_2.0_bn1": "seq-tis(2)+seq-batch-norm",
    "verl|is_sequence_5.0_bn0": "seq-tis(5)",
    "verl|is_sequence_0.5_2.0_bn0": "seq-mis(0.5,2)",
    "verl|rs_token_k1_0.5_2.0": f"token-k1({log(0.5)},{log(2)})",
    "verl|rs_token_k1_0.5_5.0": f"token-k1({log(0.5)},{log(5)})",
    "verl|rs_token_k2_0.1": "token-k2(0.1)",
    "verl|rs_token_k3_0.1": "token-k3(0.1)",
    "verl|rs_seq_sum_k1_0.5_2.0": f"seq-sum-k1({log(0.5)},{log(2)})",
    "verl|rs_seq_sum_k1_0.5_5.0": "seq-mask(0.2,2)",
    "verl|rs_seq_sum_k2_0.5": "seq-sum-k2(0.5)",
    "verl|rs_seq_sum_k3_0.5": "seq-sum-k3(0.5)",
    "verl|rs_seq_mean_k1_0.98_1.02": f"seq-mean-k1({log(0.98)},{log(1.02)})",
    "verl|rs_seq_mean_k1_0.99_1.5": f"geo-mask({1 / 1.5},{1 / 0.99})",
    "verl|rs_seq_mean_k2_0.01": "seq-mean-k2(0.01)",
    "verl|rs_seq_mean_k3_0.01": "seq-mean-k3(0.01)",
    "verl|rs_seq_max_k2_0.2": "seq-max-k2(0.2)",
    "verl|rs_seq_max_k3_0.2": "seq-max-k3(0.2)",
    "verl|rs_token_k1,seq_max_k3_0.5_2.0,0.2": "token-mask(0.5,2)+seq-max-k3(0.2)",
    "slime|tis_0.0_2.0": "token-tis(2)",
    "slime|tis_0.5_2.0": "token-tis(0.5,2)",
    "slime|tis_0.5_5.0": "token-tis(0.5,5)",
    "slime|icepop_0.0_2.0": "token-mis(2)",
    "slime|icepop_0.5_2.0": "icepop(0.5,2)",
    "slime|icepop_0.5_5.0": "icepop(0.5,5)",
    "slime|mis_token_truncate_bn0": "token-tis(2)",
    "slime|mis_token_truncate_bn1": "token-tis(2)+batch-norm",
    "slime|mis_token_clip_bn0": "token-tis(0.5,2)",
    "slime|mis_token_clip_bn1": "token-tis(0.5,2)+batch-norm",
    "slime|mis_token_mask_bn0": "token-mis(0.5,2)",
    "slime|mis_sequence_truncate_bn0": "seq-tis(2)",
    "slime|mis_sequence_clip_bn0": "seq-tis(0.5,2)",
    "slime|mis_sequence_mask_bn0": "seq-mis(0.5,2)",
    "slime|mis_geometric_truncate_bn0": "geo-tis(2)",
    "slime|mis_geometric_clip_bn0": "geo-tis(0.5,2)",
    "slime|mis_geometric_mask_bn0": "geo-mis(0.5,2)",
    "slime|mis_rs_token_0.5_2.0_veto0.0001": "token-tis(2)+token-mask(0.5,2)+veto(1e-4)",
    "slime|mis_rs_sequence_0.5_2.0_vetoNone": "token-tis(2)+seq-mask(0.5,2)",
    "slime|mis_rs_geometric_0.98_1.02_veto0.0001": "token-tis(2)+geo-mask(0.98,1.02)+veto(1e-4)",
    "slime|opsm_0.01": "opsm(0.01)",
    "trl|is_token_truncate_None_3.0": "token-tis(3)",
    "trl|is_token_truncate_0.5_2.0": "token-tis(0.5,2)",
    "trl|is_token_mask_None_3.0": "token-mis(3)",
    "trl|is_token_mask_0.5_2.0": "token-mis(0.5,2)",
    "trl|is_sequence_truncate_None_3.0": "seq-tis(3)",
    "trl|is_sequence_truncate_0.5_2.0": "seq-tis(0.5,2)",
    "trl|is_sequence_mask_None_3.0": "seq-mis(3)",
    "trl|is_sequence_mask_0.5_2.0": "seq-mis(0.5,2)",
    "trl|off_policy_mask_0.01": "opsm(0.01)",
    "skyrl|opc_tis_token": "token-tis(2)",
    "skyrl|opc_tis_seq": "seq-tis(5)",
    "skyrl|opc_geo": "geo-mask(0.99,1.01)",
    "skyrl|opc_product": "seq-mask(0.5,2)",
    "skyrl|opc_outlier_1e-4_100": "veto(1e-4)+veto-high(100)",
    "skyrl|opc_tokenmask_0.5_2": "token-mask(0.5,2)",
    "skyrl|opc_icepop_like": "icepop(0.5,2)",
}


def ours(case: str, entry: str, clean: bool = False):
    rollout, old, cur, adv_seq, mask = (GOLDEN[f"{case}|{name}"] for name in ("rollout", "old", "cur", "adv_seq", "mask"))
    if clean:
        rollout, old, cur = (np.where(mask != 0, x, 0) for x in (rollout, old, cur))
    if entry.startswith("slime|opsm"):
        rollout = old
    advantages = np.broadcast_to(adv_seq[:, None], mask.shape)
    return Correction.parse(SAME[entry])(rollout, old, mask=mask, logp=cur, advantages=advantages)


def compared(case: str, entry: str):
    """(ours, tokens whose kept or rejected differs, tokens kept by us whose weight differs)."""
    found, mask = ours(case, entry), GOLDEN[f"{case}|mask"] != 0
    out = []
    for output, mine in (("mask", found.keep), ("weights", found.weight)):
        key = f"{case}|{entry}|{output}"
        if key not in GOLDEN.files:
            out.append(np.zeros_like(mask))
            continue
        theirs = GOLDEN[key]
        theirs = np.broadcast_to(theirs if theirs.ndim == 2 else theirs[:, None], mask.shape)
        if output == "mask":
            out.append(((theirs != 0) != mine) & mask)
        else:
            # SkyRL computes in float32 whatever it is given.
            tolerance = 1e-12 if case == "mild64" and not entry.startswith("skyrl") else 2e-6
            out.append(~np.isclose(mine, theirs, rtol=tolerance, atol=tolerance) & mask & found.keep)
    return found, *out


@pytest.mark.parametrize("entry", SAME)
@pytest.mark.parametrize("case", ["mild64", "holes", "extreme", "single"])
def test_equals_the_other_projects_function(case, entry):
    _, kept, weights = compared(case, entry)
    if (case, entry) == ("extreme", "verl|rs_seq_mean_k1_0.99_1.5"):
        # verl clamps each log-ratio to ±20 before it averages, so one of −95 or +100 moves its mean less.
        assert set(np.flatnonzero(kept.any(axis=1))) == {1, 9}
        return
    assert not kept.any()
    assert not weights.any()


@pytest.mark.parametrize("entry", [entry for entry in SAME if "opsm" not in entry])
def test_infinite_log_ratios_are_rejected_not_capped(entry):
    found, kept, weights = compared("neginf_rollout", entry)
    rows = found.non_finite.any(axis=1)
    assert found.non_finite.sum() == 2
    assert not found.keep[found.non_finite].any()
    # The others give such a token the cap, or reject the whole batch; all other sequences are as ours.
    assert not kept[~rows].any()
    if weights.any():
        assert "bn1" in entry, "only a mean over the batch can carry the capped tokens to other sequences"


@pytest.mark.parametrize("entry", SAME)
def test_what_stands_under_the_mask_changes_no_bit(entry):
    found, clean = ours("nan_masked", entry), ours("nan_masked", entry, clean=True)
    np.testing.assert_array_equal(found.weight, clean.weight)
    np.testing.assert_array_equal(found.keep, clean.keep)
    assert not found.non_finite.any()
