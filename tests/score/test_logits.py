"""Log-prob, entropy and Σp² from logits, compiled and plain, against float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unskew._errors import UnskewError
from unskew.score import _logits, score_logits

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=["compiled", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(_logits, "find_spec", lambda name: None)
    return request.param


def exact(logits, ids, temperature=1.0):
    logp = (logits.double() / temperature).log_softmax(1)
    p = logp.exp()
    own = logp.gather(1, ids[:, None])[:, 0]
    entropy = -(p * torch.where(p > 0, logp, 0.0)).sum(1)
    collision = (p * p).sum(1)
    other = p.scatter(1, ids[:, None], 0.0)
    noise = (other.sum(1) ** 2 + (other * other).sum(1)).sqrt()
    return [x.numpy() for x in (own, entropy, noise, collision)]


def figures(scores):
    return scores.logp, scores.entropy, scores.noise_scale, scores.collision


def test_by_hand(path):
    logits = torch.tensor([[np.log(0.5), np.log(0.25), np.log(0.25)], [0.0, np.log(3.0), -np.inf]])
    scores = score_logits(logits, torch.tensor([1, 0]))
    assert scores.logp == pytest.approx([np.log(0.25), np.log(0.25)], abs=1e-7)
    assert scores.entropy == pytest.approx([1.5 * np.log(2), 2 * np.log(2) - 0.75 * np.log(3)], abs=1e-7)
    assert scores.collision == pytest.approx([0.375, 0.625], abs=1e-7)
    assert scores.noise_scale == pytest.approx([np.sqrt(0.75**2 + 0.5**2 + 0.25**2), np.sqrt(0.75**2 * 2)], abs=1e-7)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 2047, 2048, 2049, 50_001])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_within_1e_6_of_exact(path, dtype, vocab, temperature):
    rng = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(9, vocab, generator=rng) * torch.linspace(0.01, 12, 9)[:, None]).to(dtype)
    logits[3] += 40
    logits[4, : vocab // 2] = -torch.inf
    ids = torch.randint(0, vocab, (9,), generator=rng)
    ids[5] = logits[5].argmax()
    found = figures(score_logits(logits, ids, temperature=temperature))
    for got, want in zip(found, exact(logits, ids, temperature), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_a_log_prob_next_to_zero_keeps_its_digits(path):
    """−1e-12 has as many digits as −1: what others hold is summed apart."""
    logits = torch.full((1, 5000), -36.0)
    logits[0, 7] = 0.0
    scores = score_logits(logits, torch.tensor([7]))
    others = 4999 * np.exp(-36.0)
    assert scores.logp[0] == pytest.approx(-np.log1p(others), rel=1e-6)
    assert scores.noise_scale[0] == pytest.approx(np.sqrt(others**2 + 4999 * np.exp(-72.0)), rel=1e-6)


def test_minus_infinity_is_probability_zero(path):
    logits = torch.full((2, 4100), -torch.inf)
    logits[:, 4000] = -3.0
    scores = score_logits(logits, torch.tensor([4000, 2]))
    assert scores.logp.tolist() == [0.0, -np.inf]
    assert scores.entropy.tolist() == [0.0, 0.0]
    assert scores.collision.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("at", [0, 3000])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [0.0, -np.inf])
def test_nan_and_infinity_are_never_dropped(path, at, bad, dtype, rest):
    logits = torch.full((1, 5000), rest, dtype=dtype)
    logits[0, at] = torch.from_numpy(np.copysign(np.array([bad], np.float32), np.float32(bad)))[0]
    for value in figures(score_logits(logits, torch.tensor([1]))):
        assert np.isnan(value).all()


def test_only_minus_infinity_is_nan(path):
    scores = score_logits(torch.full((1, 3000), -torch.inf), torch.tensor([5]))
    assert np.isnan(scores.logp).all() and np.isnan(scores.entropy).all()


def test_columns_of_a_larger_tensor(path):
    """Neither a transposed nor a strided view is read as if it were contiguous."""
    whole = torch.randn(6000, 8, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(4) * 1000
    for view in (whole.T[::2], whole.T[::2].to(torch.bfloat16)):
        got = score_logits(view, ids)
        for a, b in zip(figures(got), exact(view, ids), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@given(st.integers(0, 2**32 - 1), st.floats(-60, 60), st.floats(0.1, 4))
def test_a_shift_of_all_logits_changes_nothing(seed, shift, temperature):
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()
    ids = torch.tensor([0, 299])
    moved = (logits.double() + round(shift)).float()
    a = figures(score_logits(logits, ids, temperature=temperature))
    for x, y in zip(a, figures(score_logits(moved, ids, temperature=temperature)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 / temperature)


def test_no_rows(path):
    assert score_logits(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)).logp.shape == (0,)


@pytest.mark.parametrize(
    ("logits", "ids", "temperature", "says"),
    [
        (torch.zeros(2, 5), torch.zeros(3, dtype=torch.long), 1.0, "ids"),
        (torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, dtype=torch.long), 1.0, "int64"),
        (torch.zeros(2, 5), torch.tensor([0, 5]), 1.0, "5 columns"),
        (torch.zeros(2, 5), torch.tensor([-1, 0]), 1.0, "5 columns"),
        (torch.zeros(2, 5), torch.tensor([0, 0]), 0.0, "temperature"),
        (torch.zeros(2, 5), torch.tensor([0, 0]), float("nan"), "temperature"),
    ],
)
def test_what_does_not_fit_is_an_error(logits, ids, temperature, says):
    with pytest.raises(UnskewError, match=says):
        score_logits(logits, ids, temperature=temperature)
