"""Write a lab model as a GGUF file, for llama.cpp."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from unskew._errors import UnskewError, require

__all__ = ["write_gguf"]

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def write_gguf(model_dir: str | Path, out: str | Path, *, dtype: str = "f32") -> Path:
    """Write a Qwen3 or Qwen3-MoE directory in Hugging Face format as one GGUF file.

    Args:
        model_dir: a lab model, such as `model_path("dense")`.
        out: the file to write.
        dtype: "f32" (exact), "f16" or "bf16" (exact) for the matrices; norms and router stay f32, as llama.cpp wants.

    Raises:
        UnskewError: if the architecture is neither qwen3 nor qwen3_moe, or the dtype another.
    """
    gguf, torch = require("gguf", extra="gguf"), require("torch", extra="gguf")
    transformers = require("transformers", extra="gguf")
    model_dir, out = Path(model_dir), Path(out)
    config = transformers.AutoConfig.from_pretrained(model_dir)
    if config.model_type not in ("qwen3", "qwen3_moe"):
        raise UnskewError(f"{model_dir}: model type {config.model_type!r}", hint="only qwen3 and qwen3_moe are written")
    if dtype not in ("f32", "f16", "bf16"):
        raise UnskewError(f"no GGUF dtype {dtype!r} here", hint="one of f32, f16, bf16", exit_code=2)
    moe = config.model_type == "qwen3_moe"
    kind = {
        "f32": gguf.GGMLQuantizationType.F32,
        "f16": gguf.GGMLQuantizationType.F16,
        "bf16": gguf.GGMLQuantizationType.BF16,
    }
    writer = gguf.GGUFWriter(out, "qwen3moe" if moe else "qwen3")
    writer.add_name(f"unskew lab {model_dir.name}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(
        {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16}.get(dtype, gguf.LlamaFileType.MOSTLY_BF16)
    )
    if moe:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_tokenizer(writer, gguf, model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for name, tensor in _tensors(model, config):
        matrix = tensor.ndim > 1 and "ffn_gate_inp" not in name
        target = kind[dtype] if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _tensors(model: Any, config: Any) -> list[tuple[str, np.ndarray]]:
    rows = []
    for name, value in model.state_dict().items():
        tensor = value.numpy()
        if name == "model.embed_tokens.weight":
            rows.append(("token_embd.weight", tensor))
        elif name == "model.norm.weight":
            rows.append(("output_norm.weight", tensor))
        elif name == "lm_head.weight":
            if not config.tie_word_embeddings:
                rows.append(("output.weight", tensor))
        else:
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
            if part == "mlp.experts.gate_up_proj":  # (experts, 2 * width, hidden)
                width = tensor.shape[1] // 2
                rows.append((f"{prefix}ffn_gate_exps.weight", tensor[:, :width]))
                rows.append((f"{prefix}ffn_up_exps.weight", tensor[:, width:]))
            elif part == "mlp.experts.down_proj":
                rows.append((f"{prefix}ffn_down_exps.weight", tensor))
            else:
                rows.append((f"{prefix}{_BLOCK[part.removesuffix('.weight')]}.weight", tensor))
    return rows


def _add_tokenizer(writer: Any, gguf: Any, model_dir: Path) -> None:
    stored = json.loads((model_dir / "tokenizer.json").read_text())
    by_id = {index: token for token, index in stored["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in stored["added_tokens"]}
    tokens = [text for _, text in sorted({**by_id, **special}.items())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokens))]
    )
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    names = {text: index for index, text in special.items()}
    writer.add_bos_token_id(names["<|bos|>"])
    writer.add_eos_token_id(names["<|im_end|>"])
    writer.add_pad_token_id(names["<|pad|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((model_dir / "chat_template.jinja").read_text())
