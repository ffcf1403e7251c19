"""Policy losses whose trust region looks at one token."""

import math

import torch

from unskew.correct import Correction, Weights
from unskew.objective._token_loss import TokenLoss
from unskew.objective._tokens import CLAMP, Tokens

__all__ = ["cispo", "decoupled_ppo", "dppo", "m2po", "minirl", "ppo", "reinforce", "sapo", "topr"]


def reinforce(
    logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None, correction: Weights | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−w A log π: the policy gradient, importance-weighted where a correction is given.

    Args:
        logp: log-probs of the current policy with gradient, (B, T), or (N,) with `cu_seqlens` (B+1,); float, nats.
        advantages: one a token, shaped like `logp`, or one a sequence (B,); no gradient.
        mask: nonzero where a token takes part; all where it is not given.
        correction: `Correction.parse("token-is")(rollout_logp, logp, mask=mask)`, for example; detached there.

    Raises:
        UnskewError: shapes that do not fit.

    Example:
        >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> reinforce(logp, torch.tensor([3.0])).aggregate("token-sum").backward()
        >>> logp.grad.tolist()
        [[-3.0, -3.0]]

    Reference: Williams (1992).
    """
    t = Tokens.of(logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    return t.loss(-t.advantages * t.logp)


def ppo(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None, low: float = 0.2,
    high: float = 0.2, dual: float = math.inf, correction: Weights | None = None, cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−min(r A, clip(r, 1 − low, 1 + high) A) with r = π_θ/π_old; for A < 0 at most −dual · A.

    GRPO, Dr. GRPO and DAPO are this loss with other advantages and aggregations (`OBJECTIVES`). TRL's `delta` is `dual`.

    Args:
        logp: log-probs of the current policy with gradient, (B, T), or (N,) with `cu_seqlens` (B+1,); float, nats.
        old_logp: of the trainer at the weights that sampled; same shape, no gradient.
        advantages: one a token, shaped like `logp`, or one a sequence (B,).
        mask: nonzero where a token takes part; all where it is not given.
        low, high: how far the ratio may go; 0.2 and 0.28 for clip-higher.
        dual: bound c of dual clip, above 1 + high; 3 in verl.
        correction: what the mismatch leaves of each token.

    Raises:
        UnskewError: shapes that do not fit.

    Example:
        >>> logp = torch.log(torch.tensor([[1.5, 1.1]])) - 1
        >>> loss = ppo(logp, torch.full((1, 2), -1.0), torch.tensor([1.0]))
        >>> [round(x, 4) for x in loss.loss[0].tolist()], loss.clipped.tolist(), float(loss.clip_fraction)
        ([-1.2, -1.1], [[True, False]], 0.5)

    Reference: Schulman et al. (2017); dual clip: Ye et al. (2020); clip-higher: DAPO (2025).
    """
    t = Tokens.of(logp, old_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    ratio, a = t.log_ratio().exp(), t.advantages
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    clipped = _beyond(ratio, a, low, high)
    if dual < math.inf:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual), loss)
        clipped = clipped | ((a < 0) & (ratio > dual))
    return t.loss(loss, clipped)


def decoupled_ppo(
    logp: torch.Tensor, prox_logp: torch.Tensor, rollout_logp: torch.Tensor, advantages: torch.Tensor, *,
    mask: torch.Tensor | None = None, low: float = 0.2, high: float = 0.2, cap: float = math.inf, correction: Weights | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """min(π_prox/μ, cap) · PPO(π_θ/π_prox): the trust region around a recent policy, the weight towards the sampler.

    Args:
        logp, prox_logp, rollout_logp: log-probs of the current policy (with gradient), of the proximal policy and of the sampler,
            (B, T), or (N,) with `cu_seqlens` (B+1,).
        cap: of the weight; others as in `ppo`.

    Reference: Hilton et al. (2021); AReaL (2025).
    """
    t = Tokens.of(logp, prox_logp, rollout_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    prox, rollout = t.others
    weight = (prox - rollout).clamp(-CLAMP, CLAMP).exp().clamp(max=cap)
    ratio, a = t.log_ratio().exp(), t.advantages
    return t.loss(weight * torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high)), _beyond(ratio, a, low, high))


def cispo(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None, low: float = 1.0,
    high: float = 2.0, correction: Weights | None = None, cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−sg[clip(r, 1 − low, 1 + high)] A log π_θ: clipped tokens keep a gradient.

    TRL and Liger write the cap itself as epsilon_high: their 3 is `high` 2 here. Arguments as in `ppo`.

    Reference: MiniMax-M1 (2025).
    """
    t = Tokens.of(logp, old_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    ratio = t.log_ratio().exp().detach()
    return t.loss(-ratio.clamp(1 - low, 1 + high) * t.advantages * t.logp, (ratio > 1 + high) | (ratio < 1 - low))


def sapo(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None,
    tau_positive: float = 1.0, tau_negative: float = 1.05, correction: Weights | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−(4/τ) σ(τ (r − 1)) A: a soft gate instead of a clip; its gradient is that of r A times sech²(τ (r − 1)/2).

    Args:
        tau_positive, tau_negative: τ where A > 0 and elsewhere; the second should not be smaller. Others as in `ppo`.

    Reference: SAPO (2025).
    """
    t = Tokens.of(logp, old_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    tau = torch.where(t.advantages > 0, tau_positive, tau_negative).to(t.weight.dtype)
    return t.loss(-4 / tau * torch.sigmoid(tau * (t.log_ratio().exp() - 1)) * t.advantages)


def dppo(
    logp: torch.Tensor, rollout_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None,
    divergence: str = "tv", low: float = 0.15, high: float = 0.15, cap: float = 20.0, correction: Weights | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−sg[min(π_θ/μ, cap)] M A log π_θ with M = 0 where the token has moved too far from the sampler in A's direction.

    "tv" bounds π_θ − μ by `high` above (A > 0) and −`low` below (A < 0); "kl" bounds the binary KL(μ ‖ π_θ) by `high`.

    Args:
        rollout_logp: of the sampler; the anchor must be μ, not a recomputed π_old. Others as in `ppo`.

    Reference: DPPO (2026).
    """
    t = Tokens.of(logp, rollout_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    test = Correction.parse(f"dppo-tv({low},{high})" if divergence == "tv" else f"dppo-kl({high})")
    stays = test(t.others[0], t.logp.detach(), mask=t.mask, advantages=t.advantages).keep
    ratio = t.log_ratio().exp().detach().clamp(max=cap)
    return t.loss(-ratio * stays * t.advantages * t.logp, ~stays)


def m2po(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None, bound: float = 0.04,
    correction: Weights | None = None, cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−M r A with M = 0 at the largest (log r)² until the mean of the rest is within the bound.

    Reads one number back from the device. Arguments as in `ppo`.

    Reference: M2PO (2025).
    """
    t = Tokens.of(logp, old_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    stays = Correction.parse(f"m2po({bound})")(t.others[0], t.logp.detach(), mask=t.mask).keep
    return t.loss(-t.log_ratio().exp() * stays * t.advantages, ~stays)


def topr(
    logp: torch.Tensor, rollout_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None,
    correction: Weights | None = None, cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−A log π_θ where A > 0, −sg[clip(∏ π_θ/μ, 0, 1)] A log π_θ elsewhere; the ratio is of the whole sequence.

    Args:
        rollout_logp: of the sampler. Others as in `ppo`.

    Reference: TOPR (2025).
    """
    t = Tokens.of(logp, rollout_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    total = (t.logp - t.others[0]).detach().sum(1, keepdim=True)
    taper = torch.where(t.advantages > 0, torch.ones_like(t.advantages), total.clamp(max=0).exp())
    return t.loss(-taper * t.advantages * t.logp, (t.advantages < 0) & (total > 0))


def minirl(
    logp: torch.Tensor, old_logp: torch.Tensor, rollout_logp: torch.Tensor, advantages: torch.Tensor, *,
    mask: torch.Tensor | None = None, low: float = 0.2, high: float = 0.27, cap: float = math.inf,
    correction: Weights | None = None, cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−sg[π_θ/μ] M A log π_θ with PPO's mask M on π_θ/π_old: mismatch and update in one weight, the trust region on the update.

    Args:
        old_logp, rollout_logp: of the trainer at the weights that sampled, and of the sampler.
        cap: of the weight. Others as in `ppo`.

    Reference: Zheng et al., Stabilizing RL with LLMs (2025).
    """
    t = Tokens.of(logp, old_logp, rollout_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    beyond = _beyond(t.log_ratio().exp().detach(), t.advantages, low, high)
    weight = t.log_ratio(1).exp().detach().clamp(max=cap)
    return t.loss(-weight * ~beyond * t.advantages * t.logp, beyond)


def _beyond(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Tokens outside the clip range on the side where the clip removes the gradient."""
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
