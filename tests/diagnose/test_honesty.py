"""A wrong verdict is worse than none: data that must not name a cause."""

from pathlib import Path

import numpy as np
import pytest

from unskew.diagnose import diagnose, load_scorers, override
from unskew.lab import model_path
from unskew.trace import read

VLLM = Path(__file__).parent.parent / "data" / "vllm"


@pytest.fixture(scope="module")
def scorers():
    return load_scorers(str(model_path("dense")))


def trace_at_temperature():
    return override(read(VLLM / "dense-fp32-t07-processed.parquet"), {"trainer.temperature": 1.0})


def test_log_probs_of_something_else_are_inconclusive(scorers):
    trace = read(VLLM / "dense-fp32.parquet")
    rng = np.random.default_rng(0)
    logp = -rng.exponential(1, trace.n_tokens)
    trace = trace.with_tokens(rollout_logp=logp, old_logp=np.minimum(logp + rng.normal(0, 0.01, len(logp)), 0))
    verdict = diagnose(trace, scorers, bos_id=1)
    assert (verdict.verdict, verdict.causes) == ("inconclusive", ())
    assert "does not predict" in verdict.summary
    assert verdict.correction["method"] is None
    assert sum("checkpoint" in note["next"] for note in verdict.unchecked) >= 2


def test_one_side_of_something_else_is_an_unknown_cause(scorers):
    trace = read(VLLM / "dense-fp32.parquet")
    trace = trace.with_tokens(old_logp=-np.random.default_rng(0).exponential(1, trace.n_tokens))
    verdict = diagnose(trace, scorers, bos_id=1)
    assert verdict.verdict == "mismatch" and "Unknown cause" in verdict.summary
    assert not [cause for cause in verdict.causes if cause.severity != "info"]


@pytest.mark.parametrize("rows", [1, 2])
def test_too_few_tokens_are_inconclusive(scorers, rows):
    trace = trace_at_temperature()
    few = trace.select(np.sort(np.argsort(trace.lengths, kind="stable")[:rows]))
    few = few.with_tokens(mask=few.position < 30)
    assert few.mask.sum() < 64
    assert diagnose(few, scorers, bos_id=1).verdict == "inconclusive"


def test_few_sequences_of_many_tokens_are_held_out_by_pieces(scorers):
    trace = trace_at_temperature()
    longest = trace.select(np.sort(np.argsort(-trace.lengths)[:3]))
    cause = diagnose(longest, scorers, bos_id=1).causes[0]
    assert cause.id == "sampling.temperature"
    assert cause.parameters["temperature"] == pytest.approx(0.7, abs=0.02)


def test_what_both_sides_share_is_no_mismatch(scorers):
    trace = trace_at_temperature()
    verdict = diagnose(trace.with_tokens(old_logp=trace.tokens("rollout_logp")), scorers, bos_id=1)
    assert verdict.verdict == "clean"
    assert {(cause.id, cause.severity) for cause in verdict.causes} == {("sampling.temperature", "info")}
    assert "both differ from this model in the same way: sampling.temperature" in verdict.summary


@pytest.mark.filterwarnings("error")
def test_no_token_of_the_loss_is_inconclusive(scorers):
    trace = read(VLLM / "dense-fp32.parquet")
    verdict = diagnose(trace.with_tokens(mask=np.zeros(trace.n_tokens, bool)), scorers, bos_id=1)
    assert verdict.verdict == "inconclusive" and "nothing to compare" in verdict.summary
