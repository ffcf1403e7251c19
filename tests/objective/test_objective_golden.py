"""What other projects' own functions give for the same inputs (numbers only), and where ours differ on purpose."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from unskew.correct import Correction
from unskew.objective import (
    TokenLoss,
    cispo,
    dppo,
    gmpo,
    gspo,
    gspo_token,
    kl_penalty,
    ppo,
    reinforce,
    sapo,
    vespo,
)

DATA = Path(__file__).parent.parent / "data" / "golden"
LOSSES = json.loads((DATA / "objectives.json").read_text())
GRADIENTS = np.load(DATA / "objectives.npz")


class Case:
    """Inputs of one case as tensors; `logp` is the leaf that gradients are taken of."""

    def __init__(self, name: str):
        with np.load(DATA / f"inputs_{name}.npz") as inputs:
            self.rollout, self.old, self.ref, self.adv, self.adv_seq = (
                torch.from_numpy(inputs[k]) for k in ("rollout", "old", "ref", "adv_tok", "adv_seq")
            )
            self.logp = torch.from_numpy(inputs["cur"]).requires_grad_()
            self.mask = torch.from_numpy(inputs["mask"])

    def correction(self, text: str):
        return Correction.parse(text)(self.rollout, self.old, mask=self.mask, logp=self.logp, advantages=self.adv)


def token(loss, *, seq=False, **arguments):
    correct = arguments.pop("correct", None)

    def call(c: Case) -> TokenLoss:
        kwargs = arguments | ({"correction": c.correction(correct)} if correct else {})
        return loss(c.logp, c.old, c.adv_seq if seq else c.adv, mask=c.mask, **kwargs)

    return call


def trl(loss=ppo, *, beta=0.0, unbiased=False, **arguments):
    policy = token(loss, seq=True, **arguments)

    def call(c: Case) -> TokenLoss:
        if not beta:
            return policy(c)
        rollout = {"rollout_logp": c.old} if unbiased else {}
        return policy(c) + beta * kl_penalty(c.logp, c.ref, mask=c.mask, **rollout)

    return call


def weighted(correction, sampler):
    """The policy gradient with the weights of the current policy towards a sampler."""

    def call(c: Case) -> TokenLoss:
        weights = Correction.parse(correction)(getattr(c, sampler), c.logp.detach(), mask=c.mask)
        return reinforce(c.logp, c.adv, mask=c.mask, correction=weights)

    return call


MEAN, SEQ = {"over": "token-mean"}, {"over": "seq-mean-token-mean"}
BY_B = SEQ | {"count": 16}
BEFORE = MEAN | {"count": "masked"}
# Entry → (objective, aggregation). TRL, NeMo, SkyRL and Liger divide by all sequences, also by empty ones: count=16.
SAME = {
    "verl|vanilla_token-mean": (token(ppo, dual=3.0), MEAN),
    "verl|vanilla_token-sum": (token(ppo, dual=3.0), {"over": "token-sum"}),
    "verl|vanilla_seq-mean-token-sum": (token(ppo, dual=3.0), {"over": "seq-mean-token-sum"}),
    "verl|vanilla_seq-mean-token-sum-norm": (token(ppo, dual=3.0), {"over": "seq-mean-token-sum", "length": 64}),
    "verl|vanilla_seq-mean-token-mean": (token(ppo, dual=3.0), SEQ),
    "verl|vanilla_cliphigher": (token(ppo, high=0.28, dual=10.0), MEAN),
    "verl|vanilla_tis2": (token(ppo, dual=3.0, correct="token-tis(2)"), MEAN),
    "verl|gspo_clip_ratio_low0.0003_clip_ratio_high0.0004": (token(gspo_token), SEQ),
    "verl|gspo_clip_ratio0.2": (token(gspo_token, low=0.2, high=0.2), SEQ),
    "verl|sapo": (token(sapo), SEQ),
    "verl|cispo_clip_ratio_low1.0_clip_ratio_high2.0": (token(cispo), MEAN),
    "verl|cispo_clip_ratio0.2": (token(cispo, low=0.2, high=0.2), MEAN),
    "verl|dppo_tv_clip_ratio0.15_clip_ratio_c20.0": (token(dppo), MEAN),
    "verl|dppo_kl_clip_ratio0.05_clip_ratio_c20.0": (token(dppo, divergence="kl", high=0.05), MEAN),
    "verl|geo_mean_clip_ratio0.4": (token(gmpo), BY_B),
    "verl|gpg": (lambda c: reinforce(c.logp, c.adv, mask=c.mask), MEAN),
    "trl|loss_grpo": (trl(), BY_B),
    "trl|loss_bnpo": (trl(), MEAN),
    "trl|loss_dr_grpo": (trl(), {"over": "seq-mean-token-sum", "length": 64, "count": 16}),
    "trl|loss_dapo": (trl(), MEAN),
    "trl|loss_dapo_cliphigh": (trl(high=0.28), MEAN),
    "trl|loss_dapo_vllm3": (trl(correct="token-tis(3)"), MEAN),
    "trl|loss_dapo_beta_bias": (trl(beta=0.04, unbiased=True), MEAN),
    "trl|loss_grpo_beta": (trl(beta=0.04), BY_B),
    "trl|loss_grpo_delta": (trl(dual=1.5), BY_B),
    "trl|loss_grpo_seq": (trl(gspo), BY_B),
    "trl|loss_luspo_seq": (trl(gspo, low=0.2, high=0.2), {"over": "seq-mean-token-sum", "count": 16}),
    "trl|loss_cispo_eh5": (trl(cispo, high=4.0), MEAN),
    "trl|loss_cispo_eh3": (trl(cispo), MEAN),
    "trl|loss_sapo": (trl(sapo), BY_B),
    "trl|loss_vespo": (trl(vespo), MEAN),
    "trl|loss_gspo_token": (trl(gspo_token), BY_B),
    "nemo|loss_ppo": (token(ppo), MEAN),
    "nemo|loss_cliphigh": (token(ppo, high=0.28), MEAN),
    "nemo|loss_dualclip3": (token(ppo, dual=3.0), MEAN),
    "nemo|loss_seqloss": (token(ppo), BY_B),
    "nemo|loss_gspo": (token(gspo), BY_B),
    "nemo|loss_gspo_isc": (token(gspo, correct="seq-is"), BY_B),
    "nemo|loss_isc": (token(ppo, correct="token-is"), MEAN),
    "nemo|loss_tis2": (token(ppo, correct="token-tis(2)"), MEAN),
    "nemo|loss_cispo": (token(cispo), MEAN),
    "nemo|loss_reinforce": (lambda c: reinforce(c.logp, c.adv, mask=c.mask), MEAN),
    "slime|ppo_0.2_0.2_None": (token(ppo), SEQ | {"count": 1}),
    "slime|ppo_0.2_0.28_None": (token(ppo, high=0.28), SEQ | {"count": 1}),
    "slime|ppo_0.2_0.2_3.0": (token(ppo, dual=3.0), SEQ | {"count": 1}),
    "slime|gspo_3e-4_4e-4": (token(gspo), SEQ | {"count": 1}),
    "slime|cispo_1.0_2.0": (token(cispo), SEQ | {"count": 1}),
    "skyrl|loss_ppo_token_mean": (token(ppo), MEAN),
    "skyrl|loss_ppo_seq_mean": (token(ppo), BY_B),
    "skyrl|loss_ppo_sum_norm": (token(ppo), {"over": "seq-mean-token-sum", "length": 64, "count": 16}),
    "skyrl|loss_dual_clip": (token(ppo, dual=3.0), MEAN),
    "skyrl|loss_cliphigh": (token(ppo, high=0.28), MEAN),
    "skyrl|loss_ppo_tis2": (token(ppo, correct="token-tis(2)"), MEAN),
    "skyrl|loss_sapo": (token(sapo), BY_B),
    "skyrl|loss_gspo": (token(gspo_token), BY_B),
    "skyrl|loss_cispo": (token(cispo), MEAN),
    "liger|loss_grpo": (trl(), BY_B),
    "liger|loss_bnpo": (trl(), MEAN),
    "liger|loss_dr_grpo": (trl(), {"over": "seq-mean-token-sum", "length": 64, "count": 16}),
    "liger|loss_dapo": (trl(), MEAN),
    "liger|loss_dapo_beta": (trl(beta=0.04), MEAN),
    "liger|loss_grpo_seq": (trl(gspo), BY_B),
    "liger|loss_luspo_seq": (trl(gspo, low=0.2, high=0.2), {"over": "seq-mean-token-sum", "count": 16}),
    "liger|loss_cispo_eh3": (trl(cispo), MEAN),
    "liger|loss_sapo": (trl(sapo), BY_B),
    "liger|loss_vespo": (trl(vespo), MEAN),
    "liger|loss_grpo_delta": (trl(dual=1.5), BY_B),
    "liger|loss_dapo_vllm3": (trl(correct="token-tis(3)"), MEAN),
    # Rejected tokens stay in their denominators.
    "nemo|loss_icepop_0.5_2": (token(ppo, correct="icepop(0.5,2)"), BEFORE),
    "nemo|loss_seqmasktis": (token(ppo, correct="token-is+geo-mask(0.98,1.02)"), BEFORE),
    "trl|loss_grpo_opsm": (
        lambda c: ppo(c.logp, c.old, c.adv_seq, mask=c.mask, correction=Correction.parse("opsm(0.01)")(
            c.rollout, c.logp.detach(), mask=c.mask, advantages=c.adv_seq[:, None].expand(16, 64))),
        BY_B,
    ),
    "skyrl|loss_rollout_is": (weighted("token-mis(0.8,1.2)", "rollout"), BEFORE),
}  # fmt: skip

# The same gradient from another surrogate: theirs is −r A, ours −sg[r] A log π, so the values differ.
GRADIENT = {
    "skyrl|loss_dppo_tv": (token(dppo), MEAN),
    "skyrl|loss_dppo_kl": (token(dppo, divergence="kl", high=0.05), MEAN),
    "skyrl|loss_dppo_tv_rollout": (lambda c: dppo(c.logp, c.rollout, c.adv, mask=c.mask), MEAN),
    "skyrl|loss_importance_sampling": (lambda c: weighted("token-is", "old")(c), MEAN),
    "prime|loss_default": (
        lambda c: (
            dppo(c.logp, c.rollout, c.adv, mask=c.mask, low=0.2, high=0.2)
            + 2e-3 * kl_penalty(c.logp, c.rollout, estimator="k2", mask=c.mask)
        ),
        MEAN,
    ),
}


def ours(case: str, entry: str):
    c = Case(case)
    loss, over = (SAME | GRADIENT)[entry]
    result = loss(c)
    if over.get("count") == "masked":
        over = over | {"count": int(c.mask.sum())}
    value = result.aggregate(**over)
    value.backward()
    assert c.logp.grad is not None
    return float(value.detach()), c.logp.grad.numpy(), float(result.clip_fraction)


@pytest.mark.parametrize("entry", SAME)
def test_value_and_gradient_on_a_plain_batch(entry):
    value, gradient, _ = ours("mild64", entry)
    golden = LOSSES[f"mild64|{entry}"]
    assert value == pytest.approx(golden["loss"], rel=1e-6, abs=1e-9)
    np.testing.assert_allclose(gradient, GRADIENTS[f"mild64|{entry}|grad"], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("entry", [e for e in SAME if f"holes|{e}" in LOSSES])
def test_value_with_empty_rows_holes_and_left_padding(entry):
    assert ours("holes", entry)[0] == pytest.approx(LOSSES[f"holes|{entry}"]["loss"], rel=1e-5, abs=1e-7)


# Log-ratios of 30 to 100 on single tokens: ours are held at ±20, as verl's are; without that one token is the whole batch.
UNBOUNDED = {"trl", "nemo", "slime", "skyrl", "liger"}
ONE_TOKEN = {"loss_ppo_tis2", "loss_dapo_vllm3", "loss_tis2"}


@pytest.mark.parametrize("entry", [e for e in SAME if f"extreme|{e}" in LOSSES])
def test_log_ratios_of_a_hundred(entry):
    value, gradient, _ = ours("extreme", entry)
    golden = LOSSES[f"extreme|{entry}"]["loss"]
    if golden == pytest.approx(value, rel=1e-5, abs=1e-7):
        if (stored := f"extreme|{entry}|grad") in GRADIENTS.files:
            np.testing.assert_allclose(gradient, GRADIENTS[stored], rtol=1e-4, atol=1e-7)
        return
    peer, name = entry.split("|")
    assert peer in UNBOUNDED, "verl bounds log-ratios as we do"
    if name in ONE_TOKEN:
        assert value == pytest.approx(golden, rel=0.02), "a ratio of e^30 times a weight of nothing"
    elif "isc" in name:
        assert value == np.inf, "an unbounded weight of e^100 overflows float32: NeMo writes 0 for it, we say infinite"
    else:
        assert golden == "inf" or abs(golden) > 1e3 * abs(value), "unbounded, one token is the whole loss"
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_what_others_count_as_clipped():
    """verl reports the tokens of dual clip apart; slime's fraction is a sum over sequences."""
    c = Case("extreme")
    plain, dual = (token(ppo, **a)(c) for a in ({}, {"dual": 3.0}))
    golden = LOSSES["extreme|verl|vanilla_token-mean"]["clipfrac"]
    assert float(plain.clip_fraction) == pytest.approx(golden)
    assert float(dual.clip_fraction) == pytest.approx(golden + 0.004854368977248669)


# Entries that have no counterpart here, and why.
NOT_OURS = {
    "clip_cov": "clips a random choice of tokens",
    "kl_cov": "penalises tokens by a covariance over the batch",
    "dro": "a squared penalty, not a policy gradient with a trust region",
    "ipo": "prime-rl's own",
    "ref_kl": "a KL penalty under another name",
    "loss_ppo_kl": "ppo + 0.01 kl_penalty in value; its gradient is of another estimator than its value",
}


def test_every_golden_objective_is_reproduced_or_named():
    every = {key.split("|", 1)[1] for key in LOSSES if key.startswith("mild64|")}
    left = {e for e in every - SAME.keys() - GRADIENT.keys() if "|agg_" not in e}
    assert {e for e in left if not any(name in e for name in NOT_OURS)} == set()


@pytest.mark.parametrize("entry", GRADIENT)
def test_the_same_gradient_from_another_surrogate(entry):
    np.testing.assert_allclose(ours("mild64", entry)[1], GRADIENTS[f"mild64|{entry}|grad"], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("over", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("case", ["mild64", "holes"])
def test_aggregations(over, case):
    c = Case(case)
    plain = reinforce(c.logp, -torch.ones_like(c.logp), mask=c.mask)
    golden = LOSSES[f"{case}|verl|agg_{over}"]["loss"]
    assert float(plain.aggregate(over).detach()) == pytest.approx(golden, rel=1e-6)
