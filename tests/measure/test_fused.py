"""The compiled scan gives the numpy scan's counts bit by bit and its sums within rounding."""

from dataclasses import fields

import numpy as np
import pytest

import unskew.measure._state as state
from unskew.measure import MismatchState

pytest.importorskip("numba")
EXACT = {"n_tokens", "n_sequences", "n_clusters", "n_masked", "n_nan", "n_inf", "counts", "histogram", "above", "max_abs", "top"}


def batch(seed: int, *, n: int, sequences: int, dtype, sd: float, odd: bool, masked: float, more: bool):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(0.7, n)
    old = rollout + rng.normal(0, sd, n)
    if odd:
        for value in (np.nan, np.inf, -np.inf):
            rollout[rng.integers(0, n, 20)] = value
            old[rng.integers(0, n, 20)] = value
        old[rng.integers(0, n, 50)] = rng.uniform(30, 1e4, 50)
        old[rng.integers(0, n, 50)] = rng.uniform(-1e4, -30, 50)
    given = {"mask": rng.random(n) >= masked, "cu_seqlens": np.sort(np.concatenate([[0, n], rng.integers(0, n, sequences - 1)]))}
    if more:
        entropy = rng.exponential(1, n)
        entropy[rng.integers(0, n, n // 20)] = np.nan
        given |= {"entropy": entropy.astype(dtype), "noise_scale": rng.random(n).astype(dtype)}
    return rollout.astype(dtype), old.astype(dtype), given


@pytest.mark.parametrize("sd", [1e-6, 0.02, 0.3, 3.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "sequences"), [(1, 1), (3000, 700), (600_000, 50)])
@pytest.mark.parametrize(("odd", "masked", "more"), [(False, 0.0, False), (True, 0.3, True)])
def test_compiled_is_numpy(monkeypatch, sd, dtype, n, sequences, odd, masked, more):
    rollout, old, given = batch(n, n=n, sequences=sequences, dtype=dtype, sd=sd, odd=odd, masked=masked, more=more)
    monkeypatch.setattr(state, "_COMPILED", 1 << 60)
    plain = MismatchState.from_packed(rollout, old, probabilities=True, **given)
    monkeypatch.setattr(state, "_COMPILED", 0)
    compiled = MismatchState.from_packed(rollout, old, probabilities=True, **given)
    if not odd:
        np.testing.assert_allclose(compiled.sums[16:], plain.sums[16:], rtol=1e-12)
    for field in fields(plain):
        a, b = np.asarray(getattr(plain, field.name)), np.asarray(getattr(compiled, field.name))
        if field.name.startswith("top"):
            a, b = np.sort(a), np.sort(b)
        if field.name in EXACT:
            np.testing.assert_array_equal(a, b, field.name)
        else:
            size = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
            np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-12 * size, err_msg=field.name)
