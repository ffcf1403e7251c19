"""Log-probs, entropies and Σp² that other projects' own functions give for the same logits (numbers only)."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from unskew.score import HeadStates, score_logits  # noqa: E402

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "golden" / "scores.npz")
KEYS = [k for k in GOLDEN.files if k.startswith("logits|") and "liger" not in k]
OURS = {"lp": "logp", "h": "entropy", "s": "collision"}


def logits_of(output):
    extreme = output.endswith("_x")
    logits, ids = (torch.from_numpy(GOLDEN[name + "_x" * extreme]) for name in ("logits", "labels"))
    return logits.to(torch.bfloat16) if output.endswith("_bf16") else logits, ids


def exact(logits, ids, output):
    logp = logits.double().log_softmax(-1)
    p = logp.exp()
    figures = {"lp": logp.gather(1, ids[:, None])[:, 0], "h": -torch.where(p > 0, p * logp, 0.0).sum(-1), "s": (p * p).sum(-1)}
    return figures[output.split("_")[0]].numpy()


@pytest.mark.parametrize("output", sorted({k.rsplit("|", 1)[1] for k in KEYS}))
def test_ours_are_the_exact_values_of_the_logits_as_they_are(output):
    logits, ids = logits_of(output)
    ours = getattr(score_logits(logits, ids), OURS[output.split("_")[0]])
    np.testing.assert_allclose(ours, exact(logits, ids, output), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("key", KEYS)
def test_equals_the_other_projects_function_or_is_nearer_to_the_truth(key):
    output = key.rsplit("|", 1)[1]
    logits, ids = logits_of(output)
    theirs, truth = GOLDEN[key].astype(np.float64), exact(logits, ids, output)
    ours = getattr(score_logits(logits, ids), OURS[output.split("_")[0]])
    assert np.isfinite(ours[np.isfinite(truth)]).all()
    # They round to bfloat16, lose digits where logits are large, and return NaN where one is −inf.
    near = 0.07 if output.endswith("_bf16") else 2e-2 if output.endswith("_x") else 1e-5
    known = np.isfinite(theirs) & np.isfinite(truth)
    np.testing.assert_allclose(theirs[known], ours[known], atol=near)
    ours, theirs, truth = ours[known], theirs[known], truth[known]
    assert np.abs(ours - truth).max(initial=0) <= np.abs(theirs - truth).max(initial=0) + 1e-6


def test_equals_ligers_log_probs_from_hidden_states():
    hidden, head = torch.from_numpy(GOLDEN["hidden"]), torch.from_numpy(GOLDEN["weight"])
    ours = HeadStates(hidden, lambda x: x @ head.T, [[0]], [GOLDEN["labels"]]).scores().logp
    np.testing.assert_allclose(ours, GOLDEN["logits|liger|selective_logprob|lp"], atol=1e-5)
