"""What a sampler does to logits before it draws a token, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SamplingTransform"]


@dataclass(frozen=True, slots=True)
class SamplingTransform:
    """From raw logits to the logits a token is drawn from, in vLLM's order.

    logit bias → repetition penalty (prompt and output) → frequency and presence penalty (output) → temperature →
    min-p → top-k → top-p. HF applies the same maps in the order penalty, temperature, top-k, top-p, min-p; the two
    differ where min-p and top-p are both set, since vLLM's top-p then works on what min-p has left.

    Args:
        temperature: divides the logits; > 0.
        top_k: keeps the k largest logits, with ties; 0 keeps all.
        top_p: keeps the smallest set of most likely tokens whose mass reaches p; at least one.
        min_p: keeps tokens at least min_p times as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
        presence_penalty: subtracted from logits of tokens seen in the output.
        frequency_penalty: subtracted once for each time a token was seen in the output.
        logit_bias: added to logits by token id, as (id, bias) pairs or a mapping.

    Raises:
        ValueError: a value outside its range.

    Example:
        >>> SamplingTransform(temperature=0.7, top_p=0.9).truncates
        True
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias.items())))
        object.__setattr__(self, "top_k", max(int(self.top_k), 0))
        ranges = {
            "temperature": self.temperature > 0, "top_p": 0 < self.top_p <= 1, "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
        }  # fmt: skip
        for name, inside in ranges.items():
            if not inside:
                raise ValueError(f"{name} is {getattr(self, name)}: temperature > 0, 0 < top_p <= 1, 0 <= min_p <= 1, "
                                 "repetition_penalty > 0")  # fmt: skip

    @property
    def truncates(self) -> bool:
        """Whether some tokens get probability 0."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def edits(self) -> tuple[float, float, float, tuple[tuple[int, float], ...]]:
        """The part that changes logits token by token, before temperature: equal values share one edited copy."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty, tuple(self.logit_bias)
