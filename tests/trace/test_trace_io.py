import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew._errors import UnskewError
from unskew.trace import TOKEN_COLUMNS, Trace, Writer, iter_read, read, read_manifest, write

RECORDED = Path(__file__).parents[1] / "data" / "traces"
NAN, INF = float("nan"), float("inf")
ROWS = [
    {"id": "a", "group_id": "g", "step": 3, "prompt_ids": [1, 2], "response_ids": [5, 6, 7],
     "rollout_logp": [-0.1, NAN, -INF], "old_logp": [-1e-7, -3.3333333, 0.0], "mask": [1, 0, 1], "reward": 0.1,
     "weight_version": [1, 1, 2], "topk_ids": [[5, 1], [6], []], "messages": '[{"role": "user"}]', "response_text": "né\n",
     "routed_experts": [[[0, 1], [2, 3]]] * 5, "finish_reason": "stop",
     "sampling": {"temperature": 0.7, "top_k": -1, "logit_bias": {"7": -2.5}, "stop": ["x", "y"]},
     "source": {"engine": "vllm", "batch_invariant": False}},
    {"id": "b", "response_ids": [8], "rollout_logp": [-2.0], "sampling": {"temperature": 1.0}},
]  # fmt: skip


def same(left: Trace, right: Trace) -> bool:
    """Same values, with NaN equal to itself and a missing column equal to an all-null one."""

    def bits(trace):
        return {
            name: column.view(np.uint32).tolist() if column.dtype == np.float32 else column.tolist()
            for name in sorted(trace.columns & TOKEN_COLUMNS)
            if trace.has(name)
            for column in [trace.tokens(name)]
        }

    names = left.columns
    others = [name for name in names if name not in TOKEN_COLUMNS]
    return (
        names == right.columns
        and bits(left) == bits(right)
        and left.cu_seqlens.tolist() == right.cu_seqlens.tolist()
        and all(repr(left.rows(name)) == repr(right.rows(name)) for name in others)
    )


@pytest.mark.parametrize("name", ["trace", "t.parquet", "t.jsonl"])
def test_round_trip_is_bitwise(tmp_path, name):
    trace = Trace.from_rows(ROWS)
    write(trace, tmp_path / name)
    assert same(read(tmp_path / name), trace)


def test_jsonl_parquet_jsonl_gives_the_same_bytes(tmp_path):
    write(Trace.from_rows(ROWS), tmp_path / "a.jsonl")
    write(read(tmp_path / "a.jsonl"), tmp_path / "b.parquet")
    write(read(tmp_path / "b.parquet"), tmp_path / "c.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes()


def test_the_same_rows_give_the_same_bytes_however_they_come(tmp_path):
    trace = Trace.from_rows(ROWS * 10)
    write(trace, tmp_path / "a")
    with Writer(tmp_path / "b") as writer:
        for row in range(20):
            writer.append(trace.select([row]))
    for name in ("manifest.json", "part-00000.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32)), max_size=5), min_size=1, max_size=6),
    st.sampled_from(["t", "t.parquet", "t.jsonl"]),
    st.integers(1, 7),
)
@settings(deadline=None, max_examples=40)
def test_write_then_read_is_the_identity(tmp_path_factory, batch, name, batch_rows):
    rows = [{"response_ids": [t for t, _ in row], "rollout_logp": [x for _, x in row]} for row in batch]
    path = tmp_path_factory.mktemp("io") / name
    trace = Trace.from_rows(rows)
    write(trace, path)
    pieces = list(iter_read(path, batch_rows=batch_rows))
    assert max(map(len, pieces)) <= batch_rows
    got = np.concatenate([piece.tokens("rollout_logp") for piece in pieces])
    assert np.isnan(got).tolist() == np.isnan(trace.tokens("rollout_logp")).tolist()
    np.testing.assert_array_equal(got, trace.tokens("rollout_logp"))
    assert np.concatenate([piece.lengths for piece in pieces]).tolist() == trace.lengths.tolist()


def test_manifest_counts_and_holds_provenance(tmp_path):
    write(Trace.from_rows(ROWS), tmp_path / "t", provenance={"run": "x", "created": "2026-01-01T00:00:00Z"})
    found = read_manifest(tmp_path / "t")
    assert (found.schema_version, found.n_rows, found.n_tokens, found.parts) == (1, 2, 4, ("part-00000.parquet",))
    assert (found.created, found.provenance) == ("2026-01-01T00:00:00Z", {"run": "x"})
    write(Trace.from_rows(ROWS), tmp_path / "u")
    assert "created" not in json.loads((tmp_path / "u" / "manifest.json").read_text())


def test_new_columns_later_on_start_a_new_part(tmp_path, monkeypatch):
    monkeypatch.setattr("unskew.trace._write._GROUP_TOKENS", 2)
    first, second = {"response_ids": [1, 2], "rollout_logp": [-1, -2]}, {"response_ids": [3], "rollout_logp": [-3], "reward": 1.0}
    with Writer(tmp_path / "t") as writer:
        writer.append([first, first])
        writer.append([second])
    assert len(read_manifest(tmp_path / "t").parts) == 2
    assert read(tmp_path / "t").rows("reward") == [None, None, 1.0]
    pieces = [Trace.from_rows([first, first]), Trace.from_rows([second])]
    with pytest.raises(UnskewError, match="column reward first appears"):
        write(pieces, tmp_path / "t.parquet")
    assert not (tmp_path / "t.parquet").exists()


def test_parts_and_row_groups_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("unskew.trace._write._GROUP_TOKENS", 4)
    monkeypatch.setattr("unskew.trace._write._PART_TOKENS", 8)
    rows = [{"response_ids": [k] * (k % 4), "rollout_logp": [-k] * (k % 4)} for k in range(20)]
    write(Trace.from_rows(rows), tmp_path / "t")
    assert len(read_manifest(tmp_path / "t").parts) > 2
    assert read(tmp_path / "t").rows("response_ids") == [row["response_ids"] for row in rows]


@pytest.mark.parametrize("name", ["trace", "t.parquet", "t.jsonl"])
def test_refuses_to_overwrite_without_force(tmp_path, name):
    one, two = Trace.from_rows(ROWS), Trace.from_rows(ROWS[1:])
    write(one, tmp_path / name)
    with pytest.raises(UnskewError, match="exists") as error:
        write(two, tmp_path / name)
    assert error.value.exit_code == 2
    assert same(read(tmp_path / name), one)
    write(two, tmp_path / name, force=True)
    assert same(read(tmp_path / name), two)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_force_does_not_replace_a_directory_that_is_no_trace(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(UnskewError, match="holds no trace"):
        write(Trace.from_rows(ROWS), tmp_path / "home", force=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


@pytest.mark.parametrize("name", ["trace", "t.parquet", "t.jsonl"])
def test_an_exception_leaves_nothing(tmp_path, name):
    def pieces():
        yield Trace.from_rows(ROWS)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write(pieces(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trace", "t.parquet", "t.jsonl"])
def test_a_killed_writer_leaves_nothing_that_reads_as_complete(tmp_path, name):
    code = f"""
        import os, signal, numpy as np
        from unskew.trace import Trace, Writer
        n = 3 << 19
        trace = Trace.from_packed(cu_seqlens=np.array([0, n]), response_ids=np.arange(n), rollout_logp=-np.arange(n) / n)
        with Writer({str(tmp_path / name)!r}) as writer:
            writer.append(trace)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / name).exists()
    left = list(tmp_path.iterdir())
    assert left, "the test must have killed it midway"
    for path in left:
        with pytest.raises(UnskewError):
            read(path)
    write(Trace.from_rows(ROWS), tmp_path / name)
    assert len(read(tmp_path / name)) == 2


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float64()),
        pa.large_list(pa.float64()),
        pa.list_(pa.float16()),
        pa.large_list(pa.float32()),
        pa.list_(pa.int64()),
    ],
    ids=str,
)
def test_other_float_lists_are_cast(tmp_path, kind):
    table = pa.table(
        {
            "response_ids": pa.array([[1, 2], [3]], pa.large_list(pa.int64())),
            "rollout_logp": pa.array([[-1, -2], [-4]], pa.list_(pa.int64())).cast(kind),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", store_schema=False)
    trace = read(tmp_path / "t.parquet")
    assert trace.tokens("rollout_logp").dtype == np.float32
    assert trace.tokens("rollout_logp").tolist() == [-1, -2, -4]
    assert trace.tokens("response_ids").tolist() == [1, 2, 3]


def test_foreign_parquet_columns(tmp_path):
    table = pa.table(
        {
            "id": pa.array([10, 11]),
            "response_ids": pa.array([[1, None], [3]], pa.list_(pa.int64())),
            "rollout_logp": pa.array([[-1.0, None], [-4.0]]),
            "weight_version": pa.array([7, None]),
            "advantage": pa.array([0.5, -0.5]),
            "finish_reason": pa.array(["stop", "length"]).dictionary_encode(),
            "messages": pa.array([[{"role": "user"}], None]),
            "sampling": pa.array([{"top_p": 1.0, "temperature": 1, "n": 8}, None]),
            "score": [1, 2],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    trace = read(tmp_path / "t.parquet")
    assert trace.rows("id") == ["10", "11"]
    assert trace.tokens("response_ids").tolist() == [1, -1, 3]
    np.testing.assert_array_equal(trace.tokens("rollout_logp"), np.array([-1, np.nan, -4], np.float32))
    assert trace.rows("weight_version") == [[7, 7], None]
    assert trace.tokens("advantage").tolist() == [0.5, 0.5, -0.5]
    assert trace.rows("messages") == ['[{"role": "user"}]', None]
    assert trace.setting("sampling", "temperature") == [1.0, None]
    assert "not read: sampling.n, score" in trace.notes[0]


def test_a_parquet_column_that_does_not_fit_names_the_row(tmp_path):
    ids = pa.array([[1], [2, 2**31]], pa.list_(pa.int64()))
    pq.write_table(pa.table({"response_ids": ids, "rollout_logp": pa.array([[-1.0], [-1.0, -1.0]])}), tmp_path / "t.parquet")
    with pytest.raises(UnskewError, match=r"t.parquet row 1: response_ids\[1\]: expected an integer of 32 bits, got int 21474"):
        read(tmp_path / "t.parquet")
    pq.write_table(pa.table({"response_ids": [[1]], "rollout_logp": ["-1.0"]}), tmp_path / "t.parquet")
    with pytest.raises(UnskewError, match="rollout_logp: expected a list, got str"):
        read(tmp_path / "t.parquet")


def test_columns_and_rename(tmp_path):
    lines = '{"tokens": [1], "lp": [-1.0], "reward": 2.0, "step": 3}\n'
    (tmp_path / "t.jsonl").write_text(lines)
    names = {"tokens": "response_ids", "lp": "rollout_logp"}
    (piece,) = iter_read(tmp_path / "t.jsonl", columns=["reward"], rename=names)
    assert set(piece.table.column_names) == {"response_ids", "rollout_logp", "reward"}
    assert piece.notes == ()
    write(piece, tmp_path / "t.parquet")
    (piece,) = iter_read(tmp_path / "t.parquet", columns=[], rename={"reward": "advantage"})
    assert set(piece.table.column_names) == {"response_ids", "rollout_logp"}
    for wrong, words in (({"x": "reward"}, "no key 'x'"), ({"reward": "rollout_logp", **names}, "more than one key")):
        with pytest.raises(UnskewError, match=words):
            list(iter_read(tmp_path / "t.jsonl", rename=wrong))


def test_glob_and_standard_input(tmp_path, monkeypatch):
    write(Trace.from_rows(ROWS), tmp_path / "a.parquet")
    write(Trace.from_rows(ROWS[1:]), tmp_path / "b.jsonl")
    assert read(tmp_path / "*").rows("id") == ["a", "b", "b"]
    with (tmp_path / "b.jsonl").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert read("-").rows("id") == ["b"]


def test_a_directory_is_only_read_whole(tmp_path):
    write(Trace.from_rows(ROWS), tmp_path / "t")
    (tmp_path / "t" / "manifest.json").rename(tmp_path / "aside.json")
    with pytest.raises(UnskewError, match=r"no manifest.json"):
        read(tmp_path / "t")
    assert len(read(tmp_path / "t" / "*.parquet")) == 2
    text = (tmp_path / "aside.json").read_text()
    for wrong, words in (
        (text.replace('"n_rows": 2', '"n_rows": 3'), "hold 2 rows, manifest.json says 3"),
        (text.replace("00000", "00001"), "no such file"),
        (text.replace('"schema_version": 1', '"schema_version": 2'), "schema version 2"),
        (text[:20], "manifest.json"),
    ):
        (tmp_path / "t" / "manifest.json").write_text(wrong)
        with pytest.raises(UnskewError, match=words):
            read(tmp_path / "t")


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.jsonl")), ids=lambda file: file.stem)
def test_recorded_traces_read(file, tmp_path):
    trace = read(file)
    assert len(trace) == 16
    assert trace.n_tokens == (1024 if file.stem.startswith("vllm") else 768)
    assert trace.notes == ()
    assert trace.mask.all()
    write(trace, tmp_path / "t")
    assert same(read(tmp_path / "t"), trace)
    first = json.loads(file.read_text().splitlines()[0])
    np.testing.assert_array_equal(trace.tokens("rollout_logp")[: trace.lengths[0]], np.float32(first["rollout_logp"]))
