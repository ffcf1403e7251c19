"""What may the loss still use? Importance weights and masks, as values that compose."""

from unskew.correct._batch import Batch as Batch
from unskew.correct._calibrate import Bin as Bin
from unskew.correct._calibrate import Calibrated as Calibrated
from unskew.correct._calibrate import calibrate as calibrate
from unskew.correct._correction import Correction as Correction
from unskew.correct._correction import Term as Term
from unskew.correct._methods import METHODS as METHODS
from unskew.correct._weights import Weights as Weights
from unskew.correct._what_if import WhatIf as WhatIf
from unskew.correct._what_if import batch_of as batch_of
from unskew.correct._what_if import what_if as what_if
