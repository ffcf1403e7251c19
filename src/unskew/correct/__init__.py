"""What may the loss still use? Importance weights and masks, as values that compose."""

from unskew.correct._correction import Correction as Correction
from unskew.correct._correction import Term as Term
from unskew.correct._methods import METHODS as METHODS
from unskew.correct._weights import Weights as Weights
