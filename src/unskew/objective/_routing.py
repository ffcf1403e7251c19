"""The load-balancing loss of a mixture of experts."""

import torch

__all__ = ["load_balancing_loss"]


def load_balancing_loss(router_logits: torch.Tensor, *, top_k: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """E · Σ_e f_e P_e: f_e the choices of expert e a token, P_e its mean probability; a scalar, `top_k` where both are uniform.

    It pulls routers away from what the policy loss wants, so train with it only where the rollout engine's routing follows.

    Args:
        router_logits: (N, E), or (layers, N, E), which are pooled.
        top_k: experts a token.
        mask: nonzero where a token counts, (N,).

    Example:
        >>> float(load_balancing_loss(torch.tensor([[9.0, 0.0], [0.0, 9.0]]), top_k=1).round(decimals=3))
        1.0

    Reference: Fedus et al., Switch Transformers (2022); over top-k as in Mixtral (2024).
    """
    logits = router_logits if router_logits.ndim == 3 else router_logits[None]
    probability = logits.float().softmax(-1)
    chosen = torch.zeros_like(probability).scatter(-1, probability.topk(top_k, -1).indices, 1.0)
    keep = (
        torch.ones_like(probability[..., :1])
        if mask is None
        else mask.bool().to(probability)[None, :, None].expand(*logits.shape[:2], 1)
    )
    tokens = keep.sum().clamp(min=1)
    share, mean = (torch.where(keep > 0, x, torch.zeros_like(x)).sum((0, 1)) / tokens for x in (chosen, probability))
    return logits.shape[-1] * (share * mean).sum()
