from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unskew.diagnose._floor import FLOORS, dtype_name, logit_noise, side_floor
from unskew.diagnose._search import shapley


def coalitions(n):
    return [frozenset(c) for c in chain.from_iterable(combinations(range(n), k) for k in range(n + 1))]


@given(st.lists(st.floats(-2, 2), min_size=8, max_size=8))
def test_shapley_shares_add_up_to_the_whole(values):
    table = dict(zip(coalitions(3), map(np.asarray, values), strict=True))
    shares = shapley(table, 3)
    assert shares.sum() == pytest.approx(values[-1] - values[0], abs=1e-9)


def test_shapley_of_additive_players_is_their_own_worth():
    worth = [0.5, 0.2, 0.1]
    table = {c: np.asarray(sum(worth[k] for k in c)) for c in coalitions(3)}
    np.testing.assert_allclose(shapley(table, 3), worth)


def test_logit_noise_recovers_the_noise_put_on_the_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (4000, 50))
    noisy = logits + rng.normal(0, 0.01, logits.shape)

    def log_softmax(z):
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    clean = log_softmax(logits)
    y = np.array([rng.choice(50, p=np.exp(row)) for row in clean])
    p = np.exp(clean)
    p_y = p[np.arange(4000), y]
    scale = np.sqrt((1 - p_y) ** 2 + (p**2).sum(-1) - p_y**2)
    d = (log_softmax(noisy) - clean)[np.arange(4000), y]
    assert logit_noise(d, scale) == pytest.approx(0.01, rel=0.04)


def test_floor_is_the_declared_dtypes_and_inferred_where_none_is_declared():
    assert side_floor("bf16", {}, 1e-6).dtype == "bfloat16"
    assert side_floor("bf16", {"bfloat16": 0.02}, 1e-6).sigma == 0.02
    assert side_floor(None, {}, 1e-6).dtype == "float32"
    assert side_floor(None, {}, 0.03).dtype == "bfloat16"
    assert side_floor("auto", {}, 5e-3).dtype == "float16"
    assert side_floor("float32", {}, 1.0).sigma == FLOORS["float32"]
    assert dtype_name("fp8_e4m3") is None
