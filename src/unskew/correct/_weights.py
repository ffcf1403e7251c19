"""What a correction leaves of a batch: a weight a token and the tokens still in the loss."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Weights"]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What the loss multiplies and what it still counts; both in the layout of the log-probs they came from.

    The loss of a batch is Σ keep · weight · loss / (denominator over keep): rejected tokens leave both sums.

    Args:
        weight: float, 0 where `keep` is 0; carries no gradient.
        keep: bool; the mask without the rejected tokens.
        non_finite: bool; masked tokens whose log-ratio is NaN or infinite. They are rejected and counted, never "no gap".
    """

    weight: Any
    keep: Any
    non_finite: Any
