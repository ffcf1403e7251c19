"""KL penalties of a token that other projects' own functions give for the same log-probs (numbers only)."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from unskew.measure import k3  # noqa: E402
from unskew.objective import kl_penalty  # noqa: E402

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "golden" / "scores.npz")
# slime's unbiased form multiplies by π_θ/π_old; "abs" is |k1|, which is no estimator of a KL.
KEYS = [k for k in GOLDEN.files if "|kl_k" in k and not k.endswith("unbiased") and "k3+" not in k]


@pytest.mark.parametrize("key", KEYS)
def test_each_token_equals_the_other_projects_function(key):
    case, _, entry, _ = key.split("|")
    cur, ref, mask = (torch.from_numpy(GOLDEN[f"{case}|{name}"]) for name in ("cur", "ref", "mask"))
    theirs = torch.from_numpy(GOLDEN[key]).double()
    ours = kl_penalty(cur, ref, estimator=entry.removeprefix("kl_"), mask=mask).loss
    tight = 1e-9 if theirs.dtype == cur.dtype and GOLDEN[key].dtype == np.float64 else 3e-7
    torch.testing.assert_close(ours[mask != 0].double(), theirs[mask != 0], rtol=1e-5, atol=tight)


@pytest.mark.parametrize("case", ["mild64", "holes"])
def test_prime_rls_mismatch_kl_is_k3_of_the_mismatch(case):
    d, mask = GOLDEN[f"{case}|old"] - GOLDEN[f"{case}|rollout"], GOLDEN[f"{case}|mask"] != 0
    np.testing.assert_allclose(k3(d)[mask], GOLDEN[f"{case}|prime|ratio_mismatch_kl|mismatch_kl"][mask], rtol=1e-5, atol=3e-7)
