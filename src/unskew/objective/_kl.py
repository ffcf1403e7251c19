"""KL penalty towards a reference policy."""

from typing import Literal

import torch

from unskew._errors import UnskewError
from unskew.correct import Weights
from unskew.measure import k1, k2, k3
from unskew.objective._token_loss import TokenLoss
from unskew.objective._tokens import Tokens

__all__ = ["kl_penalty"]


def kl_penalty(
    logp: torch.Tensor, ref_logp: torch.Tensor, *, estimator: Literal["k1", "k2", "k3"] = "k3",
    rollout_logp: torch.Tensor | None = None, mask: torch.Tensor | None = None, correction: Weights | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """k1 = x, k2 = x²/2 or k3 = e^(−x) − 1 + x with x = log π_θ − log π_ref; with `rollout_logp` times π_θ/μ, gradient included.

    As a loss the estimators are not alike, whatever their value: on policy, the gradient of k1 has mean 0, that of k2 is that of
    KL(π_θ ‖ π_ref), and that of k3 is that of KL(π_ref ‖ π_θ). Times π_θ/μ, with the gradient through that ratio, k1 and k3 have the
    gradient of KL(π_θ ‖ π_ref) at each token, on policy and off it.

    Args:
        logp: log-probs of the current policy with gradient, (B, T), or (N,) with `cu_seqlens` (B+1,); nats.
        ref_logp: of the frozen reference.
        rollout_logp: of the policy that sampled: the sampler, or π_old; for the unbiased form.
        mask, correction: as in `ppo`.

    Raises:
        UnskewError: an unknown estimator, or shapes that do not fit.

    Example:
        >>> loss = kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), estimator="k3")
        >>> round(float(loss.loss), 4)
        0.3679

    Reference: Schulman (2020); unbiased k3: DeepSeek-V3.2 (2025).
    """
    estimators = {"k1": k1, "k2": k2, "k3": k3}
    if estimator not in estimators:
        raise UnskewError(f"no estimator {estimator!r}", hint="k1, k2 or k3", exit_code=2)
    others = (ref_logp,) if rollout_logp is None else (ref_logp, rollout_logp)
    t = Tokens.of(logp, *others, advantages=torch.ones_like(logp), mask=mask, correction=correction, cu_seqlens=cu_seqlens)
    values = estimators[estimator](-t.log_ratio())
    return t.loss(values if rollout_logp is None else t.log_ratio(1).exp() * values)
