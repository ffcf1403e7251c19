from fractions import Fraction
from math import exp, expm1, factorial

import array_api_compat  # noqa: F401
import numpy as np
import pytest

from unskew.measure import chi2, k1, k2, k3, k3_reverse, psis


def exact_k3(d):
    """e^d − 1 − d of one float by its series in exact rational arithmetic."""
    d = Fraction(float(d))
    return float(sum((d**n / factorial(n) for n in range(2, 24)), Fraction(0))) if abs(d) < 1 else expm1(float(d)) - float(d)


@pytest.mark.parametrize("sd", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 3.0])
def test_float32_k3_and_chi2_are_right_within_a_percent(sd):
    d = np.random.default_rng(0).normal(0, sd, 3000).astype(np.float32)
    truth = np.mean([exact_k3(x) for x in d])
    assert np.mean(k3(d), dtype=np.float64) == pytest.approx(truth, rel=0.01)
    assert (k3(d) >= 0).all()
    if sd <= 1e-4:  # the textbook form is not
        assert abs(np.mean(np.exp(d) - d - np.float32(1), dtype=np.float64) - truth) > 0.01 * truth
    chi2_truth = np.mean([expm1(2 * float(x)) for x in d])
    assert np.mean(chi2(d), dtype=np.float64) == pytest.approx(chi2_truth, rel=0.01)


@pytest.mark.parametrize("d", [-8.0, -1.0, -0.13, -0.12, -1e-3, 0.0, 1e-4, 0.12, 0.13, 2.0, 8.0])
def test_closed_forms_at_points(d):
    x = np.asarray(d)
    assert float(k1(x)) == -d
    assert float(k2(x)) == d * d / 2
    assert float(k3(x)) == pytest.approx(exact_k3(d), rel=1e-9, abs=1e-300)
    reverse = exp(d) * d - expm1(d)
    assert float(k3_reverse(x)) == pytest.approx(reverse, rel=1e-5, abs=1e-16)


def test_numpy_and_torch_give_the_same():
    torch = pytest.importorskip("torch")
    d = np.random.default_rng(1).normal(0, 0.5, 1000)
    for f in (k1, k2, k3, k3_reverse, chi2):
        np.testing.assert_allclose(f(torch.from_numpy(d)).numpy(), f(d), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.8, 1.2])
def test_khat_recovers_the_shape_of_pareto_weights(shape):
    log_weights = shape * np.random.default_rng(2).exponential(size=200_000)
    assert psis(log_weights).khat == pytest.approx(shape, abs=0.08)


def test_khat_does_not_depend_on_scale_and_knows_when_it_cannot_tell():
    d = np.random.default_rng(3).normal(0, 0.3, 5000)
    assert psis(d + 500).khat == pytest.approx(psis(d).khat, abs=1e-9)
    assert np.isnan(psis(np.zeros(10)).khat)
    assert psis(np.zeros(1000)).khat == -np.inf
    assert psis(1.5 * np.random.default_rng(4).exponential(size=10_000)).n_needed == np.inf
