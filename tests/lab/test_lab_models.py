import itertools
import json

import numpy as np
import pytest

from unskew._errors import UnskewError
from unskew.lab import MODEL_NAMES, Problem, documents, model_path, problem_of, prompts, reward

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(model_path("dense"))


def load(name):
    return transformers.AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32).eval()


def test_reward_by_hand():
    question = "Please work out ((4 + 4) * 4) - 6 modulo 7."  # 8 -> 1, 4, -2 -> 5
    assert reward(question, "4 + 4 = 8, or 1. 1 * 4 = 4. 4 - 6 = -2. The answer is 5.<|im_end|>") == 1.0
    assert reward(question, "Therefore, modulo 7, the result is 5.") == 1.0
    assert reward(question, "Answer: 5") == 1.0
    assert reward(question, "That makes the answer 5. Done!") == 1.0
    assert reward(question, "The answer is 6.") == 0.0
    assert reward(question, "The answer is -2.") == 0.0
    assert reward(question, "The answer is 15.") == 0.0
    assert reward(question, "The answer is 5. No, 4.") == 0.0
    assert reward(question, "4 + 4 = 8, or 1. 1 * 4 = 4. 4 - 6 = -2, which is 5") == 0.0
    assert reward(question, "") == 0.0
    with pytest.raises(ValueError, match="no modular expression"):
        reward("What is love?", "The answer is 5.")


def test_problem_steps_by_hand():
    problem = Problem(7, 4, (("+", 4), ("*", 4), ("-", 6)))
    assert problem.values == ((8, 1), (4, 4), (-2, 5))
    assert problem_of(f"Compute {problem.expression} modulo 7.") == problem


def test_prompts_are_seeded_split_and_answerable():
    assert prompts(5, 3) == prompts(5, 3) != prompts(5, 4)
    train = {chat[-1]["content"] for chat in prompts(500, 0)}
    held_out = {chat[-1]["content"] for chat in prompts(200, 0, split="heldout")}
    assert all(problem_of(q).held_out for q in held_out)
    assert not any(problem_of(q).held_out for q in train)
    assert {chat[0]["role"] for chat in prompts(50, 0)} == {"system", "user"}
    with pytest.raises(ValueError, match="split"):
        prompts(1, 0, split="test")


def test_documents_are_right_and_varied():
    chats = list(itertools.islice(documents(5), 300))
    assert all(reward(chat[-2]["content"], chat[-1]["content"]) == 1.0 for chat in chats)
    assert len({chat[-1]["content"] for chat in chats}) == 300


def test_model_path_names():
    assert all((model_path(name)).is_dir() for name in MODEL_NAMES)
    with pytest.raises(UnskewError, match="no lab model 'densest'"):
        model_path("densest")


def test_package_data_is_small():
    files = [path for path in model_path("dense").parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10_000_000


def test_tokenizer(tokenizer):
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert len(set(ids)) == 3
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) == 512
    chat = prompts(1, 0)[0]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith(tokenizer.bos_token + "<|im_start|>")
    assert text.endswith("<|im_start|>assistant\n")
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens.count(tokenizer.bos_token_id) == 1
    assert tokens == tokenizer(text).input_ids
    awkward = "7 × 8 = ５6?\n\t≠ ok"
    assert tokenizer.decode(tokenizer(awkward).input_ids) == awkward


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name.startswith(("dense", "moe"))])
def test_stored_in_bf16_with_the_same_tokenizer(name, tokenizer):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path(name))
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) <= 800_000
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (model_path(name) / file).read_bytes() == (model_path("dense") / file).read_bytes()


def test_moe_shape():
    config = json.loads((model_path("moe") / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["norm_topk_prob"]) == (8, 2, True)
    assert config["num_hidden_layers"] >= 3


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_greedy_accuracy_entropy_and_bos(name, tokenizer):
    from unskew.lab._train import greedy_accuracy, sample, token_scores

    model = load(name)
    assert greedy_accuracy(model, tokenizer, n=20, seed=11) >= 0.85
    rows = sample(model, tokenizer, prompts(12, 12, split="heldout"), seed=3)
    assert sum(response[-1] == tokenizer.eos_token_id for _, response in rows) >= 11
    logp, entropy = token_scores(model, rows)
    assert 0.2 <= entropy.mean() <= 0.8
    without_bos, _ = token_scores(model, rows, drop=1)
    assert np.abs(logp - without_bos).mean() > 0.05


def test_older_snapshots_and_adapter_move_log_probs_in_order(tokenizer):
    peft = pytest.importorskip("peft")
    from unskew.lab._train import sample, token_scores

    model = load("dense")
    rows = sample(model, tokenizer, prompts(12, 12, split="heldout"), seed=3)
    logp, _ = token_scores(model, rows)
    shifts = [np.abs(logp - token_scores(load(f"dense-old-{k}"), rows)[0]).mean() for k in (1, 2, 3)]
    assert shifts == sorted(shifts)
    assert 0.01 < shifts[0] < 0.04 < shifts[2] < 0.3
    adapted = peft.PeftModel.from_pretrained(model, model_path("adapter")).eval()
    assert 0.05 < np.abs(logp - token_scores(adapted, rows)[0]).mean() < 0.2
