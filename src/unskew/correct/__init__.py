"""What may the loss still use? Importance weights and masks, as values that compose."""

from unskew.correct._weights import Weights as Weights
