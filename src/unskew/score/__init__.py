"""What does an engine say? Sampling transforms, log-probs from hidden states, HF models as scorers, recorders.

Model files need torch; they are loaded when first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unskew.score._edit import HEAD_NAMES as HEAD_NAMES
from unskew.score._edit import Edit as Edit
from unskew.score._edit import Inputs as Inputs
from unskew.score._sampling import Engine as Engine
from unskew.score._sampling import Sampling as Sampling
from unskew.score._transforms import SamplingTransform as SamplingTransform

if TYPE_CHECKING:
    from unskew.score._edits import edited as edited
    from unskew.score._edits import edited_whole as edited_whole
    from unskew.score._engine_hf import HFEngine as HFEngine
    from unskew.score._engine_vllm import VLLMEngine as VLLMEngine
    from unskew.score._formats import fake_quantize as fake_quantize
    from unskew.score._formats import rounding_error as rounding_error
    from unskew.score._gradient import head_gradients as head_gradients
    from unskew.score._head import HeadStates as HeadStates
    from unskew.score._hf import HFScorer as HFScorer
    from unskew.score._logits import TokenScores as TokenScores
    from unskew.score._logits import score_logits as score_logits
    from unskew.score._routing import capture_routing as capture_routing
    from unskew.score._routing import replay_routing as replay_routing
    from unskew.score._routing import routers as routers

_NEEDS_TORCH = {
    "HFEngine": "_engine_hf",
    "VLLMEngine": "_engine_vllm", "HeadStates": "_head", "TokenScores": "_logits", "score_logits": "_logits", "HFScorer": "_hf", "capture_routing": "_routing",
    "head_gradients": "_gradient", "edited": "_edits", "edited_whole": "_edits", "fake_quantize": "_formats", "rounding_error": "_formats", "replay_routing": "_routing", "routers": "_routing",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'unskew.score' has no attribute {name!r}")
    from unskew._errors import require

    require("torch", extra="torch")
    return getattr(import_module(f"unskew.score.{_NEEDS_TORCH[name]}"), name)
