"""Expert choices of mixture-of-experts models: read them, force them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unskew._errors import UnskewError

__all__ = ["capture_routing", "replay_routing", "routers"]


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The top-k routers of a model in layer order: modules that return (logits, gates, expert ids)."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextmanager
def capture_routing(model: torch.nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """Collect each router's expert ids, one list a layer, one (tokens, k) tensor a forward.

    Raises:
        UnskewError: the model has no top-k router.
    """
    found = _required(model)
    out: list[list[torch.Tensor]] = [[] for _ in found]

    def keep(layer: int) -> torch.utils.hooks.RemovableHandle:
        return found[layer].register_forward_hook(lambda _m, _i, output: out[layer].append(output[2].detach().cpu()))

    handles = [keep(layer) for layer in range(len(found))]
    try:
        yield out
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay_routing(model: torch.nn.Module, expert_ids: torch.Tensor) -> Iterator[None]:
    """Force expert ids (layers, tokens, k), gates from this model's own router logits (R3); −1 leaves a token free.

    Raises:
        UnskewError: the ids are not of as many layers as the model has routers.

    Reference: Ma et al., Rollout Routing Replay (2025), arXiv 2510.11370.
    """
    found = _required(model)
    if len(found) != len(expert_ids):
        raise UnskewError(
            f"routed_experts has {len(expert_ids)} layers, the model {len(found)} routers",
            hint="record the choices of the mixture-of-experts layers only, in layer order",
        )

    def force(layer: int) -> torch.utils.hooks.RemovableHandle:
        def hook(router: torch.nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, gates, own = output
            given = expert_ids[layer].to(own.device)
            chosen = torch.where(given >= 0, given, own)
            weights = logits.float().softmax(-1).gather(-1, chosen)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(gates.dtype), chosen

        return found[layer].register_forward_hook(hook)

    handles = [force(layer) for layer in range(len(found))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _required(model: torch.nn.Module) -> list[torch.nn.Module]:
    found = routers(model)
    if not found:
        raise UnskewError(
            f"{type(model).__name__} has no top-k router", hint="routing needs a mixture-of-experts model", exit_code=2
        )
    return found
