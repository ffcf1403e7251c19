"""Traces that vLLM's CPU build recorded from the lab models (tests/data/vllm): what diagnosis says of each."""

from pathlib import Path

import pytest

from unskew.diagnose import diagnose, load_scorers, override
from unskew.lab import model_path
from unskew.trace import read

DATA = Path(__file__).parent.parent / "data" / "vllm"
SCORERS = {model: load_scorers(str(model_path(model))) for model in ("dense", "moe")}


def verdict_of(name, **facts):
    trace = override(read(DATA / f"{name}.parquet"), {key.replace("__", "."): value for key, value in facts.items()})
    return diagnose(trace, SCORERS[name.split("-")[0]], bos_id=1)


@pytest.mark.parametrize("name", ["dense-fp32", "dense-bf16", "moe-fp32", "moe-bf16"])
def test_clean_runs_come_out_clean(name):
    verdict = verdict_of(name)
    assert verdict.verdict == "clean", verdict.summary
    assert {cause.id for cause in verdict.causes} <= {"floor.noise", "numerics.body"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_processed_log_probs_against_a_trainer_at_1_name_the_temperature(dtype):
    cause = verdict_of(f"dense-{dtype}-t07-processed", trainer__temperature=1.0).causes[0]
    assert (cause.id, cause.side) == ("sampling.temperature", "rollout")
    assert cause.parameters["temperature"] == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_processed_log_probs_against_a_trainer_at_the_temperature_are_clean(dtype):
    assert verdict_of(f"dense-{dtype}-t07-processed").verdict == "clean"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_raw_log_probs_against_a_trainer_at_the_temperature(dtype):
    assert verdict_of(f"dense-{dtype}-t07-raw").causes[0].id == "sampling.temperature-raw"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_raw_log_probs_against_a_trainer_at_1_are_the_silent_case(dtype):
    cause = verdict_of(f"dense-{dtype}-t07-raw", trainer__temperature=1.0).causes[0]
    assert (cause.id, cause.of) == ("sampling.silent", "calibration")
    assert cause.parameters["temperature"] == pytest.approx(0.7, abs=0.1)


def test_top_p_processed():
    cause = verdict_of("dense-fp32-top-p09-processed").causes[0]
    assert cause.id == "sampling.top-p"
    assert cause.parameters["top_p"] == pytest.approx(0.9, abs=0.02)


def test_temperature_and_top_p_processed():
    verdict = verdict_of("dense-bf16-t07-top-p09-processed", trainer__temperature=1.0)
    found = {cause.id: cause for cause in verdict.causes if cause.severity != "info"}
    assert set(found) == {"sampling.temperature", "sampling.top-p"}
    assert found["sampling.temperature"].parameters["temperature"] == pytest.approx(0.7, abs=0.02)
    assert found["sampling.top-p"].parameters["top_p"] == pytest.approx(0.9, abs=0.04)
    verdict = verdict_of("dense-bf16-t07-top-p09-processed")
    assert [cause.id for cause in verdict.causes if cause.severity != "info"] == ["sampling.top-p"]
    (side,) = verdict.floor["sides"]
    assert side["left"] < 0.6 * side["before"], "tokens that rounding moves out of the nucleus must not blow the rest up"
    assert "unexplained" not in verdict.summary
