import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from unskew._errors import UnskewError
from unskew.cli import main
from unskew.trace import Trace, lint, read, usable, write

NAN, INF = float("nan"), float("inf")
GOOD = {"id": "good", "response_ids": [1, 2, 3], "rollout_logp": [-0.1, -0.2, -0.3], "old_logp": [-0.1, -0.2, -0.3]}
MODEL = Path(__file__).parents[2] / "src" / "unskew" / "lab" / "models" / "dense"


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


UNREADABLE = {
    "empty file": ("t.jsonl", b"", "no rows"),
    "blank lines": ("t.jsonl", b"\n \n", "no rows"),
    "empty parquet": ("t.parquet", b"", "t.parquet: not a readable Parquet file"),
    "not parquet": ("t.parquet", b"hello, I am text", "t.parquet: not a readable Parquet file"),
    "not json": ("t.jsonl", lines(GOOD) + b"{'a': 1}\n", "t.jsonl line 2: invalid JSON at column 2"),
    "cut line": ("t.jsonl", lines(GOOD, GOOD)[:-20], "t.jsonl line 2: invalid JSON"),
    "not an object": ("t.jsonl", b"[1, 2]\n", "line 1: expected one JSON object a line, got list"),
    "not utf-8": ("t.jsonl", lines(GOOD) + b'{"id": "\xff"}\n', "t.jsonl line 2: not UTF-8: byte 0xff at offset 8"),
    "deep nesting": ("t.jsonl", b"[" * 100_000 + b"\n", "line 1: invalid JSON"),
    "missing columns": ("t.jsonl", lines({"tokens": [1], "logprobs": [-1]}), "no column response_ids or rollout_logp; it has logprobs, tokens"),
    "string for list": ("t.jsonl", lines(GOOD, {**GOOD, "rollout_logp": "x"}), "t.jsonl line 2: rollout_logp: expected a list, got str 'x'"),
    "nested wrong": ("t.jsonl", lines({**GOOD, "topk_ids": [[1], 2, [3]]}), "line 1: topk_ids[1]: expected a list, got int 2"),
    "id beyond int32": ("t.jsonl", lines({**GOOD, "response_ids": [1, 2, 1 << 40]}), "line 1: response_ids[2]: expected an integer of 32"),
    "unknown suffix": ("t.csv", b"a,b\n", "unknown kind of file '.csv'"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_input(tmp_path, case):
    name, content, words = UNREADABLE[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnskewError) as error:
        read(tmp_path / name)
    assert words in str(error.value)
    done = CliRunner().invoke(main, ["lint", str(tmp_path / name)])
    assert done.exit_code == 4
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_truncated_parquet(tmp_path, keep):
    write(Trace.from_rows([GOOD] * 50), tmp_path / "t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[: int(len(whole) * keep)])
    assert CliRunner().invoke(main, ["lint", str(tmp_path / "t.parquet")]).exit_code == 4


def test_damaged_pages_are_an_error(tmp_path):
    rng = np.random.default_rng(0)
    values = -rng.random(5000)
    write(
        Trace.from_packed(cu_seqlens=np.array([0, 5000]), response_ids=np.arange(5000), rollout_logp=values),
        tmp_path / "t.parquet",
    )
    damaged = bytearray((tmp_path / "t.parquet").read_bytes())
    damaged[200:12_000] = bytes(11_800)
    (tmp_path / "t.parquet").write_bytes(damaged)
    with pytest.raises(UnskewError, match="not a readable Parquet file"):
        read(tmp_path / "t.parquet")


def test_nothing_there():
    for path in ("nowhere.parquet", "nowhere-*.jsonl"):
        done = CliRunner().invoke(main, ["lint", path])
        assert (done.exit_code, "no such file" in done.stderr) == (4, True)


ROWS = {
    "lengths": ({"rollout_logp": [-0.1]}, "length", "error", "rollout_logp", None, "1 values, response_ids has 3"),
    "mask length": ({"mask": [1]}, "length", "error", "mask", None, "1 values, response_ids has 3"),
    "topk length": ({"topk_ids": [[1]]}, "length", "error", "topk_ids", None, "1 values, response_ids has 3"),
    "nothing": ({"response_ids": [], "rollout_logp": [], "old_logp": []}, "empty-response", "error", "response_ids", None, "0 tokens"),
    "no response": ({"response_ids": None}, "null", "error", "response_ids", None, "missing"),
    "no logp": ({"rollout_logp": None}, "null", "error", "rollout_logp", None, "missing"),
    "no old": ({"old_logp": None}, "null", "error", "old_logp", None, "missing"),
    "nan": ({"rollout_logp": [-0.1, NAN, NAN]}, "logp-nan", "error", "rollout_logp", 1, "NaN inside the mask (nan)"),
    "null token": ({"rollout_logp": [-0.1, None, 0]}, "logp-nan", "error", "rollout_logp", 1, "NaN inside the mask (nan)"),
    "nan outside": ({"rollout_logp": [NAN, -1, -1], "mask": [0, 1, 1]}, "logp-outside", "info", "rollout_logp", 0, "not finite, outside the mask (nan)"),
    "-inf": ({"old_logp": [-0.1, -0.1, -INF]}, "logp-inf", "error", "old_logp", 2, "infinite inside the mask (-inf)"),
    "inf": ({"rollout_logp": [INF, -0.1, -0.1]}, "logp-inf", "error", "rollout_logp", 0, "infinite inside the mask (inf)"),
    "ref nan": ({"ref_logp": [NAN, -1, -1]}, "logp-nan", "warn", "ref_logp", 0, "NaN inside the mask (nan)"),
    "positive": ({"rollout_logp": [-0.1, 0.25, -0.1]}, "logp-positive", "error", "rollout_logp", 1, "a log-prob above 0 (0.25)"),
    "small": ({"rollout_logp": [-0.1, 0.001, -0.1]}, "logp-above-zero", "warn", "rollout_logp", 1, "a log-prob above 0 (0.001)"),
    "rounding": ({"rollout_logp": [0.0, 1e-7, -0.1]}, "logp-rounding", "info", "rollout_logp", 1, "a log-prob above 0 by rounding (1e-07)"),
    "filled": ({"rollout_logp": [-9999.0, -0.1, -0.1]}, "logp-placeholder", "warn", "rollout_logp", 0, "a placeholder, not a log-prob (-9999)"),
    "negative id": ({"response_ids": [1, -100, 3]}, "id-range", "error", "response_ids", 1, "a negative id (-100)"),
    "null id": ({"response_ids": [1, None, 3]}, "id-range", "error", "response_ids", 1, "a negative id (-1)"),
    "vocabulary": ({"response_ids": [1, 2, 100]}, "id-range", "error", "response_ids", 2, "an id beyond the vocabulary of 100 (100)"),
    "prompt": ({"prompt_ids": [1, 120]}, "id-range", "error", "prompt_ids", None, "an id beyond the vocabulary of 100 (120)"),
    "mask value": ({"mask": [1, 2, 0]}, "mask-value", "error", "mask", 1, "expected 0 to 1 (2)"),
    "segment": ({"segment_ids": [1, 1, 6]}, "segment-value", "error", "segment_ids", 2, "expected 0 to 5 (6)"),
    "all masked": ({"mask": [0, 0, 0]}, "mask-all-zero", "warn", "mask", None, "every token is masked: the row contributes nothing"),
    "duplicate": ({"id": "good"}, "duplicate-id", "warn", "id", None, "the id of row 0 again"),
    "temperature": ({"sampling": {"temperature": -1}}, "sampling-range", "error", "sampling", None, "temperature is -1.0, expected at least 0"),
    "top-p": ({"sampling": {"top_p": 0.0}}, "sampling-range", "error", "sampling", None, "top_p is 0.0, expected in (0, 1]"),
    "greedy": ({"sampling": {"temperature": 0}}, "sampling-greedy", "warn", "sampling", None, None),
    "reason": ({"finish_reason": "bored"}, "finish-reason", "info", "finish_reason", None, "unknown finish reason 'bored'"),
    "entropy": ({"entropy": [0.5, -0.5, 0]}, "entropy-range", "warn", "entropy", 1, "an entropy that is negative or NaN (-0.5)"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["t.jsonl", "t.parquet"])
@pytest.mark.parametrize("case", ROWS)
def test_a_bad_row_is_named_and_the_good_one_kept(tmp_path, case, suffix):
    change, code, severity, column, token, says = ROWS[case]
    rows = [GOOD, {**GOOD, "id": "bad", **change}]
    write(Trace.from_rows(rows), tmp_path / suffix)
    trace = read(tmp_path / suffix)
    report = lint(trace, vocab_size=100)
    (found,) = [f for f in report.findings if f.code == code]
    assert (found.severity, found.row, found.id, found.column, found.token) == (severity, 1, rows[1]["id"], column, token)
    assert says is None or found.says == says
    assert report.counts[code] == 1
    assert report.excluded.tolist() == [False, severity == "error"]
    assert report.malformed.tolist() == [False, code in ("length", "null")]
    kept, _ = usable(trace, vocab_size=100)
    assert len(kept) == (1 if severity == "error" else 2)
    rank = ["info", "warn", "error"].index(severity)
    command = ["lint", str(tmp_path / suffix), "--vocab-size", "100", "--json", "--fail-on"]
    for level, name in enumerate(("info", "warn", "error")):
        done = CliRunner().invoke(main, [*command, name])
        worst = max(["info", "warn", "error"].index(s) for s in report.severity.values())
        assert done.exit_code == (1 if worst >= level else 0)
        assert worst >= rank
        out = json.loads(done.stdout)
        assert out["counts"][code] == 1
        assert out["n_excluded"] == int(severity == "error")


def test_a_clean_trace_is_clean():
    report = lint(Trace.from_rows([GOOD, {**GOOD, "id": "b"}]), vocab_size=4)
    assert report.findings == ()
    assert not report.excluded.any()


def test_counts_hold_what_the_list_does_not():
    bad = {**GOOD, "rollout_logp": [NAN, NAN, -0.1]}
    report = lint(Trace.from_rows([{**bad, "id": str(k)} for k in range(50)]))
    assert (report.counts["logp-nan"], report.token_counts["logp-nan"]) == (50, 100)
    assert len(report.findings) == 20
    assert report.findings[0].n_tokens == 2
    assert report.excluded.sum() == 50
    with pytest.raises(UnskewError, match="none of 50 rows is usable; row 0 rollout_logp: NaN"):
        usable(Trace.from_rows([bad]).select([0] * 50))


def test_one_row_of_one_token():
    trace = Trace.from_rows([{"response_ids": [0], "rollout_logp": [-0.0]}])
    kept, report = usable(trace, vocab_size=1)
    assert (len(kept), kept.n_tokens, report.findings) == (1, 1, ())


def test_unknown_and_partial_keys_are_reported(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(lines({**GOOD, "score": 1, "reward": 1.0}, {**GOOD, "id": "b"}))
    report = lint(read(tmp_path / "t.jsonl"))
    assert [(f.code, f.severity, f.row) for f in report.findings] == [
        ("unknown-key", "warn", None),
        ("partial-column", "info", None),
    ]
    assert "score" in report.findings[0].says
    assert not report.excluded.any()


def test_vocabulary_from_a_checkpoint(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(lines({**GOOD, "response_ids": [1, 2, 99_999]}))
    done = CliRunner().invoke(main, ["lint", str(tmp_path / "t.jsonl"), "--model", str(MODEL)])
    size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    assert done.exit_code == 1
    assert f"beyond the vocabulary of {size}" in " ".join(done.stdout.split())
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    done = CliRunner().invoke(main, ["lint", str(tmp_path / "t.jsonl"), "--model", str(tmp_path / "m")])
    assert done.exit_code == 1
    done = CliRunner().invoke(main, ["lint", str(tmp_path / "t.jsonl"), "--model", str(tmp_path)])
    assert done.exit_code == 4


def test_import_renames_and_refuses_to_overwrite(tmp_path):
    source, out = tmp_path / "dump.jsonl", tmp_path / "trace"
    source.write_bytes(lines({"tokens": [1, 2], "logprobs": [-1.0, -2.0], "score": 1}))
    command = ["import", str(source), "-o", str(out), "--map", "tokens=response_ids", "--map", "logprobs=rollout_logp"]
    done = CliRunner().invoke(main, [*command, "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["n_tokens"] == 2
    assert "score" in done.stderr
    assert read(out).tokens("rollout_logp").tolist() == [-1.0, -2.0]
    assert CliRunner().invoke(main, command).exit_code == 2
    assert CliRunner().invoke(main, [*command, "--force"]).exit_code == 0
    assert CliRunner().invoke(main, ["import", str(source), "-o", str(tmp_path / "u")]).exit_code == 4
    assert CliRunner().invoke(main, [*command[:4], "--force", "--map", "tokens"]).exit_code == 2
    assert not (tmp_path / "u").exists()
