"""Settings that a fix touches, in the words of each framework. One table; causes name its rows."""

from collections.abc import Mapping, Sequence

from unskew._errors import UnskewError

__all__ = ["FRAMEWORKS", "SETTINGS", "snippets"]

Cell = tuple[str, str]

SETTINGS: Mapping[str, Mapping[str, Cell]] = {
    "rollout.temperature": {
        "verl": ("yaml", "actor_rollout_ref:\n  rollout:\n    temperature: {temperature}"),
        "trl": ("python", "GRPOConfig(temperature={temperature})"),
        "slime": ("shell", "--rollout-temperature {temperature}"),
        "vllm": ("python", "SamplingParams(temperature={temperature})"),
    },
    "trainer.temperature": {
        "verl": (
            "yaml",
            "actor_rollout_ref:\n  rollout:\n    temperature: {temperature}  # the actor divides its logits by it too",
        ),
        "trl": ("python", "GRPOConfig(temperature={temperature})  # sampler and trainer read the same field"),
        "slime": ("shell", "--rollout-temperature {temperature}  # the trainer divides by it too"),
    },
    "rollout.logprobs_mode": {
        "verl": ("yaml", "actor_rollout_ref:\n  rollout:\n    logprobs_mode: processed_logprobs"),
        "vllm": ("shell", "--logprobs-mode processed_logprobs"),
    },
    "rollout.top_p": {
        "verl": ("yaml", "actor_rollout_ref:\n  rollout:\n    top_p: 1.0"),
        "trl": ("python", "GRPOConfig(top_p=1.0)"),
        "slime": ("shell", "--rollout-top-p 1.0"),
        "vllm": ("python", "SamplingParams(top_p=1.0)"),
    },
    "rollout.top_k": {
        "verl": ("yaml", "actor_rollout_ref:\n  rollout:\n    top_k: -1"),
        "trl": ("python", "GRPOConfig(top_k=0)"),
        "slime": ("shell", "--rollout-top-k -1"),
        "vllm": ("python", "SamplingParams(top_k=0)"),
    },
    "rollout.repetition_penalty": {
        "trl": ("python", "GRPOConfig(repetition_penalty=1.0)"),
        "vllm": ("python", "SamplingParams(repetition_penalty=1.0)"),
    },
    "rollout.generation_config": {"vllm": ("shell", "--generation-config vllm")},
    "rollout.dtype": {
        "verl": ("yaml", "actor_rollout_ref:\n  rollout:\n    dtype: float16"),
        "vllm": ("shell", "--dtype float16"),
        "sglang": ("shell", "--dtype float16"),
    },
    "trainer.dtype": {"trl": ("python", "GRPOConfig(fp16=True, bf16=False)")},
    "trainer.logits_dtype": {"trl": ("python", "GRPOConfig(cast_lm_head_to_fp32=True)  # on both sides or on neither")},
    "trainer.sampling_mask": {"slime": ("shell", "--rollout-top-p 1.0  # below 1 it replays the recorded support")},
    "rollout.return_routed_experts": {
        "verl": ("yaml", "actor_rollout_ref:\n  rollout:\n    enable_rollout_routing_replay: true"),
        "slime": ("shell", "--use-rollout-routing-replay"),
        "vllm": ("shell", "--enable-return-routed-experts"),
    },
    "trainer.router_replay": {
        "verl": ("yaml", "actor_rollout_ref:\n  actor:\n    megatron:\n      router_replay:\n        mode: R3"),
        "slime": ("shell", "--use-rollout-routing-replay"),
        "nemo-rl": ("yaml", "policy:\n  router_replay:\n    enabled: true"),
        "prime-rl": ("yaml", "trainer:\n  enable_router_replay: true"),
    },
    "rollout.prefix_cache": {
        "vllm": ("python", "llm.reset_prefix_cache()  # after every weight update"),
        "sglang": ("shell", "--disable-radix-cache"),
    },
    "correction.level": {
        "verl": ("yaml", "algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: 2.0"),
        "trl": ("python", 'GRPOConfig(vllm_importance_sampling_mode="token_truncate")'),
        "slime": ("shell", "--use-tis --tis-clip 2.0"),
        "skyrl": ("yaml", "trainer:\n  algorithm:\n    off_policy_correction:\n      tis_ratio_type: token"),
    },
}
"""Setting → framework → (language, snippet with the fixing value; `{name}` is a parameter of the finding)."""

FRAMEWORKS = tuple(sorted({framework for row in SETTINGS.values() for framework in row}))


def snippets(
    settings: Sequence[str], parameters: Mapping[str, object], *, framework: str | None = None
) -> tuple[tuple[str, str, str], ...]:
    """(framework, language, snippet) of the settings that are known for each framework.

    A snippet whose parameter the finding does not have is left out, and so is one that another repeats with a remark.

    Raises:
        UnskewError: no such framework.

    Example:
        >>> snippets(["rollout.temperature"], {"temperature": 0.7}, framework="trl")
        (('trl', 'python', 'GRPOConfig(temperature=0.7)'),)
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise UnskewError(f"no settings are known for {framework!r}", hint=f"one of {', '.join(FRAMEWORKS)}", exit_code=2)
    out: dict[tuple[str, str, str], str] = {}
    for name in settings:
        for other, (language, template) in SETTINGS.get(name, {}).items():
            if framework in (None, other):
                try:
                    text = template.format_map(dict(parameters))
                except KeyError:
                    continue
                setting = (other, language, text.split("  #")[0])
                out[setting] = max(out.get(setting, ""), text, key=len)
    return tuple((other, language, text) for (other, language, _), text in sorted(out.items()))
