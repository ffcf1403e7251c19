import ast
import dataclasses
import shlex
import tomllib
from pathlib import Path

import pytest

from unskew._errors import UnskewError
from unskew.causes import CAUSES
from unskew.causes._settings import FRAMEWORKS, SETTINGS, page, snippets

PARAMETERS = {"temperature": 0.7, "max_tokens": 1024}
CELLS = [
    (name, framework, language, text.format_map(PARAMETERS))
    for name, row in SETTINGS.items()
    for framework, (language, text) in row.items()
]
SERVER_OPTIONS = {"chat_template"}


def of(framework, language):
    return [(name, text) for name, other, kind, text in CELLS if (other, kind) == (framework, language)]


def keywords(text, function):
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return {k.arg for call in calls if getattr(call.func, "id", "") == function for k in call.keywords}


def test_the_page_is_the_data():
    assert (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8") == page()


def test_the_frameworks_are_those_of_the_table():
    assert {framework for row in SETTINGS.values() for framework in row} == set(FRAMEWORKS)
    assert len(FRAMEWORKS) == 11
    assert list(FRAMEWORKS) == sorted(FRAMEWORKS)


def test_every_setting_that_a_cause_names_is_a_row():
    missing = {f"{name} ({cause.id})" for cause in CAUSES.values() for name in cause.settings if name not in SETTINGS}
    assert not missing


@pytest.mark.parametrize(("name", "framework", "language", "text"), CELLS, ids=[f"{c[0]}-{c[1]}" for c in CELLS])
def test_every_snippet_parses_in_its_language(name, framework, language, text):
    if language == "yaml":
        assert isinstance(pytest.importorskip("yaml").safe_load(text), dict)
    elif language == "toml":
        assert tomllib.loads(text)
    elif language == "python":
        assert len(ast.parse(text).body) == 1
    else:
        assert language == "shell"
        words = shlex.split(text, comments=True)
        variable, _, value = words[0].partition("=")
        assert words[0].startswith("--") or (variable.isupper() and value)


def test_lines_that_share_a_path_make_one_tree():
    yaml = pytest.importorskip("yaml")
    (found,) = snippets(["trainer.micro_batch"], {}, framework="verl")
    assert yaml.safe_load(found[2]) == {
        "actor_rollout_ref": {
            "actor": {"ppo_micro_batch_size_per_gpu": 1},
            "rollout": {"log_prob_micro_batch_size_per_gpu": 1},
        }
    }


def test_a_snippet_whose_parameter_is_not_known_is_left_out():
    assert "slime" not in {framework for framework, _, _ in snippets(["rollout.max_tokens"], {})}
    assert ("slime", "shell", "--rollout-max-response-len 512") in snippets(["rollout.max_tokens"], {"max_tokens": 512})


def test_a_setting_that_two_rows_share_is_shown_once_with_its_remark():
    found = snippets(["rollout.temperature", "trainer.temperature"], {"temperature": 0.7}, framework="slime")
    assert found == (("slime", "shell", "--rollout-temperature 0.7  # the trainer divides by it too"),)


def test_braces_of_a_snippet_stay():
    assert snippets(["rollout.logits_dtype"], {}, framework="vllm")[0][2].startswith('--hf-overrides \'{"head_dtype"')


def test_a_framework_that_is_not_known_is_refused():
    with pytest.raises(UnskewError, match="llama"):
        snippets(["rollout.temperature"], {}, framework="llama")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_has_every_field():
    trl = pytest.importorskip("trl")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    named = {key for _, text in of("trl", "python") for key in keywords(text, "GRPOConfig")}
    assert len(named) > 20
    assert named <= known


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_vllm_has_every_field_and_option():
    vllm = pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    engine = {field.name for field in dataclasses.fields(EngineArgs)}
    sampling = set(vllm.SamplingParams.__struct_fields__)
    python = [text for _, text in of("vllm", "python")]
    assert {key for text in python for key in keywords(text, "SamplingParams")} <= sampling
    assert {key for text in python for key in keywords(text, "LLM")} <= engine
    trl = {key for _, text in of("trl", "python") if "generation_kwargs" in text for key in keywords(text, "dict")}
    assert trl <= sampling
    options = {w for _, text in of("vllm", "shell") for w in shlex.split(text, comments=True) if w.startswith("--")}
    assert {w[2:].removeprefix("no-").replace("-", "_") for w in options} <= engine | SERVER_OPTIONS
