"""How is it trained? Policy losses, KL penalties, advantages and aggregation, each taking a correction."""

from unskew.objective._advantages import gae as gae
from unskew.objective._advantages import group_advantages as group_advantages
from unskew.objective._advantages import informative_groups as informative_groups
from unskew.objective._advantages import leave_one_out_advantages as leave_one_out_advantages
from unskew.objective._advantages import overlong_penalty as overlong_penalty
from unskew.objective._centering import score_centering as score_centering
from unskew.objective._kl import kl_penalty as kl_penalty
from unskew.objective._objectives import OBJECTIVES as OBJECTIVES
from unskew.objective._objectives import Objective as Objective
from unskew.objective._objectives import Streams as Streams
from unskew.objective._routing import load_balancing_loss as load_balancing_loss
from unskew.objective._sequence import gmpo as gmpo
from unskew.objective._sequence import gspo as gspo
from unskew.objective._sequence import gspo_token as gspo_token
from unskew.objective._sequence import vespo as vespo
from unskew.objective._token import cispo as cispo
from unskew.objective._token import decoupled_ppo as decoupled_ppo
from unskew.objective._token import dppo as dppo
from unskew.objective._token import m2po as m2po
from unskew.objective._token import minirl as minirl
from unskew.objective._token import ppo as ppo
from unskew.objective._token import reinforce as reinforce
from unskew.objective._token import sapo as sapo
from unskew.objective._token import topr as topr
from unskew.objective._token_loss import TokenLoss as TokenLoss
