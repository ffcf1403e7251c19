"""Policy losses whose ratio is of the whole sequence."""

import torch

from unskew.correct import Weights
from unskew.objective._token_loss import TokenLoss
from unskew.objective._tokens import CLAMP, Tokens

__all__ = ["gmpo", "gspo", "gspo_token", "vespo"]


def gspo(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None, low: float = 3e-4,
    high: float = 4e-4, correction: Weights | None = None, cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−min(s A, clip(s, 1 − low, 1 + high) A) with s = (∏ π_θ/π_old)^(1/|y|), the geometric mean over the sequence.

    The same number stands at every token of a sequence; aggregate with "seq-mean-token-mean". s is of all masked tokens, also of
    those that the correction rejects.

    Args:
        logp: log-probs of the current policy with gradient, (B, T), or (N,) with `cu_seqlens` (B+1,); float, nats.
        old_logp: of the trainer at the weights that sampled; GSPO's own ratio does not see the sampler.
        advantages: one a sequence (B,), or one a token.
        mask, correction: as in `ppo`.

    Reference: Zheng et al., GSPO (2025).
    """
    t = Tokens.of(logp, old_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    return _clipped(t, _geometric(t), low, high)


def gspo_token(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None, low: float = 3e-4,
    high: float = 4e-4, correction: Weights | None = None, cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """GSPO with s_t = sg[s] · π_θ/sg[π_θ]: the value of s at every token, the gradient of the token's own advantage.

    Equal to `gspo` in value and gradient where the advantage is one a sequence. Arguments as in `gspo`.

    Reference: Zheng et al., GSPO (2025), section 4.3.
    """
    t = Tokens.of(logp, old_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    return _clipped(t, _geometric(t).detach() * (t.logp - t.logp.detach()).exp(), low, high)


def gmpo(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None, low: float = 0.4,
    high: float = 0.4, correction: Weights | None = None, cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−A (∏ r_t)^(1/|y|) with each log r_t clipped to [−low, high] on the side where PPO clips.

    Args:
        low, high: bounds of log r_t, nats. Others as in `gspo`.

    Reference: GMPO (2025).
    """
    t = Tokens.of(logp, old_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    x, a = t.logp - t.others[0], t.advantages
    held = ((a > 0) & (x > high)) | ((a < 0) & (x < -low))
    return t.loss(-t.mean(a) * t.mean(torch.where(held, x.clamp(-low, high), x)).clamp(-CLAMP, CLAMP).exp(), held)


def vespo(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, *, mask: torch.Tensor | None = None,
    positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0), correction: Weights | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """−sg[φ(W)] A log π_θ with φ(W) = W^k e^(λ (1 − W)), W = ∏ π_θ/π_old of the sequence.

    Args:
        positive, negative: (k, λ) where A ≥ 0 and where A < 0. Others as in `gspo`.

    Reference: VESPO (2026).
    """
    t = Tokens.of(logp, old_logp, advantages=advantages, mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    log_w = t.log_ratio().sum(1, keepdim=True).clamp(-CLAMP, CLAMP).detach()
    up = t.advantages >= 0
    k, decay = (torch.where(up, p, n).to(log_w.dtype) for p, n in zip(positive, negative, strict=True))
    return t.loss(-(k * log_w + decay * (1 - log_w.exp())).exp() * t.advantages * t.logp)


def _geometric(t: Tokens) -> torch.Tensor:
    """(∏ π_θ/π_old)^(1/|y|) of each sequence, (B, 1); the bound is on the mean, one wild token does not meet it alone."""
    return t.mean(t.logp - t.others[0]).clamp(-CLAMP, CLAMP).exp()


def _clipped(t: Tokens, s: torch.Tensor, low: float, high: float) -> TokenLoss:
    a = t.advantages
    beyond = ((a > 0) & (s > 1 + high)) | ((a < 0) & (s < 1 - low))
    return t.loss(torch.maximum(-a * s, -a * s.clamp(1 - low, 1 + high)), beyond)
