"""The columns of a trace and their Arrow types."""

import pyarrow as pa

__all__ = [
    "LOGP_COLUMNS", "REQUIRED", "SCHEMA", "SCHEMA_VERSION", "SEGMENT_FORCED", "SEGMENT_PADDING", "SEGMENT_PROMPT",
    "SEGMENT_SAMPLED", "SEGMENT_TEMPLATE", "SEGMENT_TOOL", "TOKEN_COLUMNS",
]  # fmt: skip

SCHEMA_VERSION = 1

SEGMENT_PROMPT, SEGMENT_SAMPLED, SEGMENT_TOOL, SEGMENT_TEMPLATE, SEGMENT_PADDING, SEGMENT_FORCED = range(6)

REQUIRED = ("response_ids", "rollout_logp")

LOGP_COLUMNS = ("rollout_logp", "prefill_logp", "old_logp", "logp", "ref_logp")

_floats, _ints, _text = pa.list_(pa.float32()), pa.list_(pa.int32()), pa.string()

_SAMPLING = pa.struct({
    "temperature": pa.float64(), "top_p": pa.float64(), "top_k": pa.int32(), "min_p": pa.float64(),
    "repetition_penalty": pa.float64(), "presence_penalty": pa.float64(), "frequency_penalty": pa.float64(),
    "logit_bias": pa.map_(pa.int32(), pa.float64()), "min_tokens": pa.int32(), "stop": pa.list_(_text),
    "logprobs_mode": _text, "seed": pa.int64(),
})  # fmt: skip
_SOURCE = pa.struct({
    "engine": _text, "engine_version": _text, "model": _text, "dtype": _text, "kv_dtype": _text,
    "tp": pa.int32(), "ep": pa.int32(), "batch_invariant": pa.bool_(),
})  # fmt: skip
_TRAINER = pa.struct({
    "framework": _text, "version": _text, "dtype": _text, "logits_dtype": _text, "temperature": pa.float64(),
    "attn": _text, "packed": pa.bool_(), "padding_side": _text, "mode": _text, "tp": pa.int32(), "cp": pa.int32(),
})  # fmt: skip

SCHEMA = pa.schema({
    "id": _text, "group_id": _text, "step": pa.int64(),
    "prompt_ids": _ints, "response_ids": _ints, "segment_ids": pa.list_(pa.int8()), "mask": pa.list_(pa.int8()),
    "rollout_logp": _floats, "prefill_logp": _floats, "old_logp": _floats, "logp": _floats, "ref_logp": _floats,
    "entropy": _floats, "noise_scale": _floats, "topk_ids": pa.list_(_ints), "topk_logp": pa.list_(_floats),
    "weight_version": pa.list_(pa.int64()), "old_version": pa.int64(), "train_version": pa.int64(),
    "cached_tokens": pa.int32(), "turn_ids": _ints, "pad_left": pa.int32(), "pack_id": pa.int64(),
    "pack_index": pa.int32(), "sampling": _SAMPLING, "finish_reason": _text, "reward": pa.float64(),
    "advantage": _floats, "messages": _text, "response_text": _text,
    "routed_experts": pa.list_(pa.list_(pa.list_(pa.int16()))), "routed_weights": pa.list_(pa.list_(_floats)),
    "sampling_mask": pa.list_(_ints), "source": _SOURCE, "trainer": _TRAINER, "sampled": _text, "selection": _text,
})  # fmt: skip
"""Arrow schema of a trace: one row a sequence.

`weight_version` and `advantage` are given as one value a sequence or one a token and stored a token. `messages` is JSON
text. `routed_experts` is prompt + response tokens × layers × top-k.
"""

TOKEN_COLUMNS = frozenset({
    *LOGP_COLUMNS, "response_ids", "segment_ids", "mask", "entropy", "noise_scale", "weight_version", "turn_ids",
    "advantage",
})  # fmt: skip
"""Columns with one value a response token."""
