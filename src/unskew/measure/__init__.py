"""How far apart, above which floor, does it matter? Estimators, mergeable state, figures with intervals."""

from unskew.measure._clusters import cluster_mean as cluster_mean
from unskew.measure._estimators import chi2 as chi2
from unskew.measure._estimators import k1 as k1
from unskew.measure._estimators import k2 as k2
from unskew.measure._estimators import k3 as k3
from unskew.measure._estimators import k3_reverse as k3_reverse
from unskew.measure._figures import Figure as Figure
from unskew.measure._figures import Mismatch as Mismatch
from unskew.measure._figures import compute as compute
from unskew.measure._figures import share_outside as share_outside
from unskew.measure._layout import Layout as Layout
from unskew.measure._measure import Measurement as Measurement
from unskew.measure._measure import measure as measure
from unskew.measure._measure import measure_path as measure_path
from unskew.measure._names import Metric as Metric
from unskew.measure._names import find_metrics as find_metrics
from unskew.measure._names import metrics as metrics
from unskew.measure._psis import PSIS as PSIS
from unskew.measure._psis import psis as psis
from unskew.measure._psis import smooth_tail as smooth_tail
from unskew.measure._state import MismatchState as MismatchState
from unskew.measure._terms import TokenSums as TokenSums
from unskew.measure._terms import token_sums as token_sums
