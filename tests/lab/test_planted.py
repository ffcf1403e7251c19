"""From a planted cause to its name: the lab samples with one fault, and diagnosis names it first."""

import numpy as np
import pytest

from unskew.lab._confusion import name_cause
from unskew.lab._faults import plant

EXACT = {
    "sampling.min-tokens": {"min_tokens": 35, "stop_ids": "3"},
    "sampling.greedy": {},
    "record.wrong-token-logp": {},
    "record.logp-unit": {"unit": "bits"},
    "record.chunk-boundary": {"period": 8, "offset": 0},
    "record.row-pairing": {"step": 1},
    "config.vocab-padding": {"rows": 96},
    "numerics.head": {"where": "head", "dtype": "bfloat16"},
}
"""Parameters that seed 11 draws, and that diagnosis finds."""


def named(planted):
    """Causes above severity info, and the whole verdict."""
    verdict = name_cause(planted.trace, planted.model)
    return [cause for cause in verdict.causes if cause.severity != "info"], verdict


@pytest.mark.parametrize("cause", EXACT)
def test_a_planted_cause_is_named_alone_with_its_parameters(cause):
    planted = plant(cause, seed=11, n=24)
    found, verdict = named(planted)
    assert [c.id for c in found] == [cause]
    assert dict(found[0].parameters) == dict(planted.causes[cause]) == EXACT[cause]
    assert verdict.verdict != "clean"


def test_a_planted_logit_bias_is_named_with_planted_ids():
    planted = plant("sampling.logit-bias", seed=11, n=24)
    found, _ = named(planted)
    assert found[0].id == "sampling.logit-bias"
    bias = planted.causes["sampling.logit-bias"]
    assert len(bias) == 6
    assert len(found[0].parameters) >= 2
    assert set(found[0].parameters) <= set(bias)
    # The ids that were sampled often are exact; the bias of a rarer one keeps its sign and size.
    assert found[0].parameters["54"] == pytest.approx(2.534, abs=0.02)
    assert found[0].parameters["317"] == pytest.approx(3.845, abs=0.02)
    assert all(value == pytest.approx(bias[token], abs=0.25) for token, value in found[0].parameters.items())


def test_a_planted_grammar_is_named_first():
    planted = plant("sampling.grammar", seed=11, n=24)
    assert planted.causes["sampling.grammar"] == {"first": 14, "last": 369}
    ids = planted.trace.tokens("response_ids")
    assert (((ids >= 14) & (ids < 369)) | (ids < 4)).all()
    found, _ = named(planted)
    assert found[0].id == "sampling.grammar"
    assert found[0].parameters["banned"] > 50


def test_planted_padding_in_the_mask_is_named_first():
    planted = plant("record.padding-in-mask", seed=11, n=24)
    trace = planted.trace
    assert len(set(trace.lengths)) == 1
    padding = trace.tokens("response_ids") == 0
    assert padding.any() and (trace.tokens("rollout_logp")[padding] == 0).all() and trace.mask.all()
    found, _ = named(planted)
    assert found[0].id == "record.padding-in-mask"
    assert found[0].parameters["tokens"] == padding.sum()


def test_planted_tool_output_in_the_mask_is_named_first():
    planted = plant("record.tool-in-mask", seed=11, n=24)
    tool = planted.trace.tokens("segment_ids") == 2
    assert planted.causes["record.tool-in-mask"] == {"tokens": 5}
    assert tool.sum() == 24 * 5
    found, _ = named(planted)
    assert found[0].id == "record.tool-in-mask"
    assert found[0].parameters["tokens"] == 120


@pytest.mark.parametrize(("cause", "n"), [("record.eos-dropped", 48), ("record.truncated", 24), ("record.stop-trimmed", 24)])
def test_responses_that_end_too_early_are_named_by_what_is_missing(cause, n):
    planted = plant(cause, seed=11, n=n)
    last = planted.trace.tokens("response_ids")[planted.trace.cu_seqlens[1:] - 1]
    assert set(planted.trace.rows("finish_reason")) == {"stop"}
    assert not np.isin(last, planted.model.facts.eos_ids).any()
    found, _ = named(planted)
    assert [c.id for c in found] == [cause]
    assert found[0].parameters["rows"] == n


def test_truncated_responses_have_the_limit_that_was_planted():
    planted = plant("record.truncated", seed=11, n=24)
    found, _ = named(planted)
    assert found[0].parameters["max_tokens"] == planted.causes["record.truncated"]["max_tokens"] == 27
    assert planted.trace.lengths.max() == 27


def test_a_run_with_nothing_planted_names_nothing():
    found, verdict = named(plant(None, seed=11, n=24))
    assert found == []
    assert verdict.verdict == "clean"


@pytest.mark.parametrize("cause", [None, "sampling.logit-bias", "record.row-pairing"])
def test_two_plants_of_one_seed_are_equal(cause):
    first, second = plant(cause, seed=11, n=6), plant(cause, seed=11, n=6)
    assert first.trace.table.equals(second.trace.table)
    assert first.causes == second.causes


def test_plants_of_two_seeds_differ():
    first, second = plant("record.logp-unit", seed=11, n=6), plant("record.logp-unit", seed=12, n=6)
    assert first.trace.rows("prompt_ids") != second.trace.rows("prompt_ids")
    assert first.trace.rows("response_ids") != second.trace.rows("response_ids")


def test_a_record_cause_leaves_the_sampled_ids_as_they_were():
    clean, planted = plant(None, seed=11, n=6), plant("record.logp-unit", seed=11, n=6)
    assert planted.trace.rows("response_ids") == clean.trace.rows("response_ids")
    np.testing.assert_allclose(
        planted.trace.tokens("rollout_logp"), clean.trace.tokens("rollout_logp") / np.log(2), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(planted.trace.tokens("old_logp"), clean.trace.tokens("old_logp"))
