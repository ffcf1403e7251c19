"""What a sampler does to logits before it draws a token, as one value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["LogitEdits", "SamplingTransform"]


class LogitEdits(NamedTuple):
    """What a sampling transform does to single logits."""

    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_ids: tuple[int, ...]
    min_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingTransform:
    """From raw logits to the logits a token is drawn from, in vLLM's order.

    allowed ids → min-tokens and logit bias → repetition penalty (prompt and output) → frequency and presence penalty (output) → temperature →
    min-p → top-k → top-p. vLLM's `processed_logprobs` are the log softmax of the result, its `raw_logprobs` that of the
    logits before all of it.

    HF `generate` applies the same maps in the order bias, repetition penalty, temperature, top-k, top-p, min-p and has no
    presence or frequency penalty. Each of min-p, top-k and top-p keeps some of the likeliest tokens, and the fewest
    tokens win; so the two differ only where min-p and top-p are both set: vLLM's top-p works on what min-p left,
    renormalised, and can keep fewer tokens than HF's.

    Where several tokens tie at the edge of the nucleus, which of them an engine keeps depends on its sort; the sampled
    token is taken as one of those kept.

    Args:
        temperature: divides the logits; > 0.
        top_k: keeps the k largest logits, with ties; 0 keeps all.
        top_p: keeps a token while the mass of the likelier ones is below p; at least one.
        min_p: keeps tokens at least min_p times as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
        presence_penalty: subtracted from logits of tokens seen in the output.
        frequency_penalty: subtracted once for each time a token was seen in the output.
        logit_bias: added to logits by token id, as (id, bias) pairs or a mapping.
        allowed_ids: the only ids that can be sampled (a grammar that is the same at every position); () for all.
        min_tokens: output tokens before which no id of `stop_ids` can be sampled.
        stop_ids: ids that end a response.
        likeliest: the log-prob of the likeliest token instead of the sampled one, as code reports it that reads the
            first of the top log-probs.

    Raises:
        ValueError: a value outside its range.

    Example:
        >>> SamplingTransform(temperature=0.7, top_p=0.9).truncates
        True
        >>> SamplingTransform.from_record({"temperature": 0.7, "top_k": -1, "seed": 3})
        SamplingTransform(temperature=0.7)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    likeliest: bool = False

    def __post_init__(self) -> None:
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs)))
        object.__setattr__(self, "top_k", max(int(self.top_k), 0))
        ranges = {
            "temperature > 0": self.temperature > 0, "0 < top_p <= 1": 0 < self.top_p <= 1, "0 <= min_p <= 1": 0 <= self.min_p <= 1,
            "repetition_penalty > 0": self.repetition_penalty > 0,
            "finite presence_penalty": math.isfinite(self.presence_penalty),
            "finite frequency_penalty": math.isfinite(self.frequency_penalty),
        }  # fmt: skip
        for expected, inside in ranges.items():
            if not inside:
                name = expected.split()[2 if expected[0] == "0" and expected.count("<") == 2 else 0]
                name = name if hasattr(self, name) else expected.split()[-1]
                raise ValueError(f"expected {expected}, got {getattr(self, name)}")

    def __repr__(self) -> str:
        default = {f: SamplingTransform.__dataclass_fields__[f].default for f in SamplingTransform.__dataclass_fields__}
        changed = (f"{name}={getattr(self, name)!r}" for name, value in default.items() if getattr(self, name) != value)
        return f"SamplingTransform({', '.join(changed)})"

    @classmethod
    def from_record(cls, sampling: Mapping[str, Any]) -> "SamplingTransform":
        """The transform that the `sampling` record of a trace row declares; what it leaves out is neutral."""
        values = {name: sampling.get(name) for name in cls.__dataclass_fields__}
        if isinstance(values["logit_bias"], list):
            values["logit_bias"] = tuple(tuple(pair) for pair in values["logit_bias"])
        return cls(**{name: value for name, value in values.items() if value is not None})  # pyright: ignore[reportArgumentType]

    @property
    def truncates(self) -> bool:
        """Whether some tokens get probability 0."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens seen before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs."""
        return tuple(self.logit_bias.items()) if isinstance(self.logit_bias, Mapping) else self.logit_bias

    @property
    def edits(self) -> "LogitEdits":
        """The part that changes logits token by token, before temperature: equal values share one edited copy."""
        return LogitEdits(
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.bias, self.allowed_ids,
            self.min_tokens if self.stop_ids else 0, self.stop_ids if self.min_tokens else (),
        )  # fmt: skip
