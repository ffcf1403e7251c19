"""The command line as a user meets it: help, exit codes, streams, bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from unskew.lab import model_path, recorded_path
from unskew.trace import read, write

DATA = Path(__file__).parent.parent / "data"
CLEAN = str(DATA / "vllm" / "dense-fp32.parquet")
MODEL = str(model_path("dense"))
HEAVY = ("torch", "transformers", "numpy", "pyarrow", "rich", "jinja2", "pydantic")


def run(*args, **more):
    return subprocess.run([sys.executable, "-m", "unskew.cli", *args], capture_output=True, text=True, timeout=300, **more)


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from unskew.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
bad = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported {{bad}}" if bad else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "unskew demo" in done.stdout


@pytest.mark.parametrize(
    "command", ["record", "score", "lint", "import", "measure", "diagnose", "report", "demo", "explain", "doctor", "lab"]
)
def test_every_command_has_help(command):
    done = run(command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_rooms_import_without_torch():
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"blocked {name}", name=name)
sys.meta_path.insert(0, Block())
import unskew.trace, unskew.measure, unskew.score, unskew.causes, unskew.diagnose, unskew.report, unskew.watch, unskew.lab, unskew.cli
from unskew.score import SamplingTransform
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_wrong_command_suggests_the_right_one():
    done = run("diagnos")
    assert done.returncode == 2
    assert "did you mean 'diagnose'" in done.stderr


def test_measure_prints_json_to_stdout_only():
    done = run("measure", str(recorded_path()), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["overall"]["n_tokens"]["value"] == 2338
    assert run("measure", str(recorded_path()), "--max-k3", "1e-6").returncode == 1
    assert run("measure", CLEAN).returncode == 4


def test_diagnose_exit_codes_and_wire_form(tmp_path):
    clean = run("diagnose", CLEAN, "--model", MODEL, "--json")
    assert clean.returncode == 0, clean.stderr
    assert json.loads(clean.stdout)["verdict"] == "clean"
    saved = tmp_path / "verdict.json"
    found = run("diagnose", str(recorded_path()), "--model", MODEL, "--framework", "trl", "--save", str(saved))
    assert found.returncode == 1
    assert found.stdout.startswith("MISMATCH")
    verdict = json.loads(saved.read_text())
    assert set(verdict) == {"schema_version", "verdict", "summary", "causes", "floor", "gap", "matters", "unexplained", "correction",
                            "unchecked", "ladder", "n_used", "n_excluded", "cost"}  # fmt: skip
    assert set(verdict["causes"][0]) == {"id", "side", "severity", "kind", "says", "explained", "of", "interval", "class", "parameters",
                                         "evidence", "refute", "fix"}  # fmt: skip
    assert "GRPOConfig(temperature=0.7" in found.stdout
    assert run("diagnose", str(recorded_path()), "--model", MODEL, "--fail-on", "error").returncode == 1
    assert run("diagnose", CLEAN).returncode == 4
    assert run("diagnose", CLEAN, "--model", str(tmp_path)).returncode == 4
    assert run("diagnose", CLEAN, "--model", MODEL, "--set", "nonsense").returncode == 2
    few = tmp_path / "few.parquet"
    write(read(CLEAN).select([0]), few)
    assert run("diagnose", str(few), "--model", MODEL).returncode == 3


def test_score_then_measure_then_report(tmp_path):
    out, page = tmp_path / "scored.parquet", tmp_path / "r.html"
    assert run("score", CLEAN, "--model", MODEL, "-o", str(out)).returncode == 0
    again = run("score", CLEAN, "--model", MODEL, "-o", str(out))
    assert again.returncode == 2
    assert "--force" in again.stderr
    figures = json.loads(run("measure", str(out), "--json").stdout)["overall"]
    assert figures["mean_abs"]["value"] < 1e-5
    done = run("report", str(out), "-o", str(page), "--tokenizer", MODEL)
    assert done.stdout.startswith(f"Wrote {page}")


def test_demo_recorded_and_explain_and_doctor():
    started = time.perf_counter()
    done = run("demo", "--recorded")
    assert done.returncode == 0
    assert "stored, not computed now" in done.stdout
    assert time.perf_counter() - started < 30
    assert "k1 / k3" in run("explain", "kappa").stdout
    assert "nucleus" in run("explain", "sampling.top-p").stdout
    assert run("explain", "nothing").returncode == 2
    assert json.loads(run("doctor", "--json").stdout)["can"]["diagnose --model, score"] is True


def test_demo_names_what_it_planted():
    done = run("demo", "--cause", "template.bos", "--json")
    result = json.loads(done.stdout)
    assert result["causes"][0]["id"] == "template.bos"


def test_an_interrupt_is_130():
    command = [sys.executable, "-m", "unskew.cli", "lab", "confusion", "--seeds", "3", "--clean", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A background shell ignores the interrupt, and its children inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True)
    finally:
        signal.signal(signal.SIGINT, inherited)
    with process:
        assert process.stderr is not None
        assert any("seed 101" in line for line in process.stderr), "it is at work"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


def row(**more):
    base = {
        "id": "a",
        "prompt_ids": [1, 2],
        "response_ids": [5, 6, 7],
        "rollout_logp": [-0.5, -1.0, -0.1],
        "old_logp": [-0.5, -1.1, -0.1],
    }
    return {**base, **more}


GOOD = [row(id=str(k)) for k in range(4)]
BAD = {
    "empty file": (b"", 4, "no rows"),
    "not utf-8": (b'{"response_ids": [1], "rollout_logp": [-1.0], "id": "\xff"}\n', 4, "UTF-8"),
    "cut off": (b'{"response_ids": [1], "rollout_lo', 4, "line 1"),
    "missing column": (b'{"response_ids": [1]}\n', 4, "rollout_logp"),
    "wrong type": (json.dumps(row(rollout_logp="x")).encode(), 4, "rollout_logp"),
    "all rows bad": (json.dumps(row(rollout_logp=[-1.0])).encode(), 4, "rollout_logp"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["measure", "diagnose"])
def test_input_that_cannot_be_used_is_a_clear_error(tmp_path, name, command):
    content, code, words = BAD[name]
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    done = run(command, str(path))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (row(rollout_logp=[-0.5, float("nan"), -0.1]), "logp-nan"), (row(rollout_logp=[-0.5, float("-inf"), -0.1]), "logp-inf"),
        (row(rollout_logp=[-0.5, 0.7, -0.1]), "logp-positive"), (row(rollout_logp=[-0.5]), "length"),
        (row(response_ids=[], rollout_logp=[], old_logp=[]), "empty-response"),
    ],
)  # fmt: skip
def test_a_bad_row_is_counted_and_the_rest_measured(tmp_path, bad, code):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in [*GOOD, bad]))
    result = json.loads(run("measure", str(path), "--json").stdout)
    assert (result["n_rows"], result["n_excluded"]) == (5, 1)
    assert code in result["lint"]
    assert result["overall"]["n_tokens"]["value"] == 12
    lint = run("lint", str(path), "--json")
    assert lint.returncode == 1
    assert code in json.loads(lint.stdout)["counts"]


def test_ids_of_another_tokenizer_are_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row(response_ids=[5, 9999, 7])))
    done = run("diagnose", str(path), "--model", MODEL)
    assert done.returncode == 4
    assert "9999 is outside the model's vocabulary" in done.stderr
    assert run("lint", str(path), "--model", MODEL).returncode == 1


def test_one_row_and_one_token(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"response_ids": [5], "rollout_logp": [-0.5], "old_logp": [-0.6]}))
    figures = json.loads(run("measure", str(path), "--json").stdout)["overall"]
    assert figures["mean_abs"]["value"] == pytest.approx(float(np.float32(0.6) - np.float32(0.5)), abs=1e-6)
    assert run("diagnose", str(path)).returncode == 3


def test_explain_names_and_numbers():
    asked = run("explain", "rollout_probs_diff_mean=0.012", "--dtype", "bf16", "--arch", "moe", "--json")
    result = json.loads(asked.stdout)
    assert result["answer"] == "cannot tell"
    assert len(result["rests on"]) == 4
    assert json.loads(run("explain", "rollout_corr/chi2_seq", "--json").stdout)["ours"] == "chi2_sequence"
    for arguments, words in (
        (["mean_abs=0.1"], "--dtype"), (["mean_abs=much", "--dtype", "bf16"], "not a number"),
        (["kl_sample_train_v1=0.1", "--dtype", "bf16"], "more than one metric"),
        (["rollout_is_mean=0.9", "--dtype", "bf16"], "after a correction"), (["x=1", "--dtype", "bf16"], "nothing is known"),
    ):  # fmt: skip
        failed = run("explain", *arguments)
        assert failed.returncode == 2
        assert words in failed.stderr
