"""Which cause is it? Floor, counterfactual search, verdict."""

from unskew.diagnose._counterfactual import ModelCounterfactual as ModelCounterfactual
from unskew.diagnose._counterfactual import recorded as recorded
from unskew.diagnose._diagnose import diagnose as diagnose
from unskew.diagnose._diagnose import override as override
from unskew.diagnose._normal import KEPT as KEPT
from unskew.diagnose._normal import MeasuredFloor as MeasuredFloor
from unskew.diagnose._normal import Normal as Normal
from unskew.diagnose._normal import floors as floors
from unskew.diagnose._normal import normal as normal
from unskew.diagnose._scorers import load_scorers as load_scorers
from unskew.diagnose._verdict import CauseFinding as CauseFinding
from unskew.diagnose._verdict import Evidence as Evidence
from unskew.diagnose._verdict import Fix as Fix
from unskew.diagnose._verdict import Verdict as Verdict
