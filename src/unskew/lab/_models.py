"""Where the packaged lab models are, and how they and their tokenizer are made."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from unskew._errors import UnskewError, require

__all__ = ["MODEL_NAMES", "build_model", "build_tokenizer", "chat_text", "model_path", "recorded_path"]

MODEL_NAMES = ("dense", "moe", "dense-old-1", "dense-old-2", "dense-old-3", "adapter")

PAD, BOS, START, EOS = "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 512
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def model_path(name: str) -> Path:
    """The directory of a packaged model: Hugging Face format, or PEFT format for "adapter".

    Args:
        name: "dense", "moe", "dense-old-1" (nearest to dense) to "dense-old-3" (furthest), "adapter" (on dense).

    Raises:
        UnskewError: if no model of that name is packaged.

    Example:
        >>> model_path("dense").name
        'dense'
    """
    path = Path(str(files("unskew.lab") / "models" / name))
    if name not in MODEL_NAMES or not path.is_dir():
        raise UnskewError(f"no lab model {name!r}", hint=f"one of {', '.join(MODEL_NAMES)}", exit_code=2)
    return path


def recorded_path(name: str = "vllm-dense-bf16-t07-processed.parquet") -> Path:
    """A trace that vLLM recorded from the dense model with a planted fault, or ("verdict.json") the verdict on it.

    Example:
        >>> recorded_path().suffix
        '.parquet'
    """
    return Path(str(files("unskew.lab") / "recorded" / name))


def chat_text(messages: Iterable[dict[str, str]]) -> str:
    """The text of a conversation without BOS, as the chat template writes it."""
    return "".join(f"{START}{message['role']}\n{message['content']}{EOS}\n" for message in messages)


def build_tokenizer(texts: Iterable[str]) -> Any:
    """Train the byte-level BPE tokenizer (GPT-2 pre-tokenisation, 512 ids, ChatML template after a BOS).

    Args:
        texts: conversations as `chat_text` writes them.

    Returns:
        A `transformers.PreTrainedTokenizerFast` with pad, BOS and EOS set. Encoding plain text adds no BOS: only the
        chat template does.
    """
    tokenizers = require("tokenizers", extra="lab")
    transformers = require("transformers", extra="lab")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, START, EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(kind: str, tokenizer: Any, *, seed: int = 0) -> Any:
    """A freshly initialised `Qwen3ForCausalLM` ("dense") or `Qwen3MoeForCausalLM` ("moe"), float32.

    Example:
        >>> build_model("cnn", None)
        Traceback (most recent call last):
        ...
        ValueError: kind is 'cnn', expected "dense" or "moe"
    """
    if kind not in ("dense", "moe"):
        raise ValueError(f'kind is {kind!r}, expected "dense" or "moe"')
    torch, transformers = require("torch", extra="lab"), require("transformers", extra="lab")
    shared = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
    }
    torch.manual_seed(seed)
    if kind == "dense":
        config = transformers.Qwen3Config(
            hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, **shared
        )
        model = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            router_aux_loss_coef=0.01,
            **shared,
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model
