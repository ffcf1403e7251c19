"""vLLM's offline engine as a rollout engine."""

import os
from collections.abc import Sequence
from typing import Any

from unskew._errors import UnskewError, require
from unskew.score._sampling import Sampling

__all__ = ["VLLMEngine"]


class VLLMEngine:
    """Samples with `vllm.LLM`, prompt ids in, log-prob of each sampled token out, each as vLLM reports it.

    Args:
        path: HF checkpoint directory.
        dtype: "auto", "float32", "bfloat16" or "float16".
        logprobs_mode: "raw" or "processed"; fixed when the engine starts.
        max_model_len: longest prompt and response together; the model's own limit by default.
        prefill: also score each response again by prefill (`prompt_logprobs`) into `prefill_logp`.
        options: further arguments of `vllm.LLM`.

    On a CPU set VLLM_CPU_KVCACHE_SPACE (GiB) and VLLM_ENABLE_V1_MULTIPROCESSING=0 before the first import of vllm.
    """

    name = "vllm"

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "auto",
        logprobs_mode: str = "raw",
        prefill: bool = False,
        max_model_len: int | None = None,
        **options: Any,
    ) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for results
        self._vllm = require("vllm", extra="vllm")
        self._path, self._dtype, self._mode, self._prefill = path, dtype, logprobs_mode, prefill
        self._llm = self._vllm.LLM(
            model=path,
            dtype=dtype,
            logprobs_mode=f"{logprobs_mode}_logprobs",
            enforce_eager=True,
            max_model_len=max_model_len,
            **options,
        )

    def sample(self, prompts: Sequence[Sequence[int]], *, sampling: Sampling) -> list[dict[str, Any]]:
        """One trace row a prompt.

        Raises:
            UnskewError: another logprobs_mode than the engine runs with, or a token without a log-prob.
        """
        if sampling.logprobs_mode != self._mode:
            raise UnskewError(f"the engine logs {self._mode} log-probs, {sampling.logprobs_mode} were asked for", exit_code=2)
        params = self._vllm.SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty, presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty, max_tokens=sampling.max_tokens, logprobs=0, seed=sampling.seed,
        )  # fmt: skip
        # One seed a request: with one for all, equal prompts would get equal responses.
        each = [params.clone() for _ in prompts]
        for k, one in enumerate(each):
            one.seed = sampling.seed * 1_000_003 + k
        outputs = self._llm.generate([{"prompt_token_ids": list(p)} for p in prompts], each, use_tqdm=False)
        source = {
            "engine": self.name,
            "engine_version": self._vllm.__version__,
            "model": os.path.basename(self._path),
            "dtype": self._dtype,
        }
        rows = []
        for prompt, output in zip(prompts, outputs, strict=True):
            got = output.outputs[0]
            ids = [int(t) for t in got.token_ids]
            if got.logprobs is None or len(got.logprobs) != len(ids):
                raise UnskewError("vLLM returned tokens without log-probs", hint="ask it for logprobs; do not fill missing ones")
            rows.append({
                "prompt_ids": list(prompt), "response_ids": ids,
                "rollout_logp": [step[token].logprob for step, token in zip(got.logprobs, ids, strict=True)],
                "finish_reason": got.finish_reason, "sampling": sampling.record(), "source": source,
                "sampled": "uniform", "selection": "none",
            })  # fmt: skip
        return self._rescored(rows) if self._prefill else rows

    def _rescored(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows with `prefill_logp`: the same ids as a prompt, raw log-probs at temperature 1."""
        params = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0)
        full = [{"prompt_token_ids": row["prompt_ids"] + row["response_ids"]} for row in rows]
        for row, output in zip(rows, self._llm.generate(full, params, use_tqdm=False), strict=True):
            steps = output.prompt_logprobs[len(row["prompt_ids"]) :]
            row["prefill_logp"] = [step[token].logprob for step, token in zip(steps, row["response_ids"], strict=True)]
        return rows
