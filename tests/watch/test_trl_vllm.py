"""TRL's GRPOTrainer with colocated vLLM, run for real; vLLM's CPU build lives in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from unskew.diagnose import diagnose, load_scorers
from unskew.lab import model_path
from unskew.trace import read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "cause"),
    [
        # vLLM 0.32's CPU build packs the head when it loads, and reload_weights leaves that copy: a real stale tied head.
        ("synced", "weights.tied-head"),
        ("unsynced", "weights.stale"),
    ],
)
def test_weights_of_colocated_vllm(tmp_path, sync, cause):
    script = Path(__file__).with_name("trl_vllm_run.py")
    subprocess.run([sys.executable, script, tmp_path, sync], check=True, timeout=600)
    for step, named in ((0, []), (3, [cause])):
        trace = read(str(tmp_path / "traces" / f"step-{step:06d}-*.parquet"))
        model = tmp_path / "run" / f"checkpoint-{step}" if step else model_path("dense-old-3")
        scorers = load_scorers(str(model), older=[str(model_path("dense-old-3"))] if step else [])
        verdict = diagnose(trace, scorers)
        assert [(c.id, c.side) for c in verdict.causes if c.severity != "info"] == [(name, "rollout") for name in named]
