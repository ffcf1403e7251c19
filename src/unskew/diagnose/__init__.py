"""Which cause is it? Floor, counterfactual search, verdict."""

from unskew.diagnose._diagnose import diagnose as diagnose
from unskew.diagnose._diagnose import override as override
from unskew.diagnose._scorers import load_scorers as load_scorers
from unskew.diagnose._verdict import CauseFinding as CauseFinding
from unskew.diagnose._verdict import Evidence as Evidence
from unskew.diagnose._verdict import Fix as Fix
from unskew.diagnose._verdict import Verdict as Verdict
