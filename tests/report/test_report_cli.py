"""`unskew report`: what it writes, what it refuses, and with which exit code."""

import json

import pytest
from click.testing import CliRunner

from unskew.cli import main
from unskew.lab import model_path, recorded_path

TRACE, VERDICT = str(recorded_path()), str(recorded_path("verdict.json"))


def run(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_writes_a_page_and_says_how_large(tmp_path):
    out = tmp_path / "report.html"
    result = run(TRACE, "-o", out, "--verdict", VERDICT, "--tokenizer", model_path("dense"))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Wrote {out} ({out.stat().st_size / 1000:.0f} kB)\n"
    page = out.read_text()
    assert "Mismatch" in page and "·remainder" in page and "Token ids: give" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_writes_markdown_where_the_name_says_so(tmp_path):
    result = run(TRACE, "-o", tmp_path / "comment.md", "--verdict", VERDICT, "--json")
    assert json.loads(result.stdout)["bytes"] == (tmp_path / "comment.md").stat().st_size
    assert (tmp_path / "comment.md").read_text().startswith("### ❌ Mismatch")


def test_does_not_overwrite_unless_told(tmp_path):
    out = tmp_path / "report.html"
    out.write_text("mine")
    refused = run(TRACE, "-o", out)
    assert refused.exit_code == 2 and "exists" in refused.stderr and out.read_text() == "mine"
    assert run(TRACE, "-o", out, "--force").exit_code == 0
    assert "Not diagnosed" in out.read_text()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema_version": 2, "causes": []}', '{"schema_version": 1, "causes": ["x"]}', "\x00"]
)
def test_a_file_that_is_no_verdict_is_exit_4(tmp_path, text):
    (tmp_path / "v.json").write_text(text)
    result = run(TRACE, "-o", tmp_path / "r.html", "--verdict", tmp_path / "v.json")
    assert result.exit_code == 4 and "not a verdict" in result.stderr
    assert not (tmp_path / "r.html").exists()


def test_a_bad_tokenizer_a_missing_folder_and_a_missing_trace_are_errors_in_words(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "not a tokenizer" in run(TRACE, "-o", tmp_path / "r.html", "--tokenizer", tmp_path).stderr
    assert run(TRACE, "-o", tmp_path / "nowhere" / "r.html").exit_code == 2
    assert run(tmp_path / "none.jsonl", "-o", tmp_path / "r.html").exit_code == 4
