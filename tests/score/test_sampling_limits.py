"""Banned, biased and likeliest tokens: hand-worked weights first, then a tiny random model and its engine."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
import transformers

from unskew.score import HeadStates, HFEngine, HFScorer, Sampling, SamplingTransform
from unskew.trace import Trace

WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
VOCAB, EOS = 23, 3


def states_of(*responses, prompts=None, weights=WEIGHTS):
    """States whose next token has the same odds everywhere, whatever came before."""
    n = sum(len(response) for response in responses)
    return HeadStates.from_logits(weights.log().repeat(n, 1), prompts or [[0]] * len(responses), list(responses))


def logp_of(states, **settings):
    return states.logp([SamplingTransform(**settings)])[0]


def test_allowed_ids_share_the_whole_mass():
    found = logp_of(states_of([1, 3, 0]), allowed_ids=(1, 3))
    np.testing.assert_allclose(found[:2], [log(2 / 6), log(4 / 6)], atol=1e-6)
    assert found[2] == -np.inf


def test_no_allowed_ids_means_all_are_allowed():
    np.testing.assert_allclose(logp_of(states_of([0, 1, 2, 3]), allowed_ids=()), np.log([0.1, 0.2, 0.3, 0.4]), atol=1e-6)


def test_a_single_allowed_id_is_certain():
    assert logp_of(states_of([2]), allowed_ids=(2,)).tolist() == [0.0]


def test_allowed_ids_come_before_temperature():
    # Weights are squared by T = 0.5: 4, 9 of the ids 1, 2.
    np.testing.assert_allclose(
        logp_of(states_of([1, 2]), allowed_ids=(1, 2), temperature=0.5), np.log([4 / 13, 9 / 13]), atol=1e-6
    )


def test_top_k_counts_allowed_ids_only():
    found = logp_of(states_of([1, 2, 0]), allowed_ids=(0, 1, 2), top_k=2)
    np.testing.assert_allclose(found[:2], np.log([2 / 5, 3 / 5]), atol=1e-6)
    assert found[2] == -np.inf


def test_min_tokens_bans_stop_ids_before_that_many_tokens():
    found = logp_of(states_of([0, 1, 2]), min_tokens=2, stop_ids=(3,))
    np.testing.assert_allclose(found, [log(1 / 6), log(2 / 6), log(3 / 10)], atol=1e-6)


def test_min_tokens_counts_each_response_from_its_own_start_and_no_prompt():
    states = states_of([0, 0], [0, 0, 0], prompts=[[1, 1, 1, 1], [2]])
    sixth, tenth = log(1 / 6), log(1 / 10)
    np.testing.assert_allclose(logp_of(states, min_tokens=1, stop_ids=(3,)), [sixth, tenth, sixth, tenth, tenth], atol=1e-6)


def test_a_stop_id_that_came_too_early_is_impossible():
    found = logp_of(states_of([0, 3], [3]), min_tokens=1, stop_ids=(3,))
    np.testing.assert_allclose(found[:2], [log(1 / 6), log(4 / 10)], atol=1e-6)
    assert found[2] == -np.inf


def test_several_stop_ids_are_banned_together():
    np.testing.assert_allclose(logp_of(states_of([0, 0]), min_tokens=1, stop_ids=(1, 3)), np.log([1 / 4, 1 / 10]), atol=1e-6)


def test_min_tokens_without_stop_ids_and_stop_ids_without_min_tokens_change_nothing():
    plain = np.log([0.1, 0.4])
    for settings in ({"min_tokens": 2}, {"stop_ids": (3,)}):
        assert SamplingTransform(**settings).edits == SamplingTransform().edits
        np.testing.assert_allclose(logp_of(states_of([0, 3]), **settings), plain, atol=1e-6)


def test_min_tokens_holds_on_a_subset_of_tokens():
    found = states_of([0, 0, 0], [0, 0]).logp([SamplingTransform(min_tokens=2, stop_ids=(3,))], tokens=np.array([1, 2, 4]))[0]
    np.testing.assert_allclose(found[[1, 2, 4]], np.log([1 / 6, 1 / 10, 1 / 6]), atol=1e-6)
    assert np.isnan(found[[0, 3]]).all()


def test_a_bias_multiplies_the_odds_of_its_id():
    # Weights 10, 2, 3, 4.
    found = logp_of(states_of([0, 1, 3]), logit_bias={0: log(10)})
    np.testing.assert_allclose(found, np.log([10 / 19, 2 / 19, 4 / 19]), atol=1e-6)


def test_a_bias_given_as_pairs_in_any_order_is_the_same_transform():
    given = SamplingTransform(logit_bias=((2, -1.0), (0, 0.5)))
    assert given == SamplingTransform(logit_bias={0: 0.5, 2: -1.0})
    assert given.bias == ((0, 0.5), (2, -1.0))


def test_a_bias_does_not_bring_back_a_banned_id():
    found = logp_of(states_of([0, 1]), logit_bias={0: 50.0, 1: log(2)}, allowed_ids=(1, 2))
    assert found[0] == -np.inf
    assert found[1] == pytest.approx(log(4 / 7), abs=1e-6)


def test_a_bias_comes_before_the_repetition_penalty():
    # Id 0 was seen: (−1 + 3) / 4 = 0.5; the other order gives −1 × 4 + 3 = −1.
    states = HeadStates.from_logits(torch.tensor([[-1.0, 0.0]]), [[0]], [[0]])
    found = logp_of(states, logit_bias={0: 3.0}, repetition_penalty=4.0)
    assert found[0] == pytest.approx(0.5 - log(np.exp(0.5) + 1), abs=1e-6)


def test_likeliest_reports_the_largest_log_prob_whatever_was_sampled():
    np.testing.assert_allclose(logp_of(states_of([0, 1, 2, 3]), likeliest=True), [log(0.4)] * 4, atol=1e-6)


def test_likeliest_looks_at_the_transformed_distribution():
    states = states_of([0, 3])
    np.testing.assert_allclose(logp_of(states, likeliest=True, temperature=0.5), [log(16 / 30)] * 2, atol=1e-6)
    np.testing.assert_allclose(logp_of(states, likeliest=True, logit_bias={0: log(10)}), [log(10 / 19)] * 2, atol=1e-6)
    np.testing.assert_allclose(logp_of(states, likeliest=True, allowed_ids=(0, 1)), [log(2 / 3)] * 2, atol=1e-6)
    np.testing.assert_allclose(logp_of(states, likeliest=True, min_tokens=1, stop_ids=(3,)), np.log([1 / 2, 2 / 5]), atol=1e-6)


def test_likeliest_is_never_cut_off():
    found = states_of([0]).logp([SamplingTransform(top_k=2), SamplingTransform(top_k=2, likeliest=True)])[:, 0]
    assert found[0] == -np.inf
    assert found[1] == pytest.approx(log(4 / 7), abs=1e-6)


def test_entropy_of_a_limited_distribution_is_that_of_the_ids_left():
    scores = states_of([1, 1]).scores(SamplingTransform(allowed_ids=(1, 3)))
    expected = -(log(1 / 3) / 3 + 2 * log(2 / 3) / 3)
    np.testing.assert_allclose(scores.entropy, [expected] * 2, atol=1e-6)
    np.testing.assert_allclose(scores.logp, [log(1 / 3)] * 2, atol=1e-6)
    # √((1 − p_y)² + Σ p² − p_y²) with p_y = 1/3 and one other id of 2/3.
    np.testing.assert_allclose(scores.noise_scale, [np.sqrt(8 / 9)] * 2, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, [1, 2, 3, 4]),
        ({"temperature": 0.5}, [1, 4, 9, 16]),
        ({"allowed_ids": (0, 2)}, [1, 0, 3, 0]),
        ({"min_tokens": 9, "stop_ids": (3,)}, [1, 2, 3, 0]),
        ({"logit_bias": {0: log(10)}}, [10, 2, 3, 4]),
        ({"top_k": 2}, [0, 0, 3, 4]),
        ({"top_p": 0.5}, [0, 0, 3, 4]),
        ({"min_p": 0.5}, [0, 2, 3, 4]),
        ({"top_k": 2, "temperature": 0.5}, [0, 0, 9, 16]),
        ({"top_k": 2, "allowed_ids": (0, 1, 2)}, [0, 2, 3, 0]),
    ],
    ids=str,
)
def test_probabilities_are_the_weights_that_are_left(settings, weights):
    states = states_of([0, 1], [2, 3])
    found = states.probabilities(SamplingTransform(**settings), tokens=np.arange(4))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.tile(np.array(weights) / sum(weights), (4, 1)), atol=1e-6)


def test_probabilities_of_some_tokens_stand_in_their_order():
    states = HeadStates.from_logits(torch.tensor([[1.0, 1], [1, 3], [1, 7], [1, 15]]).log(), [[0], [0]], [[0, 0, 0], [0]])
    found = states.probabilities(SamplingTransform(), tokens=np.array([1, 3]))
    np.testing.assert_allclose(found, [[1 / 4, 3 / 4], [1 / 16, 15 / 16]], atol=1e-6)
    assert states.probabilities(SamplingTransform(), tokens=np.zeros(0, np.int64)).shape == (0, 2)


def test_probabilities_know_how_far_each_token_is_in_its_response():
    found = states_of([0, 0], [0]).probabilities(SamplingTransform(min_tokens=1, stop_ids=(3,)), tokens=np.array([1, 2]))
    np.testing.assert_allclose(found, [[0.1, 0.2, 0.3, 0.4], [1 / 6, 2 / 6, 3 / 6, 0]], atol=1e-6)


def model():
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    out = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in out.parameters():
            parameter.mul_(4)
    return out


@pytest.fixture(scope="module")
def scorer():
    return HFScorer(model())


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, n) for n in (2, 5, 3, 7)]
    return prompts, [rng.integers(0, VOCAB, n) for n in (9, 1, 12, 6)]


def by_definition(scorer, prompts, responses, transform):
    """Log-probs of all ids (N, V) and ids (N,), each row by itself, from the model's own logits."""
    out = []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = scorer.model(torch.tensor(np.concatenate([prompt, response]))[None]).logits[0, len(prompt) - 1 : -1].double()
        for t, z in enumerate(logits):
            z = z.clone()
            if transform.allowed_ids:
                outside = [token for token in range(VOCAB) if token not in transform.allowed_ids]
                z[outside] = -torch.inf
            if t < transform.min_tokens:
                z[list(transform.stop_ids)] = -torch.inf
            for token, bias in transform.bias:
                z[token] += bias
            out.append((z / transform.temperature).log_softmax(0))
    return torch.stack(out).numpy(), np.concatenate(responses)


LIMITS = [
    SamplingTransform(allowed_ids=tuple(range(2, 17))),
    SamplingTransform(min_tokens=5, stop_ids=(EOS,)),
    SamplingTransform(min_tokens=4, stop_ids=(EOS, 8, 20), temperature=0.7),
    SamplingTransform(logit_bias={4: 2.5, 9: -3.0, EOS: 1.0}),
    SamplingTransform(allowed_ids=(1, 2, 3, 5, 8, 13, 21), logit_bias={2: 1.5, 4: 3.0}, min_tokens=3, stop_ids=(EOS,), temperature=1.3),
]  # fmt: skip


@pytest.mark.parametrize("transform", LIMITS, ids=str)
def test_a_random_models_numbers_are_the_log_softmax_of_the_edited_logits(scorer, rows, transform):
    full, ids = by_definition(scorer, *rows, transform)
    sampled = full[np.arange(len(ids)), ids]
    states = scorer.forward(*rows)
    found, top = states.logp([transform, replace(transform, likeliest=True)])
    possible = np.isfinite(sampled)
    assert possible.sum() > 5
    np.testing.assert_array_equal(np.isfinite(found), possible)
    np.testing.assert_allclose(found[possible], sampled[possible], atol=5e-5)
    np.testing.assert_allclose(top, full.max(1), atol=5e-5)
    np.testing.assert_allclose(states.probabilities(transform, tokens=np.arange(len(ids))), np.exp(full), atol=2e-5)


def test_transforms_asked_together_do_not_edit_each_others_logits(scorer, rows):
    together = scorer.forward(*rows).logp([SamplingTransform(), *LIMITS, SamplingTransform()])
    alone = [scorer.forward(*rows).logp([transform])[0] for transform in (SamplingTransform(), *LIMITS, SamplingTransform())]
    np.testing.assert_array_equal(together, alone)


def test_probabilities_do_not_depend_on_whether_logits_are_kept(scorer, rows):
    some = np.array([0, 4, 10, 27])
    kept = scorer.forward(*rows)
    kept.logp([SamplingTransform()])
    found = scorer.forward(*rows, cache_bytes=0).probabilities(LIMITS[4], tokens=some)
    np.testing.assert_allclose(found, kept.probabilities(LIMITS[4], tokens=some), atol=1e-7)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)


PROMPTS = [[1, 7, 4], [1, 5], [1, 9, 9, 12, 6], [1, 2], [1, 20, 11], [1, 15]]
ALLOWED = (1, 2, EOS, 5, 8, 13, 21)
ENGINE_SETTINGS = [
    {"allowed_ids": ALLOWED},
    {"min_tokens": 6},
    {"logit_bias": {4: 2.5, 9: -3.0, EOS: 1.5}},
    {"allowed_ids": ALLOWED, "min_tokens": 4, "logit_bias": {2: 1.5, EOS: 2.0}, "temperature": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("settings", ENGINE_SETTINGS, ids=str)
def test_the_engine_records_what_the_transform_predicts(scorer, settings):
    sampling = Sampling(**settings, logprobs_mode="processed", max_tokens=14, seed=2)
    sampled = HFEngine(scorer, batch=4).sample(PROMPTS, sampling=sampling)
    states = scorer.forward([row["prompt_ids"] for row in sampled], [row["response_ids"] for row in sampled])
    edited, plain = states.logp([SamplingTransform(**settings, stop_ids=(EOS,)), SamplingTransform()])
    recorded = np.concatenate([row["rollout_logp"] for row in sampled])
    np.testing.assert_allclose(recorded, edited, atol=2e-4)
    assert np.abs(recorded - plain).max() > 0.05


def test_the_engine_keeps_within_allowed_ids_and_min_tokens(scorer):
    settings = {"allowed_ids": ALLOWED, "min_tokens": 4, "logit_bias": {EOS: 6.0}}
    free = HFEngine(scorer).sample(PROMPTS, sampling=Sampling(max_tokens=14, seed=2, logit_bias={EOS: 6.0}))
    held = HFEngine(scorer).sample(PROMPTS, sampling=Sampling(max_tokens=14, seed=2, **settings))
    assert min(len(row["response_ids"]) for row in free) < 4
    assert {token for row in free for token in row["response_ids"]} - set(ALLOWED)
    assert all(EOS not in row["response_ids"][:4] for row in held)
    assert {token for row in held for token in row["response_ids"]} <= set(ALLOWED)
    assert {row["finish_reason"] for row in held} == {"stop"}
    assert all(row["response_ids"][-1] == EOS for row in held)


def test_raw_log_probs_are_recorded_from_logits_without_limits(scorer):
    sampling = Sampling(allowed_ids=ALLOWED, min_tokens=4, logit_bias={2: 1.5}, logprobs_mode="raw", max_tokens=10, seed=4)
    sampled = HFEngine(scorer).sample(PROMPTS, sampling=sampling)
    states = scorer.forward([row["prompt_ids"] for row in sampled], [row["response_ids"] for row in sampled])
    recorded = np.concatenate([row["rollout_logp"] for row in sampled])
    np.testing.assert_allclose(recorded, states.logp([SamplingTransform()])[0], atol=2e-4)


def test_the_declared_settings_of_a_recorded_row_give_the_transform_back(scorer):
    sampling = Sampling(min_tokens=6, logit_bias={9: -3.0, 4: 2.5}, temperature=0.8, logprobs_mode="processed", max_tokens=10)
    trace = Trace.from_rows(HFEngine(scorer).sample(PROMPTS[:2], sampling=sampling))
    for record in trace.rows("sampling"):
        found = SamplingTransform.from_record(record)
        assert found == SamplingTransform(min_tokens=6, logit_bias={4: 2.5, 9: -3.0}, temperature=0.8)


def test_allowed_ids_are_not_declared(scorer):
    row = HFEngine(scorer).sample(PROMPTS[:1], sampling=Sampling(allowed_ids=ALLOWED, max_tokens=2))[0]
    assert "allowed_ids" not in row["sampling"]
    assert "min_tokens" not in row["sampling"]
