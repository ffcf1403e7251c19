"""Corrections by hand, as values, and the same on every array library and layout."""

import math

import array_api_strict
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unskew._errors import UnskewError
from unskew.correct import METHODS, Batch, Correction, Term

RNG = np.random.default_rng(7)
B, T = 6, 17
LENGTHS = np.array([17, 1, 9, 4, 0, 12])
MASK = (np.arange(T) < LENGTHS[:, None]) & (RNG.random((B, T)) > 0.1)
ROLLOUT = -RNG.exponential(0.7, (B, T))
OLD = np.minimum(ROLLOUT + RNG.normal(0, 0.3, (B, T)), 0)
LOGP = np.minimum(OLD + RNG.normal(0, 0.2, (B, T)), 0)
ADVANTAGES = RNG.choice([-1.0, 0.0, 1.0], (B, 1)) * np.ones((1, T))
TURNS = np.broadcast_to(np.arange(T) // 5, (B, T))


def applied(text: str, **over):
    given = {"rollout": ROLLOUT, "old": OLD, "mask": MASK, "logp": LOGP, "advantages": ADVANTAGES, "turn_ids": TURNS, **over}
    return Correction.parse(text)(given.pop("rollout"), given.pop("old"), **given)


def by_hand(name: str, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log-weight, None) of each level by plain loops."""
    d = OLD - ROLLOUT
    out = np.zeros((B, T))
    for b in range(B):
        use = [t for t in range(T) if MASK[b, t]]
        for t in use:
            before = [d[b, i] for i in use if i < t]
            turn = [d[b, i] for i in use if TURNS[b, i] == TURNS[b, t]]
            out[b, t] = {
                "token": d[b, t], "seq": sum(d[b, i] for i in use), "geo": sum(d[b, i] for i in use) / len(use),
                "prefix": d[b, t] + sum(before), "minpro": d[b, t] + min(before, default=0.0), "turn": sum(turn),
            }[name]  # fmt: skip
    return out, weights


@pytest.mark.parametrize("level", ["token", "seq", "geo", "prefix", "minpro", "turn"])
def test_each_level_is_its_definition(level):
    expected, _ = by_hand(level, OLD)
    found = applied(f"{level}-is")
    np.testing.assert_allclose(found.weight[MASK], np.exp(expected)[MASK], rtol=1e-12)
    assert not found.weight[~MASK].any()
    low, high = 0.8, 1.3
    clipped = applied(f"{level}-tis({low},{high})")
    np.testing.assert_allclose(clipped.weight[MASK], np.clip(np.exp(expected), low, high)[MASK], rtol=1e-12)
    inside = MASK & (np.exp(expected) >= low) & (np.exp(expected) <= high)
    for form, weight in (("mis", np.exp(expected)), ("mask", np.ones((B, T)))):
        found = applied(f"{level}-{form}({low},{high})")
        np.testing.assert_array_equal(found.keep, inside)
        np.testing.assert_allclose(found.weight[inside], weight[inside], rtol=1e-12)


def test_kpop_and_dppo_by_hand():
    p, q = 0.9, 0.6
    forward = p * math.log(p / q) + 0.1 * math.log(0.1 / 0.4)
    backward = q * math.log(q / p) + 0.4 * math.log(0.4 / 0.1)
    one = {"rollout": np.log([[q]]), "old": np.log([[p]]), "mask": np.ones((1, 1)), "turn_ids": None}
    both = {**one, "logp": np.log([[p]]), "advantages": np.ones((1, 1))}
    larger = max(forward, backward)
    assert applied(f"kpop({larger + 1e-9})", **both).keep.all()
    assert not applied(f"kpop({larger - 1e-9})", **both).keep.any()
    assert applied("dppo-tv(0.3001)", **both).keep.all()
    assert not applied("dppo-tv(0.2999)", **both).keep.any()
    assert not applied("dppo-tv(0.1,0.2)", **both).keep.any()
    assert applied("dppo-tv(0.1,0.31)", **both).keep.all(), "the high bound is for positive advantages"
    # Moved up, advantage negative: the update brings the token back.
    assert applied("dppo-tv(0.01)", **{**both, "advantages": -np.ones((1, 1))}).keep.all()
    assert applied("dppo-kl(0.0001)", **{**both, "advantages": -np.ones((1, 1))}).keep.all()
    assert not applied(f"dppo-kl({backward - 1e-9})", **both).keep.any()
    assert applied(f"dppo-kl({backward + 1e-9})", **both).keep.all()


def test_certain_tokens_have_no_binary_kl():
    certain = {"rollout": np.zeros((1, 2)), "old": np.zeros((1, 2)), "mask": np.ones((1, 2)), "logp": None, "advantages": None}
    assert applied("kpop(0)", **certain, turn_ids=None).keep.all()
    certain["old"] = np.log([[0.5, 1.0]])
    assert applied("kpop(100)", **certain, turn_ids=None).keep.tolist() == [[False, True]], (
        "the sampler was sure, the trainer is not"
    )


def test_m2po_rejects_the_largest_until_the_rest_is_within():
    d = np.array([[0.1, 0.2, 0.3, 1.0]])
    found = applied(
        "m2po(0.04)", rollout=-2 * np.ones((1, 4)), old=-2 + d, mask=np.ones((1, 4)), logp=None, advantages=None, turn_ids=None
    )
    assert found.keep.tolist() == [[True, True, False, False]] if (0.01 + 0.04 + 0.09) / 3 > 0.04 else [[True, True, True, False]]
    nothing = applied(
        "m2po(0.001)", rollout=-2 * np.ones((1, 4)), old=-2 + d, mask=np.ones((1, 4)), logp=None, advantages=None, turn_ids=None
    )
    assert not nothing.keep.any()


def test_opsm_looks_at_negative_advantages_only():
    shape = (3, 4)
    rollout, logp = np.full(shape, -1.0), np.full(shape, -2.0)
    advantages = np.array([[1.0], [-1.0], [0.0]]) * np.ones(shape)
    found = applied(
        "opsm(0.5)", rollout=rollout, old=rollout, logp=logp, advantages=advantages, mask=np.ones(shape), turn_ids=None
    )
    assert found.keep.all(axis=1).tolist() == [True, False, True]
    swapped = applied(
        "opsm(0.5)", rollout=logp, old=logp, logp=rollout, advantages=advantages, mask=np.ones(shape), turn_ids=None
    )
    assert swapped.keep.all(), "the trainer liking the sequence more is no reason to drop it"


def test_normalised_weights_have_mean_one():
    found = applied("token-tis(1.2)+token-mask(0.5,2)+batch-norm")
    assert found.weight[found.keep].mean() == pytest.approx(1, abs=1e-12)
    found = applied("token-tis(1.2)+seq-batch-norm")
    means = [found.weight[b][found.keep[b]].mean() for b in range(B) if found.keep[b].any()]
    assert np.mean(means) == pytest.approx(1, abs=1e-12)


def test_psis_smooths_the_tail_and_keeps_the_order():
    rng = np.random.default_rng(0)
    d = rng.standard_t(2, (40, 100))
    rollout = np.full((40, 100), -20.0)
    raw, smooth = (
        applied(text, rollout=rollout, old=rollout + d, mask=np.ones((40, 100)), logp=None, advantages=None, turn_ids=None).weight
        for text in ("token-is", "token-psis")
    )
    assert smooth.max() <= raw.max() * (1 + 1e-12)
    assert (smooth != raw).sum() <= 3 * math.sqrt(4000) + 1
    order = np.argsort(raw, axis=None)
    assert (np.diff(smooth.ravel()[order]) >= -1e-12).all()


def test_psis_weights_are_those_of_the_reference_formula():
    """Quantiles (k, σ) of the fit at (i − ½)/M, added to the cutoff, cut at the largest raw weight."""
    from unskew.measure import psis, smooth_tail

    raw = np.log(np.random.default_rng(3).pareto(2.0, 3000) + 1)
    out, size = smooth_tail(raw), math.ceil(3 * math.sqrt(3000))
    ordered = np.sort(raw)
    tail = np.exp(ordered[-size:]) - np.exp(ordered[-size - 1])
    b_grid = (1 - np.sqrt((30 + int(math.sqrt(size))) / (np.arange(1, 31 + int(math.sqrt(size))) - 0.5))) / (
        3 * tail[int(size / 4 + 0.5) - 1]
    ) + 1 / tail[-1]
    k_grid = np.array([np.mean(np.log1p(-b * tail)) for b in b_grid])
    log_lik = size * (np.log(-b_grid / k_grid) - k_grid - 1)
    b = (b_grid * np.exp(log_lik - log_lik.max())).sum() / np.exp(log_lik - log_lik.max()).sum()
    k_raw = np.mean(np.log1p(-b * tail))
    k, sigma = (size * k_raw + 5) / (size + 10), -k_raw / b
    p = (np.arange(1, size + 1) - 0.5) / size
    expected = np.minimum(sigma / k * ((1 - p) ** -k - 1) + np.exp(ordered[-size - 1]), np.exp(ordered[-1]))
    np.testing.assert_allclose(np.sort(np.exp(out))[-size:], expected, rtol=1e-9)
    assert psis(raw).khat == pytest.approx(k, rel=1e-9)


TEXTS = [str(Term(name)) for name in METHODS] + ["token-tis(2)+geo-mask(0.9,1.1)+veto(0.0001)+batch-norm"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("library", ["torch", "strict"])
def test_every_library_gives_numpys_numbers(text, library):
    def convert(values):
        if library == "strict":
            return array_api_strict.asarray(values)
        return pytest.importorskip("torch").from_numpy(np.array(values))

    expected = applied(text)
    over = {"rollout": ROLLOUT, "old": OLD, "mask": MASK, "logp": LOGP, "advantages": ADVANTAGES, "turn_ids": TURNS}
    found = applied(text, **{name: convert(np.ascontiguousarray(values)) for name, values in over.items()})
    np.testing.assert_allclose(np.asarray(found.weight), expected.weight, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(np.asarray(found.keep), expected.keep)


@pytest.mark.parametrize("text", TEXTS)
def test_packed_is_padded(text):
    inside = np.arange(T) < LENGTHS[:, None]
    cu = np.concatenate([[0], np.cumsum(LENGTHS)])
    over = {"rollout": ROLLOUT, "old": OLD, "mask": MASK, "logp": LOGP, "advantages": ADVANTAGES, "turn_ids": TURNS}
    packed = applied(text, **{name: np.ascontiguousarray(values[inside]) for name, values in over.items()}, cu_seqlens=cu)
    padded = applied(text)
    np.testing.assert_array_equal(packed.weight, padded.weight[inside])
    np.testing.assert_array_equal(packed.keep, padded.keep[inside])


@pytest.mark.parametrize("text", TEXTS)
def test_weights_carry_no_gradient_and_masked_tokens_no_influence(text):
    torch = pytest.importorskip("torch")
    over = {"rollout": ROLLOUT, "old": OLD, "mask": MASK, "logp": LOGP, "advantages": ADVANTAGES, "turn_ids": TURNS}
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in over.items()}
    for name in ("rollout", "old", "logp"):
        tensors[name] = torch.where(tensors["mask"], tensors[name], torch.nan).requires_grad_()
    found = applied(text, **tensors)
    assert not found.weight.requires_grad
    clean = {name: torch.from_numpy(np.array(values)) for name, values in over.items()}
    np.testing.assert_array_equal(found.weight.numpy(), applied(text, **clean).weight.numpy())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_low_precision_inputs_are_summed_in_high(dtype):
    found = applied("seq-is", rollout=ROLLOUT.astype(dtype), old=OLD.astype(dtype))
    wide = applied("seq-is", rollout=ROLLOUT.astype(dtype).astype(np.float64), old=OLD.astype(dtype).astype(np.float64))
    np.testing.assert_allclose(found.weight, wide.weight, rtol=2e-6)
    assert found.weight.dtype == np.float32


def test_huge_ratios_overflow_to_infinity_and_bounds_hold():
    rollout, old = np.array([[-1e4, -1.0]]), np.array([[-1.0, -1e4]])
    one = {"mask": np.ones((1, 2)), "logp": None, "advantages": None, "turn_ids": None}
    assert applied("token-is", rollout=rollout, old=old, **one).weight.tolist() == [[math.inf, 0.0]]
    assert applied("token-tis(2)", rollout=rollout, old=old, **one).weight.tolist() == [[2.0, 0.0]]
    assert applied("seq-is", rollout=rollout, old=old, **one).weight.tolist() == [[1.0, 1.0]]


def test_non_finite_log_ratios_are_rejected_and_reported():
    old = OLD.copy()
    old[0, 0], old[2, 3] = np.nan, -np.inf
    mask = np.ones((B, T), bool)
    found = applied("token-tis(2)", old=old, mask=mask)
    assert found.non_finite.sum() == 2
    assert not found.keep[found.non_finite].any()
    assert found.keep.sum() == B * T - 2
    whole = applied("seq-tis(2)", old=old, mask=mask)
    assert whole.keep.all(axis=1).tolist() == [False, True, False, True, True, True], (
        "a product with an unknown factor is unknown"
    )


def test_corrections_compose_in_any_order():
    terms = ["token-tis(2)", "geo-mask(0.9,1.1)", "veto(0.001)", "batch-norm"]
    first, last = applied("+".join(terms)), applied("+".join(reversed(terms)))
    np.testing.assert_array_equal(first.weight, last.weight)
    assert Correction.parse("token-tis(2)") + Correction.parse("veto(0.001)") == Correction.parse("token-tis(2)+veto(0.001)")


numbers = st.floats(1e-6, 1e6).map(lambda x: float(f"{x:.6g}"))


@settings(max_examples=200)
@given(st.lists(st.sampled_from(sorted(METHODS)), max_size=4), st.data())
def test_what_is_printed_parses_to_the_same_value(names, data):
    terms = []
    for name in names:
        size = data.draw(st.sampled_from([len(takes) for takes in METHODS[name].takes]))
        terms.append(Term(name, tuple(sorted(data.draw(st.lists(numbers, min_size=size, max_size=size))))))
    weighting = [t for t in terms if t.method.form in ("is", "tis", "mis", "psis")]
    norms = [t for t in terms if t.method.form == "batch-norm"]
    assume(len(weighting) < 2 and len(norms) < 2)
    correction = Correction(tuple(terms))
    assert Correction.parse(str(correction)) == correction


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("token-tsi(2)", "did you mean token-tis"), ("token-tis(2", "cannot read"), ("token-tis(a)", "cannot read the numbers"),
        ("token-tis(1,2,3)", "3 arguments"), ("geo-mask(2,1)", "bounds must rise"), ("token-tis(2)+seq-tis(2)", "one importance weight"),
        ("batch-norm+seq-batch-norm", "one normalisation"), ("veto(nan)", "bounds must rise"), ("+", "cannot read"),
    ],
)  # fmt: skip
def test_wrong_corrections_say_what_is_wrong(text, says):
    with pytest.raises(UnskewError) as error:
        Correction.parse(text)
    assert says in f"{error.value} {error.value.hint}"
    assert error.value.exit_code == 2


@pytest.mark.parametrize("name", ["opsm(0.1)", "dppo-tv", "turn-is"])
def test_a_missing_array_is_named(name):
    with pytest.raises(UnskewError, match=r"needs (advantages|turn_ids)"):
        applied(name, advantages=None, turn_ids=None)


def test_shapes_that_do_not_fit():
    with pytest.raises(UnskewError, match="mask has shape"):
        applied("token-tis(2)", mask=MASK[:2])
    with pytest.raises(UnskewError, match="beside log-probs"):
        applied("token-tis(2)", old=OLD[:2])
    with pytest.raises(UnskewError, match="cu_seqlens must rise"):
        applied(
            "token-tis(2)",
            rollout=ROLLOUT[0],
            old=OLD[0],
            mask=MASK[0],
            logp=None,
            advantages=None,
            turn_ids=None,
            cu_seqlens=[0, 3],
        )


@pytest.mark.parametrize("text", TEXTS)
def test_blocks_of_rows_change_nothing(text, monkeypatch):
    whole = applied(text)
    monkeypatch.setattr("unskew.correct._correction._BLOCK", 2 * T)
    blocks = applied(text)
    np.testing.assert_array_equal(blocks.weight, whole.weight)
    np.testing.assert_array_equal(blocks.keep, whole.keep)


def test_empty_batches():
    none = {"logp": None, "advantages": None, "turn_ids": None}
    for shape in ((0, 0), (0, 5), (3, 0)):
        empty = np.zeros(shape)
        for text in ("token-tis(2)", "seq-mis(2)+geo-mask+veto+batch-norm", "seq-max-k3", "m2po", "prefix-tis", "minpro-tis"):
            assert applied(text, rollout=empty, old=empty, mask=empty, **none).weight.shape == shape
    packed = applied("seq-tis(2)", rollout=np.zeros(0), old=np.zeros(0), mask=np.zeros(0), cu_seqlens=[0, 0], **none)
    assert packed.weight.shape == (0,)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_corrections_compile_without_graph_breaks():
    torch = pytest.importorskip("torch")
    correction = Correction.parse("token-tis(2)+geo-mask(0.9,1.1)+veto(0.0001)+batch-norm")

    def weights(rollout, old, mask):
        return correction(rollout, old, mask=mask).weight

    tensors = [torch.from_numpy(np.array(x)) for x in (ROLLOUT, OLD, MASK)]
    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), weights(*tensors))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "text",
    [
        "none",
        "token-is",
        "token-tis(2)",
        "token-tis(0.5,2)",
        "token-mis(0.5,2)",
        "token-mask(0.9,1.1)",
        "icepop(0.5,5)+token-mask(0.8,2)",
    ],
)
def test_the_compiled_pass_gives_what_the_array_functions_give(text, dtype):
    pytest.importorskip("numba")
    rng = np.random.default_rng(3)
    rollout = -rng.exponential(1.0, (130, 2100)).astype(dtype)
    old = (rollout + rng.normal(0, 0.5, rollout.shape)).astype(dtype)
    mask = rng.random(rollout.shape) > 0.1
    for place, value in (
        ((0, 3), np.nan),
        ((1, 7), -np.inf),
        ((2, 2099), 800.0),
        ((3, 0), -800.0),
        ((4, 5), 90.0),
        ((5, 6), -60.0),
    ):
        old[place] = value
    rollout[6, 6] = rollout[6, 7] = np.nan
    mask[:7, :8] = mask[2, 2099] = True
    mask[6, 7] = False
    old[7, 7], rollout[7, 7] = np.log(np.asarray(2, dtype)), 0
    correction = Correction.parse(text)
    found, expected = correction(rollout, old, mask=mask.astype(np.float32)), correction.apply(Batch.of(rollout, old, mask=mask))
    np.testing.assert_array_equal(found.keep, expected.keep)
    np.testing.assert_array_equal(found.non_finite, expected.non_finite)
    np.testing.assert_allclose(found.weight, expected.weight, rtol=3e-7 if dtype == "float32" else 1e-15, atol=1e-300)
    assert found.weight.dtype == expected.weight.dtype
