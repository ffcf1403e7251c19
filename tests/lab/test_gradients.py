"""The gradient where every sequence is counted: what is unbiased there must be exactly so."""

import math

import pytest
import torch

from unskew._errors import UnskewError
from unskew.lab._gradients import MISMATCHES, gradients
from unskew.objective import OBJECTIVES


@pytest.fixture(scope="module")
def table():
    return gradients(
        objectives=["grpo", "dr-grpo", "reinforce", "m2po"],
        corrections=["none", "seq-is", "seq-tis(1e9)", "token-is", "batch-norm", "seq-psis"], update=0.0,
    )  # fmt: skip


def row(table, mismatch, objective, correction):
    return next(r for r in table.rows if (r.mismatch, r.objective, r.correction) == (mismatch, objective, correction))


@pytest.mark.parametrize("mismatch", ["bf16", "fp8", "staleness"])
def test_the_whole_sequences_weight_takes_all_bias_away(table, mismatch):
    for objective in ("grpo", "dr-grpo"):
        none, weighted = (row(table, mismatch, objective, c) for c in ("none", "seq-is"))
        assert weighted.bias < 1e-12 < 1e-3 < none.bias
        assert weighted.cosine == pytest.approx(1, abs=1e-12)
        assert row(table, mismatch, objective, "seq-tis(1000000000)").bias == weighted.bias


def test_no_weight_brings_back_what_the_sampler_cannot_produce(table):
    assert table.mismatches["top-p"]["unreached"] > 0.1
    assert row(table, "top-p", "dr-grpo", "seq-is").bias > 0.1


def test_a_dr_grpo_without_mismatch_is_the_policy_gradient(table):
    assert table.own["dr-grpo"] == pytest.approx(1, abs=1e-12)
    assert table.own["reinforce"] == pytest.approx(1, abs=1e-12)
    assert table.own["grpo"] < 0.9999  # its length normalisation


def test_a_weight_costs_noise_where_the_mismatch_is_large(table):
    assert row(table, "staleness", "dr-grpo", "seq-is").noise > row(table, "staleness", "dr-grpo", "none").noise


def test_what_depends_on_the_batch_says_so(table):
    assert all(r.exact == (r.correction not in ("batch-norm", "seq-psis") and r.objective != "m2po") for r in table.rows)
    a, b = row(table, "fp8", "dr-grpo", "none"), row(table, "fp8", "dr-grpo", "batch-norm")
    assert b.bias == pytest.approx(a.bias, rel=1e-3)  # weights of 1 have the mean 1


def test_the_noise_is_that_of_drawn_batches():
    """Bias and noise against 4000 batches of 64 sequences drawn from the sampler, by the objective's own loss."""
    from unskew.lab import _gradients as module

    (found,) = [
        r for r in gradients(objectives=["dr-grpo"], corrections=["none"], update=0.0, seed=3).rows if r.mismatch == "fp8"
    ]
    generator = torch.Generator().manual_seed(3)
    every = module._Sequences.all()
    logits = 2 * torch.randn(every.prefixes, module.VOCABULARY, generator=generator, dtype=torch.float64)
    logits[:, 0] -= 1
    reward = (torch.rand(len(every.ids), generator=generator, dtype=torch.float64) < 0.4).double()
    rollout = MISMATCHES["fp8"](logits, logits)
    old = logits.log_softmax(-1)
    p, mu = every.probability(old), every.probability(rollout)
    centred = reward - (p * reward).sum()
    advantage = centred / (p * centred**2).sum().sqrt()

    table = logits.clone().requires_grad_()
    (truth,) = torch.autograd.grad((every.probability(table.log_softmax(-1)) * advantage).sum(), table)
    score = torch.zeros(len(mu), *logits.shape, dtype=torch.float64)
    step = torch.nn.functional.one_hot(every.ids, module.VOCABULARY) - old.exp()[every.prefix]
    for t in range(module.LENGTH):
        live = every.mask[:, t]
        score[live, every.prefix[live, t]] += step[live, t]
    score *= advantage[:, None, None]
    drawn = torch.multinomial(mu, 4000 * 64, replacement=True, generator=generator).reshape(4000, 64)
    means = torch.stack([score[batch].mean(0) for batch in drawn])
    expected = (mu[:, None, None] * score).sum(0)
    assert float((expected - truth).norm() / truth.norm()) == pytest.approx(found.bias, rel=1e-9)
    spread = float(((means - expected) ** 2).sum((1, 2)).mean().sqrt() / truth.norm())
    assert spread == pytest.approx(found.noise, rel=0.03)


def test_every_objective_keeps_its_gradient_without_a_mismatch():
    table = gradients(corrections=["none"], update=0.0)
    assert table.own.keys() == OBJECTIVES.keys()
    assert all(0.99 < own <= 1 + 1e-12 for own in table.own.values())
    assert not any(math.isnan(r.bias) for r in table.rows)


def test_nothing_kept_is_no_gradient():
    table = gradients(objectives=["gspo"], corrections=["geo-mis(1.0000001,1.0000002)"])
    assert all(r.kept < 0.01 and isinstance(r.noise, float) and 0 <= r.noise < 1e-9 for r in table.rows if r.mismatch == "top-p")


def test_unknown_names_are_errors():
    with pytest.raises(UnskewError, match="no objective 'grp0'"):
        gradients(objectives=["grp0"])
    with pytest.raises(UnskewError, match="no correction"):
        gradients(objectives=["grpo"], corrections=["tokn-tis"])
