"""How an engine is asked to sample."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["Engine", "Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one recording, in the trace's own names.

    `allowed_ids`: the only ids that can be sampled, () for all; a trace does not record it. `logprobs_mode`: "raw" logs log softmax of the model's logits, "processed" of what the token was drawn from.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int = 128
    logprobs_mode: Literal["raw", "processed"] = "raw"
    seed: int = 0
    allowed_ids: tuple[int, ...] = ()

    def record(self) -> dict[str, Any]:
        """The `sampling` record of a trace row."""
        values = asdict(self)
        del values["max_tokens"], values["allowed_ids"]
        return {name: value for name, value in values.items() if name not in ("logit_bias", "min_tokens") or value}


class Engine(Protocol):
    """Something that samples: prompts in, trace rows out."""

    name: str

    def sample(self, prompts: Sequence[Sequence[int]], *, sampling: Sampling) -> list[dict[str, Any]]:
        """One trace row a prompt: prompt_ids, response_ids, rollout_logp, finish_reason, sampling, source."""
        ...
