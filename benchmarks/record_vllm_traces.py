"""Record the traces in tests/data/vllm and the demo's from vLLM with the lab models: `python benchmarks/record_vllm_traces.py`.

Needs the extra `vllm` (on a CPU: `make setup-slow`). One process an engine, since vLLM keeps its settings until it ends.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "tests" / "data" / "vllm"
DEMO = ROOT / "src" / "unskew" / "lab" / "recorded" / "vllm-dense-bf16-t07-processed.parquet"
N, MAX_TOKENS = 48, 80

# name: (model, dtype, logprobs_mode, temperature, top_p)
RUNS = {
    "dense-fp32": ("dense", "float32", "raw", 1.0, 1.0),
    "dense-bf16": ("dense", "bfloat16", "raw", 1.0, 1.0),
    "dense-fp32-t07-raw": ("dense", "float32", "raw", 0.7, 1.0),
    "dense-bf16-t07-raw": ("dense", "bfloat16", "raw", 0.7, 1.0),
    "dense-fp32-t07-processed": ("dense", "float32", "processed", 0.7, 1.0),
    "dense-bf16-t07-processed": ("dense", "bfloat16", "processed", 0.7, 1.0),
    "dense-fp32-top-p09-processed": ("dense", "float32", "processed", 1.0, 0.9),
    "dense-bf16-t07-top-p09-processed": ("dense", "bfloat16", "processed", 0.7, 0.9),
    "moe-fp32": ("moe", "float32", "raw", 1.0, 1.0),
    "moe-bf16": ("moe", "bfloat16", "raw", 1.0, 1.0),
}


def record(name: str) -> None:
    """Sample one trace and write it."""
    from unskew.lab import model_path, prompts
    from unskew.score import Sampling, VLLMEngine
    from unskew.trace import Trace, write

    model, dtype, mode, temperature, top_p = RUNS[name]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_path(model)))
    ids = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in prompts(N, seed=2026)]
    engine = VLLMEngine(
        str(model_path(model)), dtype=dtype, logprobs_mode=mode, max_model_len=256, prefill=mode == "raw" and temperature == 1.0
    )
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=MAX_TOKENS, logprobs_mode=mode, seed=2026)
    rows = engine.sample(ids, sampling=sampling)
    for k, row in enumerate(rows):
        row["id"] = f"{name}-{k}"
    write(Trace.from_rows(rows), OUT / f"{name}.parquet", force=True)


def score_demo() -> None:
    """The demo's trace: one of the above with the trainer's log-probs at temperature 1; and the verdict on it."""
    from unskew.diagnose import diagnose, load_scorers
    from unskew.lab import model_path
    from unskew.score import HFScorer
    from unskew.trace import read, write

    trace = read(OUT / "dense-bf16-t07-processed.parquet")
    scores = HFScorer.load(model_path("dense")).score(trace)
    trace = trace.with_tokens(old_logp=scores.logp, entropy=scores.entropy, noise_scale=scores.noise_scale)
    trace = trace.with_rows(
        trainer=[{"framework": "transformers", "dtype": "float32", "temperature": 1.0, "mode": "eval"}] * len(trace)
    )
    DEMO.parent.mkdir(exist_ok=True)
    write(trace, DEMO, force=True)
    verdict = diagnose(read(DEMO), load_scorers(str(model_path("dense"))), bos_id=1)
    stored = {**verdict.to_dict(), "cost": {}}
    DEMO.with_name("verdict.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["demo"]:
        score_demo()
    elif len(sys.argv) > 1:
        record(sys.argv[1])
    else:
        OUT.mkdir(parents=True, exist_ok=True)
        for run in RUNS:
            subprocess.run([sys.executable, __file__, run], check=True)
        score_demo()
