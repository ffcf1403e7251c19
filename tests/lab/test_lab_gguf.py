import shutil

import pytest

from unskew._errors import UnskewError
from unskew.lab import model_path

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gguf_reads_back_to_the_same_logits_and_ids(name, dtype, tmp_path):
    from unskew.lab._gguf import write_gguf

    write_gguf(model_path(name), tmp_path / "m.gguf", dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, config=model.config
    )
    ids = torch.arange(1, 200)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path(name))
    read = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    text = "<|bos|><|im_start|>user\nWhat is (3 + 5) * 4 modulo 7?<|im_end|>\n"
    assert read(text).input_ids == tokenizer(text).input_ids


def test_gguf_of_another_architecture_or_dtype_is_refused(tmp_path):
    from unskew.lab._gguf import write_gguf

    with pytest.raises(UnskewError, match="no GGUF dtype 'q8_0'"):
        write_gguf(model_path("dense"), tmp_path / "m.gguf", dtype="q8_0")
    shutil.copytree(model_path("dense"), tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"model_type": "qwen3"', '"model_type": "llama"'))
    with pytest.raises(UnskewError, match="model type 'llama'"):
        write_gguf(tmp_path / "other", tmp_path / "m.gguf")
