"""Record causes on traces small enough to work out by hand: what `read` and `propose` say, and what `intervene` does."""

import numpy as np
import pytest

from unskew.causes import CAUSES, Facts, Gap
from unskew.diagnose import ModelCounterfactual
from unskew.diagnose._counterfactual import RecordCounterfactual
from unskew.score import HFScorer, Inputs
from unskew.trace import Trace

EOS, PAD, DOT = 3, 0, 4
KNOWN = Facts(bos_id=1, pad_id=PAD, eos_ids=(EOS,))
NAN = float("nan")


def of(*responses, logp=None, **columns):
    """A trace of these responses; a column is one value a row, a log-prob of −0.5 − position where none is given."""
    logp = logp or [[-0.5 - t for t in range(len(ids))] for ids in responses]
    rows = [{"response_ids": ids, "rollout_logp": values} for ids, values in zip(responses, logp, strict=True)]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return Trace.from_rows(rows)


def read(cause, trace, facts=KNOWN):
    return list(CAUSES[cause].read(trace, facts))


def changed(cause, logp, trace, **parameters):
    """Log-probs after the `logp` change, and a check that the given ones stay as they were."""
    given = np.array(logp, np.float64)
    out = CAUSES[cause].intervene(**parameters).logp(given, trace)
    np.testing.assert_array_equal(given, logp)
    return out


def sampled(cause, trace, facts=KNOWN, **parameters):
    return CAUSES[cause].intervene(**parameters).sampled(trace, facts)


def gap_of(trace, clean, counterfactual=None):
    """The gap between `rollout_logp` and these clean log-probs, even weights, a block a row."""
    clean = np.asarray(clean, np.float64)
    return Gap(
        trace=trace, side="rollout", recorded=trace.tokens("rollout_logp").astype(np.float64), clean=clean, keep=trace.mask,
        weight=np.ones(trace.n_tokens), block=trace.row_of_token, counterfactual=counterfactual or RecordCounterfactual(trace, clean),
        accepted=(), predicted=clean, entropy=None, uniform=np.ones(trace.n_tokens, bool),
    )  # fmt: skip


def proposed(cause, trace, clean):
    return list(CAUSES[cause].propose(gap_of(trace, clean)))


def flat(trace, values):
    """One list of numbers a row, for `of(logp=…)`."""
    return [part.tolist() for part in np.split(np.asarray(values, np.float64), trace.cu_seqlens[1:-1])]


def varied(n, seed=0):
    return -np.round(np.random.default_rng(seed).gamma(1.0, 1.0, n) + 0.01, 4)


# shift


def test_a_shift_takes_values_of_later_positions_of_the_same_row():
    trace = of([7, 8, 9], [7, 8], [9])
    np.testing.assert_array_equal(changed("record.shift", [-1, -2, -3, -4, -5, -6], trace, lag=1), [-2, -3, NAN, -5, NAN, NAN])
    np.testing.assert_array_equal(changed("record.shift", [-1, -2, -3, -4, -5, -6], trace, lag=-1), [NAN, -1, -2, NAN, -4, NAN])
    np.testing.assert_array_equal(changed("record.shift", [-1, -2, -3, -4, -5, -6], trace, lag=2), [-3, NAN, NAN, NAN, NAN, NAN])


@pytest.mark.parametrize("lag", [-2, -1, 1, 3])
def test_a_shift_is_proposed_with_its_lag(lag):
    ids = [[5] * 12, [6] * 9]
    clean = varied(21)
    moved = CAUSES["record.shift"].intervene(lag=lag).logp(clean, of(*ids))
    recorded = np.where(np.isnan(moved), -0.3, moved)
    (found,) = proposed("record.shift", of(*ids, logp=flat(of(*ids), recorded)), clean)
    assert found.parameters == {"lag": lag}


def test_no_shift_is_proposed_where_the_streams_agree_or_differ_by_noise():
    ids = [[5] * 12, [6] * 9]
    clean = varied(21)
    for recorded in (clean, clean - 0.1, varied(21, seed=1)):
        assert not proposed("record.shift", of(*ids, logp=flat(of(*ids), recorded)), clean)


# synthetic EOS


def test_a_synthetic_eos_fills_the_last_token_of_every_row():
    np.testing.assert_array_equal(
        changed("record.synthetic-eos", [-1, -2, -3, -4], of([7, 8, EOS], [EOS]), value=0.0), [-1, -2, 0, 0]
    )


def test_a_synthetic_eos_leaves_empty_rows_alone():
    trace = of([7, 8], [], [9], [])
    np.testing.assert_array_equal(changed("record.synthetic-eos", [-1, -2, -3], trace, value=-0.5), [-1, -0.5, -0.5])


def test_the_lab_appends_an_eos_of_log_prob_0():
    out = sampled("record.synthetic-eos", of([7, 8], [9]), value=0.0)
    assert out.rows("response_ids") == [[7, 8, EOS], [9, EOS]]
    assert out.rows("rollout_logp") == [[-0.5, -1.5, 0.0], [-0.5, 0.0]]


def test_a_synthetic_eos_is_proposed_where_all_last_tokens_share_a_wrong_value():
    clean = [-1, -1, -3, -1, -4, -1, -1, -5]
    ids = ([7, 8, EOS], [7, EOS], [7, 8, EOS])
    (found,) = proposed("record.synthetic-eos", of(*ids, logp=[[-1, -1, 0], [-1, 0], [-1, -1, 0]]), clean)
    assert found.parameters == {"value": 0.0}


@pytest.mark.parametrize(
    ("last", "clean"),
    [((0, -0.25, -0.75), (-3, -4, -5)), ((0, 0, 0), (-0.01, -0.02, -0.03)), ((-3, -4, -5), (-3, -4, -5))],
    ids=["they vary", "the constant is right", "they agree"],
)
def test_no_synthetic_eos_is_proposed_where(last, clean):
    ids = ([7, 8, EOS], [7, EOS], [7, 8, EOS])
    logp = [[-1, -1, last[0]], [-1, last[1]], [-1, -1, last[2]]]
    assert not proposed("record.synthetic-eos", of(*ids, logp=logp), [-1, -1, clean[0], -1, clean[1], -1, -1, clean[2]])


# filled log-probs


def test_filled_log_probs_stand_at_every_so_many_tokens_of_the_batch():
    np.testing.assert_array_equal(
        changed("record.filled-logp", [-1, -2, -3, -4, -5], of([7, 8, 9], [7, 8]), value=0.0, every=2), [0, -2, 0, -4, 0]
    )


def test_filled_log_probs_cannot_be_planted_without_a_place():
    with pytest.raises(TypeError, match="every"):
        CAUSES["record.filled-logp"].intervene(value=0.0)


def test_filled_log_probs_are_read_on_each_side_with_their_kinds():
    trace = of([7, 8, 9, 5], logp=[[-1.0, -np.inf, -1.0, -1000.0]], old_logp=[[NAN, -1.0, -1.0, -1.0]])
    rollout, trainer = read("record.filled-logp", trace)
    assert (rollout.side, trainer.side) == ("rollout", "trainer")
    assert rollout.tokens.tolist() == [1, 3]
    assert "1 × inf" in rollout.says[0]
    assert "1 × ≤ −999" in rollout.says[0]
    assert rollout.parameters == {"share": 0.5}
    assert trainer.drop.tolist() == [True, False, False, False]
    assert "1 × NaN among 4" in trainer.says[0]


def test_filled_log_probs_outside_the_mask_or_merely_low_are_not_read():
    assert not read("record.filled-logp", of([7, 8, 9], logp=[[-1.0, NAN, -np.inf]], mask=[[1, 0, 0]]))
    assert not read("record.filled-logp", of([7, 8], logp=[[-998.5, 0.0]]))


def test_filled_log_probs_are_proposed_where_a_value_repeats_away_from_the_other_side():
    clean = np.full(10, -2.0)
    trace = of([7] * 6, [8] * 4, logp=[[-2, -0.25, -2, -0.25, -2, -2], [-2, -0.25, -2, -2]])
    (found,) = proposed("record.filled-logp", trace, clean)
    assert found.parameters == {"value": -0.25, "share": 0.3}
    np.testing.assert_array_equal(found.logp(clean, trace), [-2, -0.25, -2, -0.25, -2, -2, -2, -0.25, -2, -2])


def test_filled_log_probs_are_not_proposed_for_two_tokens_for_last_tokens_or_where_the_value_is_right():
    cause, ids = "record.filled-logp", ([7] * 4, [8] * 4, [9] * 4)
    two = of(*ids, logp=[[-2, 0, -2, -2], [-2, 0, -2, -2], [-2, -2, -2, -2]])
    ends = of(*ids, logp=[[-2, -2, -2, 0]] * 3)
    right = of(*ids, logp=[[-2, 0, -2, -2]] * 3)
    assert not proposed(cause, two, np.full(12, -2.0))
    assert not proposed(cause, ends, np.full(12, -2.0))
    assert not proposed(cause, right, np.tile([-2, -0.01, -2, -2], 3))
    assert proposed(cause, right, np.full(12, -2.0))


# row order


def test_permuted_rows_take_their_neighbours_values_cut_and_padded():
    trace = of([7, 8], [7, 8, 9], [7])
    np.testing.assert_array_equal(changed("record.row-order", [-1, -2, -3, -4, -5, -6], trace, step=1), [-6, 0, -1, -2, 0, -3])


def test_permuted_rows_are_proposed_and_undone():
    ids = [[5 + row] * 8 for row in range(6)]
    clean = varied(48)
    recorded = CAUSES["record.row-order"].intervene(step=2).logp(clean, of(*ids))
    trace = of(*ids, logp=flat(of(*ids), recorded))
    (found,) = proposed("record.row-order", trace, clean)
    assert found.parameters == {"rows_moved": 6}
    np.testing.assert_allclose(found.logp(clean, trace), recorded)


def test_permuted_rows_are_not_proposed_for_rows_in_place_two_rows_or_rows_of_nowhere():
    ids = [[5 + row] * 8 for row in range(6)]
    clean = varied(48)
    assert not proposed("record.row-order", of(*ids, logp=flat(of(*ids), clean + 0.1)), clean)
    assert not proposed("record.row-order", of(*ids, logp=flat(of(*ids), varied(48, seed=1))), clean)
    assert not proposed("record.row-order", of(*ids[:2], logp=[clean[8:16].tolist(), clean[:8].tolist()]), clean[:16])


# unit


@pytest.mark.parametrize(("unit", "expected"), [("bits", [-2, -1, -3]), ("base 10", np.log10([0.25, 0.5, 0.125]))])
def test_a_unit_is_another_base_of_the_logarithm(unit, expected):
    trace = of([7, 8, 9])
    np.testing.assert_allclose(changed("record.logp-unit", np.log([0.25, 0.5, 0.125]), trace, unit=unit), expected)


def test_base_10_of_a_hundredth_is_minus_2():
    np.testing.assert_allclose(changed("record.logp-unit", np.log([0.01]), of([7]), unit="base 10"), [-2])


@pytest.mark.parametrize("unit", ["bits", "base 10"])
def test_a_unit_is_proposed_from_the_slope(unit):
    clean = varied(12)
    recorded = CAUSES["record.logp-unit"].intervene(unit=unit).logp(clean, of([7] * 12))
    (found,) = proposed("record.logp-unit", of([7] * 12, logp=[recorded.tolist()]), clean)
    assert found.parameters == {"unit": unit}


@pytest.mark.parametrize("factor", [1.0, 1.2, 2.0, 0.7])
def test_no_unit_is_proposed_for_nats_or_a_factor_of_no_base(factor):
    clean = varied(12)
    assert not proposed("record.logp-unit", of([7] * 12, logp=[(factor * clean).tolist()]), clean)


def test_a_cut_off_prediction_does_not_hide_the_unit():
    clean = varied(12)
    recorded = clean / np.log(2)
    clean[3] = -np.inf
    (found,) = proposed("record.logp-unit", of([7] * 12, logp=[recorded.tolist()]), clean)
    assert found.parameters == {"unit": "bits"}


# chunk boundaries


def test_a_chunk_boundary_is_counted_from_the_start_of_the_prompt():
    # Positions in prompt and response: 2–6 and 1–3; boundaries at 4 and none, values of four tokens before, less 1 nat.
    trace = of([7] * 5, [8] * 3, prompt_ids=[[1, 2], [1]])
    logp = [-1, -2, -3, -4, -5, -6, -7, -8]
    np.testing.assert_array_equal(
        changed("record.chunk-boundary", logp, trace, period=4, offset=0), [-1, -2, -2, -4, -5, -6, -7, -8]
    )
    # Offset 2: position 2 and 6 of the first row, 2 of the second; four before token 6 is token 2, before 0 is 0 itself.
    np.testing.assert_array_equal(
        changed("record.chunk-boundary", logp, trace, period=4, offset=2), [-2, -2, -3, -4, -2, -6, -4, -8]
    )


def test_a_chunk_boundary_without_prompts_is_counted_in_the_response():
    np.testing.assert_array_equal(
        changed("record.chunk-boundary", [-1, -2, -3, -4, -5], of([7] * 5), period=2, offset=1), [-1, -2, -3, -3, -5]
    )


LONG = {"prompt_ids": [[1, 2, 5], [1], [1, 2, 5, 6]]}
POSITIONS = np.concatenate([np.arange(len(p), len(p) + 24) for p in LONG["prompt_ids"]])
IN_RESPONSE = np.tile(np.arange(24), 3)


def gapped(where, size=0.8):
    clean = varied(72)
    return of(*[[7] * 24] * 3, logp=flat(of(*[[7] * 24] * 3), clean - size * where), **LONG), clean


def test_a_chunk_boundary_is_proposed_with_period_and_offset():
    trace, clean = gapped(POSITIONS % 7 == 3)
    (found,) = proposed("record.chunk-boundary", trace, clean)
    assert found.parameters == {"period": 7, "offset": 3}
    np.testing.assert_array_equal(np.isnan(found.logp(clean, trace)), POSITIONS % 7 == 3)


def test_a_chunk_boundary_of_the_response_is_found_where_prompts_differ_in_length():
    trace, clean = gapped(IN_RESPONSE % 6 == 5)
    (found,) = proposed("record.chunk-boundary", trace, clean)
    assert found.parameters == {"period": 6, "offset": 5}


def test_no_chunk_boundary_is_proposed_for_scattered_tokens_one_position_or_gaps_everywhere():
    scattered = np.isin(np.arange(72), [1, 4, 11, 20, 29, 33, 38, 50, 57, 65])
    for where in (scattered, IN_RESPONSE == 10, np.ones(72), np.zeros(72)):
        assert not proposed("record.chunk-boundary", *gapped(where))


def test_no_chunk_boundary_is_proposed_where_tokens_at_the_boundary_agree():
    half = (POSITIONS % 4 == 0) & (np.arange(72) % 24 < 12)
    assert not proposed("record.chunk-boundary", *gapped(half))


# row pairing and wrong token: these ask a model


def test_paired_rows_take_the_prompt_of_an_earlier_row():
    inputs = Inputs([np.array([1]), np.array([2, 2]), np.array([5])], [np.array([7]), np.array([8]), np.array([9])])
    out = CAUSES["record.row-pairing"].intervene(step=1).inputs(inputs, of([7], [8], [9]), KNOWN)
    assert [prompt.tolist() for prompt in out.prompts] == [[5], [1], [2, 2]]
    assert [response.tolist() for response in out.responses] == [[7], [8], [9]]
    assert [prompt.tolist() for prompt in inputs.prompts] == [[1], [2, 2], [5]]
    whole = CAUSES["record.row-pairing"].intervene(step=3).inputs(inputs, of([7], [8], [9]), KNOWN)
    assert [prompt.tolist() for prompt in whole.prompts] == [[1], [2, 2], [5]]


@pytest.fixture(scope="module")
def scorer():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=19, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return HFScorer(model)


@pytest.fixture(scope="module")
def clean_rows(scorer):
    """A trace of random ids, its log-probs under the model, and the counterfactual that computes them."""
    rng = np.random.default_rng(8)
    trace = of(
        *rng.integers(0, 19, (8, 6)).tolist(), prompt_ids=[rng.integers(0, 19, n).tolist() for n in (3, 5, 4, 6, 2, 7, 4, 5)]
    )
    counterfactual = ModelCounterfactual(trace, {"": lambda: scorer}, facts=KNOWN)
    return trace, counterfactual.predict([[]])[0], counterfactual


@pytest.mark.parametrize("step", [1, 3, 6])
def test_paired_rows_are_proposed_with_their_step(scorer, clean_rows, step):
    trace, clean, counterfactual = clean_rows
    prompts = trace.ragged("prompt_ids")
    rolled = [prompts[(row - step) % 8] for row in range(8)]
    recorded = scorer.forward(rolled, trace.ragged("response_ids")).scores().logp
    assert np.abs(recorded - clean).mean() > 0.1
    gap = gap_of(trace.with_tokens(rollout_logp=recorded), clean, counterfactual)
    (found,) = CAUSES["record.row-pairing"].propose(gap)
    assert found.parameters == {"step": step}
    np.testing.assert_allclose(counterfactual.predict([[found]])[0], recorded, atol=1e-5)


def test_paired_rows_are_not_proposed_where_rows_have_their_own_prompts_or_no_prompt_helps(clean_rows):
    trace, clean, counterfactual = clean_rows
    for recorded in (clean, clean + 0.01, clean / np.log(2)):
        gap = gap_of(trace.with_tokens(rollout_logp=recorded), clean, counterfactual)
        assert not list(CAUSES["record.row-pairing"].propose(gap))


def test_the_wrong_token_is_the_likeliest_of_its_position(scorer, clean_rows):
    import torch

    trace, clean, counterfactual = clean_rows
    predicted = counterfactual.predict([[CAUSES["record.wrong-token-logp"].intervene()]])[0]
    expected = []
    for prompt, response in zip(trace.ragged("prompt_ids"), trace.ragged("response_ids"), strict=True):
        with torch.no_grad():
            logits = scorer.model(torch.tensor(np.concatenate([prompt, response]))[None]).logits[0, len(prompt) - 1 : -1]
        expected += logits.log_softmax(-1).max(-1).values.tolist()
    np.testing.assert_allclose(predicted, expected, atol=1e-5)
    assert (predicted >= clean - 1e-6).all()
    assert (predicted > clean + 0.1).any()


def test_the_engine_is_not_set_otherwise_for_the_wrong_token():
    assert CAUSES["record.wrong-token-logp"].switches() == {}


# prompts in the mask


def test_the_lab_puts_prompts_into_responses_and_masks():
    trace = of([7, 8], [9], prompt_ids=[[1, 2, 5], [1, 6]], mask=[[1, 1], [1]], old_logp=[[-1.0, -2.0], [-3.0]])
    out = CAUSES["record.prompt-in-mask"].intervene().rows(trace)
    assert out.rows("response_ids") == [[1, 2, 5, 7, 8], [1, 6, 9]]
    assert out.rows("rollout_logp") == [[0.0, 0.0, 0.0, -0.5, -1.5], [0.0, 0.0, -0.5]]
    assert out.rows("old_logp") == [[0.0, 0.0, 0.0, -1.0, -2.0], [0.0, 0.0, -3.0]]
    assert out.mask.all()
    assert not read("record.prompt-in-mask", trace)
    (reading,) = read("record.prompt-in-mask", out)
    assert reading.tokens.tolist() == [0, 1, 2, 5, 6]
    assert reading.parameters == {"tokens": 5}


def test_prompts_before_a_response_but_outside_its_mask_are_fine():
    prompts = [[1, 2], [1, 2]]
    assert not read("record.prompt-in-mask", of([1, 2, 7], [1, 2, 8], prompt_ids=prompts, mask=[[0, 0, 1]] * 2))
    (reading,) = read("record.prompt-in-mask", of([1, 2, 7], [1, 2, 8], prompt_ids=prompts, mask=[[0, 1, 1]] * 2))
    assert reading.drop.tolist() == [False, True, False] * 2


def test_prompts_are_not_looked_for_without_prompt_ids_or_segments():
    assert not read("record.prompt-in-mask", of([1, 2, 7], [1, 2, 8]))


@pytest.mark.parametrize(("bad", "speaks"), [(1, False), (2, True)])
@pytest.mark.parametrize(
    ("cause", "segment"), [("prompt-in-mask", 0), ("padding-in-mask", 4), ("tool-in-mask", 2), ("tool-in-mask", 3)]
)
def test_a_mask_is_wrong_where_more_than_a_tenth_of_the_rows_are(cause, segment, bad, speaks):
    segments = [[1, 1, segment]] * bad + [[1, 1, 1]] * (10 - bad)
    found = read(f"record.{cause}", of(*[[7, 8, 9]] * 10, segment_ids=segments, mask=[[1, 1, 1]] * 10))
    assert bool(found) == speaks
    assert not found or found[0].tokens.tolist() == [2, 5]


@pytest.mark.parametrize(
    ("cause", "segment"), [("prompt-in-mask", 0), ("padding-in-mask", 4), ("tool-in-mask", 2), ("tool-in-mask", 3)]
)
def test_segments_that_the_mask_leaves_out_are_fine(cause, segment):
    segments = [[1, 1, segment]] * 4
    assert not read(f"record.{cause}", of(*[[7, 8, 9]] * 4, segment_ids=segments, mask=[[1, 1, 0]] * 4))
    assert not read(f"record.{cause}", of(*[[7, 8, 9]] * 4, segment_ids=segments))


@pytest.mark.parametrize(
    ("cause", "segment"), [("prompt-in-mask", 3), ("padding-in-mask", 2), ("tool-in-mask", 4), ("tool-in-mask", 5)]
)
def test_a_cause_of_the_mask_leaves_other_segments_to_other_causes(cause, segment):
    trace = of(*[[7, 8, 9]] * 4, segment_ids=[[1, 1, segment]] * 4, mask=[[1, 1, 1]] * 4)
    assert not read(f"record.{cause}", trace)


# padding in the mask


def test_the_lab_pads_to_the_longest_response():
    out = sampled("record.padding-in-mask", of([7, 8, 9], [7], [8, 9]))
    assert out.rows("response_ids") == [[7, 8, 9], [7, PAD, PAD], [8, 9, PAD]]
    assert out.rows("rollout_logp") == [[-0.5, -1.5, -2.5], [-0.5, 0.0, 0.0], [-0.5, -1.5, 0.0]]
    assert out.mask.all()


def test_padding_is_eos_where_the_tokenizer_has_no_padding():
    out = sampled("record.padding-in-mask", of([7, 8], [7]), Facts(eos_ids=(EOS,)))
    assert out.rows("response_ids") == [[7, 8], [7, EOS]]


def test_padding_is_read_from_runs_of_one_id_with_one_log_prob():
    ids, logp = ([7, 8, 9, 5], [7, 0, 0, 0], [8, 9, 0, 0]), [[-1, -2, -3, -4], [-1, 0, 0, 0], [-1, -2, 0, 0]]
    (reading,) = read("record.padding-in-mask", of(*ids, logp=logp))
    assert reading.tokens.tolist() == [5, 6, 7, 10, 11]
    assert reading.drop.sum() == 5
    assert "id 0" in reading.says[0]


@pytest.mark.parametrize(
    ("ids", "logp", "more"),
    [
        (([7, 5, 5], [8, 5, 5]), [[-1, -0.2, -0.3], [-1, -0.4, -0.1]], {}),
        (([7, 5, 5], [8, 6, 6]), [[-1, 0, 0], [-1, 0, 0]], {}),
        (([7, 5, EOS], [8, 6, EOS]), [[-1, 0, 0], [-1, 0, 0]], {}),
        (([7, 0, 0], [8, 0, 0]), [[-1, 0, 0], [-1, 0, 0]], {"mask": [[1, 0, 0], [1, 0, 0]]}),
    ],
    ids=["log-probs vary", "each row has its own id", "no run", "outside the mask"],
)
def test_what_is_no_padding(ids, logp, more):
    assert not read("record.padding-in-mask", of(*ids, logp=logp, **more))


def test_a_row_of_nothing_but_padding_is_all_read():
    (reading,) = read("record.padding-in-mask", of([0, 0, 0], [7, 8, 0], logp=[[0, 0, 0], [-1, -2, 0]]))
    assert reading.tokens.tolist() == [0, 1, 2]


# tools in the mask


def test_the_lab_appends_the_end_of_the_prompt_as_tool_output():
    out = sampled("record.tool-in-mask", of([7, 8], [9], prompt_ids=[[1, 2, 5], [6]]), tokens=2)
    assert out.rows("response_ids") == [[7, 8, 2, 5], [9, 6]]
    assert out.rows("rollout_logp") == [[-0.5, -1.5, 0.0, 0.0], [-0.5, 0.0]]
    assert out.rows("segment_ids") == [[1, 1, 2, 2], [1, 2]]
    assert out.rows("mask") == [[1, 1, 1, 1], [1, 1]]
    (reading,) = read("record.tool-in-mask", out)
    assert reading.tokens.tolist() == [2, 3, 5]


def test_tools_are_not_looked_for_without_segments():
    assert not read("record.tool-in-mask", of([7, 8], [9, 5]))


# how responses end

STOP = {"finish_reason": ["stop"] * 3}


def test_the_lab_drops_eos_and_rows_of_nothing_else():
    trace = of([7, 8, EOS], [7, 8, 9], [EOS], finish_reason=["stop", "length", "stop"])
    out = sampled("record.eos-dropped", trace)
    assert out.rows("response_ids") == [[7, 8], [7, 8, 9]]
    assert out.rows("rollout_logp") == [[-0.5, -1.5], [-0.5, -1.5, -2.5]]
    assert out.rows("finish_reason") == ["stop", "length"]


def test_a_dropped_eos_is_read_where_stopped_rows_of_several_lengths_end_otherwise():
    (reading,) = read("record.eos-dropped", of([7, 8], [7, 8, 9], [5], **STOP))
    assert reading.parameters == {"rows": 3}
    assert reading.tokens.tolist() == [1, 4, 5]
    assert "3 of 3 rows" in reading.says[0]
    assert f"id {EOS}" in reading.says[0]


def test_a_dropped_eos_is_read_with_the_ids_of_all_ends():
    facts = Facts(eos_ids=(3, 11))
    assert not read("record.eos-dropped", of([7, 11], [7, 8, 3], [5, 11], **STOP), facts)
    (reading,) = read("record.eos-dropped", of([7, 8], [7, 8, 9], [5], **STOP), facts)
    assert "id 3, 11" in reading.says[0]


@pytest.mark.parametrize(
    ("ids", "more", "facts"),
    [
        (([7, EOS], [7, 8, EOS], [EOS]), STOP, KNOWN),
        (([7, EOS], [7, 8, EOS], [5]), STOP, KNOWN),
        (([7, 8], [7, 8, 9], [5]), {"finish_reason": ["length"] * 3}, KNOWN),
        (([7, 8], [7, 8, 9], [5]), {}, KNOWN),
        (([7, 8], [7, 8, 9], [5]), {**STOP, "sampling": [{"stop": ["."]}] * 3}, KNOWN),
        (([7, 8], [7, 8, 9], [5]), STOP, Facts()),
        (([7, 8], [7, 5], [6, 9]), STOP, KNOWN),
    ],
    ids=[
        "EOS is there",
        "one row of three",
        "cut rows",
        "no finish_reason",
        "stop strings",
        "EOS not known",
        "all at one length",
    ],
)
def test_no_dropped_eos_is_read_where(ids, more, facts):
    assert not read("record.eos-dropped", of(*ids, **more), facts)


def test_one_last_id_in_all_rows_is_an_eos_that_the_files_do_not_name():
    ids = [[7] * k + [12] for k in range(1, 6)]
    more = {"finish_reason": ["stop"] * 5}
    assert not read("record.eos-dropped", of(*ids, **more))
    assert read("record.eos-dropped", of(*[[*row[:-1], 12 + k] for k, row in enumerate(ids)], **more))


def test_the_lab_truncates_at_a_limit():
    out = sampled("record.truncated", of([7, 8, EOS], [7], [7, 8, 9, EOS], **STOP), max_tokens=2)
    assert out.rows("response_ids") == [[7, 8], [7], [7, 8]]
    assert out.rows("rollout_logp") == [[-0.5, -1.5], [-0.5], [-0.5, -1.5]]
    assert out.rows("finish_reason") == ["stop"] * 3


def test_truncation_is_read_where_unended_rows_all_have_the_greatest_length():
    (reading,) = read("record.truncated", of([7, 8, 9], [7, EOS], [7, 8, 5], **STOP))
    assert reading.severity == "error"
    assert reading.parameters == {"rows": 2, "max_tokens": 3}
    assert reading.tokens.tolist() == [2, 7]
    assert "2 of 3 rows" in reading.says[0]


@pytest.mark.parametrize(
    "ids",
    [([7, 8, EOS], [7, EOS], [7, 5, EOS]), ([7, 8, 9], [7, EOS], [7, 8]), ([7, 8, 9], [7, EOS], [EOS]), ([7, 8], [9, 5], [7, 8, EOS])],
    ids=["EOS is there", "two lengths", "one row", "not the greatest length"],
)  # fmt: skip
def test_no_truncation_is_read_where(ids):
    assert not read("record.truncated", of(*ids, **STOP))


def test_many_rows_that_say_they_were_cut_are_only_told():
    reasons = ["length"] * 2 + ["stop"] * 8
    ids = [[7, 8, 9]] * 2 + [[7, EOS]] * 8
    (reading,) = read("record.truncated", of(*ids, finish_reason=reasons))
    assert reading.severity == "info"
    assert reading.parameters == {"rows": 2, "max_tokens": 3}
    assert not read("record.truncated", of(*ids[1:], [7, EOS], finish_reason=[*reasons[1:], "stop"]))


@pytest.fixture(scope="module")
def letters():
    """Facts of a tokenizer with one id a letter: a is 5, b is 6, …"""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocab = {"<pad>": PAD, "<bos>": 1, "<unk>": 2, "<eos>": EOS, ".": DOT, **{chr(ord("a") + k): 5 + k for k in range(26)}}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    own.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    assert tokenizer.decode([5, 6, DOT]) == "ab."
    return Facts.of(tokenizer)


def test_facts_are_read_from_a_tokenizer(letters):
    assert (letters.bos_id, letters.pad_id, letters.eos_ids) == (1, PAD, (EOS,))
    assert Facts.of(letters.tokenizer, [11, EOS]).eos_ids == (EOS, 11)


def test_the_lab_trims_the_stop_string_and_declares_it(letters):
    trace = of([7, 8, DOT, 9, EOS], [7, EOS], [DOT, 7], **STOP, sampling=[{"temperature": 0.5}] * 3)
    out = sampled("record.stop-trimmed", trace, letters)
    assert out.rows("response_ids") == [[7, 8], [7, EOS]]
    assert [record["stop"] for record in out.rows("sampling")] == [["."], ["."]]
    assert [record["temperature"] for record in out.rows("sampling")] == [0.5, 0.5]


def test_a_trimmed_stop_string_is_read_where_one_is_declared_and_no_row_ends_in_it(letters):
    stops = {"sampling": [{"stop": ["."]}] * 3}
    (reading,) = read("record.stop-trimmed", of([7, 8], [7, 8, 9], [5], **STOP, **stops), letters)
    assert reading.parameters == {"rows": 3}
    assert reading.tokens.tolist() == [1, 4, 5]
    assert "['.']" in reading.says[0]


@pytest.mark.parametrize(
    ("ids", "stop"),
    [
        (([7, 8, DOT], [7, 8, 9, DOT], [5, DOT]), ["."]),
        (([7, EOS], [7, 8, 9, EOS], [5, DOT]), ["."]),
        (([7, 8, DOT], [7, 8, 9, DOT], [5]), ["."]),
        (([7, 8], [7, 5, 6], [9, 8, 5, 6]), ["x", "ab", "d"]),
        (([7, 8], [7, 8, 9], [5]), []),
        (([7, 8], [7, 8, 9], [5]), None),
    ],
    ids=[
        "it is there",
        "EOS ended them",
        "one row of three lacks it",
        "of two tokens",
        "none is declared",
        "no list is declared",
    ],
)
def test_no_trimmed_stop_string_is_read_where(letters, ids, stop):
    assert not read("record.stop-trimmed", of(*ids, **STOP, sampling=[{"stop": stop}] * 3), letters)


def test_no_trimmed_stop_string_is_read_without_a_tokenizer():
    assert not read("record.stop-trimmed", of([7, 8], [7, 8, 9], [5], **STOP, sampling=[{"stop": ["."]}] * 3))


# retokenized


def onsets(*at, n=12, before=0.0, after=0.4):
    """Rows that agree up to a place and not from there on."""
    logp = [[-1.0 - t / 8 for t in range(n)] for _ in at]
    old = [[v + (before if t < k else after) for t, v in enumerate(row)] for k, row in zip(at, logp, strict=True)]
    return of(*[[7] * n] * len(at), logp=logp, old_logp=old)


def test_other_ids_are_read_from_onsets_that_differ_by_row():
    (reading,) = read("record.retokenized", onsets(4, 5, 7))
    assert reading.tokens.tolist() == [4, 17, 31]
    assert reading.parameters == {"onset": 5}
    assert "3 of 3 rows" in reading.says[0]
    assert "4–7" in reading.says[0]


@pytest.mark.parametrize(
    "trace",
    [
        onsets(0, 1, 2), onsets(5, 5, 5), onsets(12, 12, 12), onsets(4, 5, 7, before=0.01), onsets(4, 5, 7, after=0.01),
        onsets(10, 10, 11), onsets(4, 12, 12, 12), onsets(4, 5, 7, 12, 12, 12, 12),
    ],
    ids=[
        "rows differ from the start", "one onset", "rows agree", "the start is noisy", "the gap is small", "only ends differ",
        "one row of four", "three rows of seven",
    ],
)  # fmt: skip
def test_no_other_ids_are_read_where(trace):
    assert not read("record.retokenized", trace)


def test_other_ids_are_not_read_where_single_tokens_differ():
    logp = [[-1.0] * 24] * 3
    old = [[-1.4 if t in (4 + row, 9 + row, 14 + row) else -1.0 for t in range(24)] for row in range(3)]
    assert not read("record.retokenized", of(*[[7] * 24] * 3, logp=logp, old_logp=old))


def test_other_ids_are_not_read_from_two_tokens_a_row():
    logp = [[-1.0] * n for n in (12, 13, 14)]
    old = [[-1.4 if t in (n - 5, n - 4) else -1.0 for t in range(n)] for n in (12, 13, 14)]
    assert not read("record.retokenized", of(*[[7] * n for n in (12, 13, 14)], logp=logp, old_logp=old))


def test_other_ids_are_not_looked_for_without_a_trainer():
    assert not read("record.retokenized", of([7] * 12, [7] * 12, [7] * 12))


def test_other_ids_cannot_be_applied_to_a_scorer():
    with pytest.raises(TypeError, match=r"record\.retokenized"):
        CAUSES["record.retokenized"].intervene()
