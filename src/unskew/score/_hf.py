"""A Hugging Face causal LM as scorer."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unskew._errors import UnskewError, require
from unskew.score._attention import ATTENTION_EDITS
from unskew.score._edit import Edit
from unskew.score._edits import edited, edited_head
from unskew.score._head import HeadStates, TokenScores
from unskew.score._routing import capture_routing, replay_routing, routers
from unskew.score._transforms import SamplingTransform
from unskew.trace import Trace

__all__ = ["HFScorer"]

Ids = Sequence[int] | np.ndarray


class HFScorer:
    """Log-probs of given ids under an HF causal LM, in eval mode, any architecture with an output embedding.

    Args:
        model: the model, on its device and in its dtype.
        tokenizer: its tokenizer, or None.
        max_tokens: padded tokens a forward pass at most.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, max_tokens: int = 16384) -> None:
        self.model, self.tokenizer, self.max_tokens = model.eval(), tokenizer, max_tokens
        self._config = model.config.get_text_config()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response, as the checkpoint's generation config names them, else its tokenizer."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if ends is not None else getattr(self.tokenizer, "eos_token_id", None)
        return tuple(sorted(ends)) if isinstance(ends, list) else () if ends is None else (ends,)

    @classmethod
    def load(cls, path: str | Path, *, dtype: str = "float32", adapters: Sequence[str | Path] = ()) -> "HFScorer":
        """The scorer of a checkpoint: an HF directory, or a GGUF file with its tokenizer inside.

        Args:
            path: directory or `.gguf` file; nothing is downloaded.
            dtype: "float32", "bfloat16" or "float16".
            adapters: PEFT directories, merged into the weights one after the other.

        Raises:
            UnskewError: no such checkpoint, or one that cannot be read.
        """
        transformers = require("transformers", extra="hf")
        path = Path(path)
        if not path.exists():
            raise UnskewError(f"{path}: no such checkpoint", hint="give an HF directory or a .gguf file")
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path), "local_files_only": True}
        if path.suffix == ".gguf":
            where |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        elif not (path / "config.json").exists():
            raise UnskewError(f"{path}: no config.json", hint="give an HF checkpoint directory or a .gguf file")
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
            has_tokenizer = path.suffix == ".gguf" or any(path.glob("tokenizer*")) or any(path.glob("vocab*"))
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where) if has_tokenizer else None
        except (OSError, ValueError, KeyError) as error:
            raise UnskewError(
                f"{path}: cannot load this checkpoint: {error}", hint="check config.json and the weights"
            ) from error
        for adapter in adapters:
            peft = require("peft", extra="lab")
            model = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        return cls(model, tokenizer)

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def score(self, trace: Trace, transform: SamplingTransform = SamplingTransform()) -> TokenScores:
        """Log-prob, entropy and noise scale of every response token of a trace, each float64 (N,).

        Raises:
            UnskewError: no `prompt_ids`, or an id outside the vocabulary.
        """
        responses = np.split(trace.tokens("response_ids"), trace.cu_seqlens[1:-1])
        return self.forward(trace.contexts(), responses).scores(transform)

    @torch.no_grad()
    def forward(
        self, prompts: Sequence[Ids], responses: Sequence[Ids], *, positions: Sequence[Ids] | None = None,
        routed_experts: Sequence[Any] | None = None, cached: "tuple[Sequence[int], HFScorer] | None" = None,
        edits: Sequence[Edit] = (), cache_bytes: int = 1 << 29,
    ) -> HeadStates:  # fmt: skip
        """Run the body once, batched by length, and keep the hidden states before the head.

        Args:
            prompts: ids of each context; an empty one leaves the first response token without a prediction (NaN).
            responses: ids of each response.
            positions: position ids of each sequence; None for 0, 1, ….
            routed_experts: expert ids to force, one (tokens, layers, k) array a sequence over prompt + response, short
                at the end where the engine did not route its last tokens.
            cached: how many first tokens of each sequence have their K/V from another scorer, and that scorer.
            edits: changes to the arithmetic of body and head.
            cache_bytes: logits of up to this size are kept for the next transform.
        """
        with edited(self.model, edits):
            if cached is not None and any(cached[0]):
                states = self._behind(prompts, responses, *cached)
            else:
                states = self._hidden(prompts, responses, positions, routed_experts)
        missing = np.concatenate(
            [np.arange(len(r)) < (1 if len(p) == 0 else 0) for p, r in zip(prompts, responses, strict=True)]
            or [np.zeros(0, bool)]
        )
        head = edited_head(self.model, self.head, edits)
        return HeadStates(states, head, prompts, responses, missing=missing, cache_bytes=cache_bytes)

    def _hidden(
        self, prompts: Sequence[Ids], responses: Sequence[Ids], positions: Sequence[Ids] | None,
        routed_experts: Sequence[Any] | None,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states (N, D) that predict each response token."""
        full = [
            np.concatenate([np.asarray(p, np.int64), np.asarray(r, np.int64)]) for p, r in zip(prompts, responses, strict=True)
        ]
        self._check_ids(full, prompts)
        lengths = np.array([len(ids) for ids in full])
        order = np.argsort(-lengths, kind="stable")
        parts: list[torch.Tensor | None] = [None] * len(full)
        start = 0
        while start < len(order):
            longest = max(int(lengths[order[start]]), 1)
            batch = order[start : start + max(1, self.max_tokens // longest)]
            routing = None if routed_experts is None else [routed_experts[k] for k in batch]
            places = None if positions is None else [positions[k] for k in batch]
            hidden = self._body([full[k] for k in batch], routing, places)
            for row, k in enumerate(batch):
                first = len(prompts[k])
                parts[k] = hidden[row, max(first - 1, 0) : len(full[k]) - 1]
                if first == 0 and len(full[k]):
                    parts[k] = torch.cat([hidden[row, :1], parts[k]])
            start += len(batch)
        width = self.model.get_output_embeddings().weight.shape[1]
        return torch.cat([p for p in parts if p is not None]) if parts else torch.zeros((0, width))

    def _behind(
        self, prompts: Sequence[Ids], responses: Sequence[Ids], lengths: Sequence[int], other: "HFScorer"
    ) -> torch.Tensor:
        """As `_hidden`, the first tokens of each sequence read through the K/V that another scorer computed."""
        parts = []
        for prompt, response, length in zip(prompts, responses, lengths, strict=True):
            length = min(int(length), len(prompt) - 1)
            if length <= 0:
                parts.append(self._hidden([prompt], [response], None, None))
                continue
            ids = torch.tensor(np.concatenate([prompt, response]).astype(np.int64))[None].to(self.model.device)
            prefix = other.model(input_ids=ids[:, :length], use_cache=True).past_key_values
            kept: list[torch.Tensor] = []
            handle = self.model.base_model.register_forward_hook(lambda _m, _i, output, kept=kept: kept.append(output[0]))
            try:
                self.model(input_ids=ids[:, length:], past_key_values=prefix, use_cache=True)
            finally:
                handle.remove()
            parts.append(kept[0][0, len(prompt) - 1 - length : -1])
        return torch.cat(parts)

    def routing(self, prompts: Sequence[Ids], responses: Sequence[Ids]) -> list[np.ndarray]:
        """Expert ids this model chooses, one (tokens, layers, k) array a sequence over prompt + response.

        Raises:
            UnskewError: the model has no top-k router.
        """
        out = []
        for prompt, response in zip(prompts, responses, strict=True):
            with capture_routing(self.model) as chosen:
                self.forward([prompt], [response])
            out.append(np.stack([torch.cat(layer).numpy() for layer in chosen], axis=1))
        return out

    def _body(self, rows: Sequence[np.ndarray], routing: Sequence[Any] | None, positions: Sequence[Ids] | None) -> torch.Tensor:
        """Last hidden states (rows, longest, D), checked against the logits that the model itself returns."""
        device = self.model.device
        longest = max(len(ids) for ids in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.from_numpy(tokens)
            mask[row, : len(tokens)] = 1
        kept: list[torch.Tensor] = []
        handle = self.model.base_model.register_forward_hook(lambda _m, _i, output: kept.append(output[0]))
        accepts = inspect.signature(self.model.forward).parameters
        more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}
        if "position_ids" in accepts:
            places = torch.arange(longest)[None].repeat(len(rows), 1)
            for row, given in enumerate(positions if positions is not None else ()):
                places[row, : len(given)] = torch.tensor(np.asarray(given, np.int64))
            more["position_ids"] = places.to(device)
        forced = nullcontext() if routing is None else replay_routing(self.model, _routing_of(routing, longest))
        try:
            with forced:
                output = self.model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False, **more)
        finally:
            handle.remove()
        hidden = kept[0]
        own, ours = output.logits[:, -1].float(), self.head(hidden[:, -1]).float()
        if own.shape != ours.shape or not torch.allclose(own, ours, rtol=2e-2, atol=2e-2 * float(own.abs().max())):
            raise UnskewError(
                f"{type(self.model).__name__}: its logits are not its output embedding applied to its last hidden states",
                hint="this architecture post-processes its logits in a way unskew does not know; please report it",
            )
        return hidden

    def takes(self, edit: str) -> bool:
        """Whether this architecture has a place for an edit."""
        if edit == "routing":
            return bool(routers(self.model))
        if edit.startswith("rope"):
            return any(name.endswith("inv_freq") for name, _ in self.model.named_buffers())
        return not (edit in ATTENTION_EDITS and self._config._attn_implementation not in ("sdpa", "eager"))

    @property
    def tensor_groups(self) -> tuple[str, ...]:
        """Groups of tensors that a weight sync moves together: "embedding", "layers.0", …, "head" (the output embedding)."""
        return tuple(dict.fromkeys(self._group(name) for name in self.model.state_dict(keep_vars=True)))

    def _group(self, name: str) -> str:
        if (found := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)) is not None:
            return f"layers.{found[1]}"
        if name.endswith((".embed_tokens.weight", ".wte.weight", ".embed_in.weight")):
            return "embedding"
        return "head" if "lm_head" in name or "embed_out" in name else "norm"

    @contextmanager
    def with_tensors_of(self, other: "HFScorer", groups: Sequence[str]) -> Iterator[None]:
        """Another checkpoint's tensors of these groups in the place of this one's; a tied head stands apart from its embedding."""
        theirs, swapped = other.model.state_dict(keep_vars=True), {}
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        tied = head.weight is embedding.weight
        if tied:
            head.weight = torch.nn.Parameter(head.weight.data)
        try:
            for name, parameter in self.model.state_dict(keep_vars=True).items():
                if self._group(name) in groups:
                    swapped[parameter] = parameter.data
                    parameter.data = theirs[name].data
            yield
        finally:
            for parameter, values in swapped.items():
                parameter.data = values
            if tied:
                head.weight = embedding.weight

    def frozen_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head with the weight that it has now."""
        weight = self.model.get_output_embeddings().weight.data

        def head(hidden: torch.Tensor) -> torch.Tensor:
            parameter = self.model.get_output_embeddings().weight
            now = parameter.data
            parameter.data = weight
            try:
                return self.head(hidden)
            finally:
                parameter.data = now

        return head

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (…, V) of last hidden states (…, D), softcap and scaling included."""
        logits = self.model.get_output_embeddings()(hidden)
        if (scale := getattr(self._config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scaling := getattr(self._config, "logits_scaling", None)) is not None:
            logits = logits / scaling
        if (cap := getattr(self._config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _check_ids(self, full: Sequence[np.ndarray], prompts: Sequence[Ids]) -> None:
        vocab = self.vocab_size
        for row, ids in enumerate(full):
            bad = np.flatnonzero((ids < 0) | (ids >= vocab))
            if len(bad):
                at = int(bad[0]) - len(prompts[row])
                where = f"response token {at}" if at >= 0 else f"prompt token {int(bad[0])}"
                raise UnskewError(
                    f"row {row} {where}: id {int(ids[bad[0]])} is outside the model's vocabulary of {vocab}",
                    hint="the trace was made with another tokenizer: give the checkpoint that sampled",
                )


def _routing_of(routing: Sequence[Any], longest: int) -> torch.Tensor:
    """(layers, rows × longest, k) from (tokens, layers, k) arrays, −1 where nothing was recorded."""
    arrays = [np.asarray(r, np.int64) for r in routing]
    layers, k = arrays[0].shape[1:]
    out = np.full((len(arrays), longest, layers, k), -1, np.int64)
    for row, ids in enumerate(arrays):
        out[row, : len(ids)] = ids[:longest]
    return torch.from_numpy(out.transpose(2, 0, 1, 3).reshape(layers, len(arrays) * longest, k))
