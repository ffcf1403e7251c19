"""Transformers `generate` as a rollout engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unskew._errors import require
from unskew.score._edit import Edit
from unskew.score._edits import edited_whole
from unskew.score._hf import HFScorer
from unskew.score._sampling import Sampling

__all__ = ["HFEngine"]


class HFEngine:
    """Samples with a KV cache, left-padded batches, and logs the log-prob of each sampled token in float32.

    Args:
        scorer: the model and its tokenizer, in the dtype to sample in.
        path: what the trace calls the model.
        batch: sequences a `generate` call.
    """

    name = "transformers"

    def __init__(self, scorer: HFScorer, *, path: str = "", batch: int = 64) -> None:
        self.model, self.tokenizer, self._path, self._batch = scorer.model, scorer.tokenizer, path, batch
        self._ends = scorer.eos_ids

    @classmethod
    def load(cls, path: str | Path, *, dtype: str = "float32", batch: int = 64) -> "HFEngine":
        """The engine of a checkpoint, as `HFScorer.load`."""
        return cls(HFScorer.load(path, dtype=dtype), path=str(path), batch=batch)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], *, sampling: Sampling, edits: Sequence[Edit] = ()) -> list[dict[str, Any]]:
        """One trace row a prompt, under edits of the model. The EOS that ends a response was sampled and is part of it."""
        torch.manual_seed(sampling.seed)
        rows = []
        with edited_whole(self.model, edits):
            for start in range(0, len(prompts), self._batch):
                rows += self._generate(prompts[start : start + self._batch], sampling)
        return rows

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[dict[str, Any]]:
        transformers = require("transformers", extra="hf")
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            # A config of its own: what generation_config.json sets must not reach the sampler unseen.
            generation_config=transformers.GenerationConfig(
                do_sample=True,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p or None,
                repetition_penalty=sampling.repetition_penalty,
                sequence_bias=[[[token], float(bias)] for token, bias in sampling.logit_bias.items()] or None,
                min_new_tokens=sampling.min_tokens or None,
                max_new_tokens=sampling.max_tokens,
                eos_token_id=list(self._ends) or None,
                pad_token_id=0,
                output_logits=True,
                output_scores=True,
                return_dict_in_generate=True,
            ),
            prefix_allowed_tokens_fn=(lambda _row, _ids: list(sampling.allowed_ids)) if sampling.allowed_ids else None,
            logits_processor=transformers.LogitsProcessorList([_OutputPenalties(sampling, longest)]),
        )
        sampled = output.sequences[:, longest:].cpu()
        steps = output.scores if sampling.logprobs_mode == "processed" else output.logits
        logp = torch.stack(
            [s.float().log_softmax(-1).gather(1, sampled[:, t : t + 1].to(s.device))[:, 0].cpu() for t, s in enumerate(steps)], 1
        )
        source = {"engine": self.name, "engine_version": transformers.__version__, "model": self._path,
                  "dtype": str(self.model.dtype).removeprefix("torch.")}  # fmt: skip
        rows = []
        for row, prompt in enumerate(prompts):
            tokens = sampled[row].tolist()
            end = next((t for t, token in enumerate(tokens) if token in self._ends), None)
            n = len(tokens) if end is None else end + 1
            rows.append({
                "prompt_ids": list(prompt), "response_ids": tokens[:n], "rollout_logp": logp[row, :n].tolist(),
                "finish_reason": "length" if end is None else "stop", "sampling": sampling.record(), "source": source,
                "sampled": "uniform", "selection": "none",
            })  # fmt: skip
        return rows


class _OutputPenalties:
    """Presence and frequency penalty on the tokens of the output so far, which transformers does not have."""

    def __init__(self, sampling: Sampling, longest: int) -> None:
        self._presence, self._frequency, self._longest = sampling.presence_penalty, sampling.frequency_penalty, longest

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not (self._presence or self._frequency):
            return scores
        output = ids[:, self._longest :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
