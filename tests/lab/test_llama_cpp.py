"""llama.cpp loads the lab models; run by hand: pip install llama-cpp-python==0.3.36 builds for 10 to 40 minutes."""

import numpy as np
import pytest

from unskew.lab import model_path, prompts
from unskew.lab._gguf import write_gguf
from unskew.score import HFEngine, HFScorer, Sampling
from unskew.trace import Trace


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-5), ("bf16", 2e-2)])
def test_llama_cpp_gives_the_same_ids_and_log_probs(tmp_path, model, dtype, bound):
    llama_cpp = pytest.importorskip("llama_cpp")
    scorer = HFScorer.load(model_path(model))
    chats = prompts(4, seed=3)
    ids = [scorer.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    trace = Trace.from_rows(HFEngine(scorer, path=model).sample(ids, sampling=Sampling(max_tokens=60, seed=1)))
    clean = np.split(scorer.score(trace).logp, trace.cu_seqlens[1:-1])
    path = write_gguf(model_path(model), tmp_path / "model.gguf", dtype=dtype)
    engine = llama_cpp.Llama(str(path), logits_all=True, n_ctx=512, verbose=False, type_k=0, type_v=0)
    text = scorer.tokenizer.apply_chat_template(chats[0], add_generation_prompt=True, tokenize=False)
    assert engine.tokenize(text.encode(), add_bos=False, special=True) == ids[0]
    for prompt, response, expected in zip(ids, trace.rows("response_ids"), clean, strict=True):
        engine.reset()
        engine.eval([*prompt, *response])
        logits = np.array(engine.scores[len(prompt) - 1 : len(prompt) + len(response) - 1], np.float64)
        logp = logits[np.arange(len(response)), response] - np.logaddexp.reduce(logits, axis=1)
        np.testing.assert_allclose(logp, expected, atol=bound)
