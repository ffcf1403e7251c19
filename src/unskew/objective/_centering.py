"""Score centering: what a constant advantage would do to the policy off its own distribution, subtracted."""

import math

import torch

from unskew._errors import UnskewError
from unskew.correct import Weights
from unskew.objective._token_loss import TokenLoss
from unskew.objective._tokens import Tokens

__all__ = ["score_centering"]


def score_centering(
    logp: torch.Tensor, rollout_logp: torch.Tensor, topk_logp: torch.Tensor, topk_rollout_logp: torch.Tensor,
    advantages: torch.Tensor, *, mask: torch.Tensor | None = None, cap: float | None = None, correction: Weights | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−A (w log π(y) − Σ_{v∈H} sg[m_v − α π(v)] log π(v)): the policy gradient minus its mean score under the sampler.

    Under its own policy E[∇ log π] = 0, so a constant added to A changes nothing; under another sampler it is not, and a constant
    pulls the policy towards what was sampled. The mean E_μ[w ∇ log π] comes from the sampler's K likeliest tokens H of each step,
    m_v = w(v) μ(v), and a tail in proportion to the policy, α π(v), with α from the probability that H leaves on both sides.
    w = 1, or min(π/μ, cap) with `cap`: truncated importance sampling, in the head, in the tail and at the token alike.

    Args:
        logp: log-probs of the sampled tokens with gradient, (B, T), or (N,) with `cu_seqlens` (B+1,); nats.
        rollout_logp: of the sampler, at the same tokens.
        topk_logp: log-probs of the policy at the sampler's K likeliest tokens, with gradient, (B, T, K) or (N, K); ids distinct.
        topk_rollout_logp: of the sampler at these ids, −inf where fewer were recorded.
        advantages, mask, correction: as in `reinforce`.
        cap: of the importance weight; None for no weight, inf for the weight itself, which leaves nothing to centre.

    Raises:
        UnskewError: shapes that do not fit.

    Example:
        >>> logits = torch.tensor([[[1.0, 0.0, -1.0]]], requires_grad=True)
        >>> logp, mu = logits.log_softmax(-1), torch.tensor([[[0.6, 0.3, 0.1]]]).log()
        >>> mean = sum(  # over the sampler: the gradient of a constant advantage
        ...     float(mu[0, 0, y].exp()) * torch.autograd.grad(
        ...         score_centering(logp[..., y], mu[..., y], logp, mu, torch.ones(1)).aggregate("token-sum"), logits, retain_graph=True)[0]
        ...     for y in range(3))
        >>> bool(mean.abs().max() < 1e-6)
        True

    Reference: Score centering, arXiv 2609.20807 (2026).
    """
    t = Tokens.of(logp, rollout_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    if topk_logp.shape != topk_rollout_logp.shape or topk_logp.shape[:-1] != logp.shape:
        raise UnskewError(
            f"topk_logp {tuple(topk_logp.shape)} and topk_rollout_logp {tuple(topk_rollout_logp.shape)} beside logp {tuple(logp.shape)}",
            hint="both are the log-probs' shape with K at its end", exit_code=2,
        )  # fmt: skip
    columns = [
        (t.layout.gathered(topk_logp[..., k]), t.layout.gathered(topk_rollout_logp[..., k])) for k in range(topk_logp.shape[-1])
    ]
    head, sampler = (torch.stack(x, -1) for x in zip(*columns, strict=True))
    known = t.mask[..., None] & torch.isfinite(head) & torch.isfinite(sampler)
    head = torch.where(known, head, torch.zeros_like(head))
    p, m = (torch.where(known, x.detach().exp(), torch.zeros_like(x)) for x in (head, sampler))
    tiny = torch.finfo(p.dtype).eps
    alpha = (1 - m.sum(-1, keepdim=True)).clamp(min=0) / (1 - p.sum(-1, keepdim=True)).clamp(min=tiny)
    weight = torch.ones_like(t.weight)
    if cap is not None:
        weight = t.log_ratio().exp().detach().clamp(max=cap)
        m, alpha = (
            torch.minimum(p, cap * m) if cap < math.inf else p,
            torch.minimum(torch.ones_like(alpha), cap * alpha) if cap < math.inf else torch.ones_like(alpha),
        )
    centre = (torch.where(known, m - alpha * p, torch.zeros_like(p)) * head).sum(-1)
    return t.loss(-t.advantages * (weight * t.logp - centre))
