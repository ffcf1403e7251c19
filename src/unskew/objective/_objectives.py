"""Every objective by name: which loss, over what it is averaged, which advantages it was published with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from unskew.correct import Correction, Weights
from unskew.objective import _sequence, _token
from unskew.objective._centering import score_centering
from unskew.objective._token_loss import Over, TokenLoss

__all__ = ["OBJECTIVES", "Objective", "Streams"]


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """What a training step knows of a batch; all (B, T), or (N,) with `cu_seqlens`.

    Args:
        logp: of the current policy, with gradient.
        old_logp, rollout_logp: of the trainer at the weights that sampled, and of the sampler.
        advantages: one a token or one a sequence.
        mask: nonzero where a token takes part.
        correction: weights and kept tokens, or None.
        topk_logp, topk_rollout_logp: (B, T, K), for score centering.
    """

    logp: torch.Tensor
    old_logp: torch.Tensor
    rollout_logp: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    correction: Weights | None = None
    topk_logp: torch.Tensor | None = None
    topk_rollout_logp: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """One published objective.

    Args:
        name: as it is written.
        loss: from a batch's streams, its defaults those of the paper.
        over: how its losses are aggregated.
        advantages: function of this room that it was published with.
        corrects: True where its own loss already holds a weight towards the sampler.
        says: one line.
        source: paper and year.
    """

    name: str
    loss: Callable[[Streams], TokenLoss]
    over: Over
    advantages: str
    corrects: bool
    says: str
    source: str


def _two(loss: Callable[..., TokenLoss], anchor: str = "old_logp", **arguments: object) -> Callable[[Streams], TokenLoss]:
    def call(s: Streams) -> TokenLoss:
        return loss(
            s.logp, getattr(s, anchor), s.advantages, mask=s.mask, correction=s.correction, cu_seqlens=s.cu_seqlens, **arguments
        )

    return call


def _three(loss: Callable[..., TokenLoss], **arguments: object) -> Callable[[Streams], TokenLoss]:
    def call(s: Streams) -> TokenLoss:
        return loss(
            s.logp, s.old_logp, s.rollout_logp, s.advantages, mask=s.mask, correction=s.correction, cu_seqlens=s.cu_seqlens,
            **arguments,
        )  # fmt: skip

    return call


def _reinforce(s: Streams) -> TokenLoss:
    return _token.reinforce(s.logp, s.advantages, mask=s.mask, correction=s.correction, cu_seqlens=s.cu_seqlens)


def _reinforce_is(s: Streams) -> TokenLoss:
    """The token's own weight π_θ/μ; a correction's rejections apply beside it, its weight does not count twice."""
    weights = Correction.parse("token-is")(s.rollout_logp, s.logp.detach(), mask=s.mask, cu_seqlens=s.cu_seqlens)
    if s.correction is not None:
        weights = Weights(weights.weight * s.correction.weight, weights.keep & s.correction.keep, weights.non_finite)
    return _token.reinforce(s.logp, s.advantages, mask=s.mask, correction=weights, cu_seqlens=s.cu_seqlens)


def _centred(cap: float | None) -> Callable[[Streams], TokenLoss]:
    def call(s: Streams) -> TokenLoss:
        assert s.topk_logp is not None and s.topk_rollout_logp is not None
        return score_centering(
            s.logp, s.rollout_logp, s.topk_logp, s.topk_rollout_logp, s.advantages, mask=s.mask, cap=cap, correction=s.correction,
            cu_seqlens=s.cu_seqlens,
        )  # fmt: skip

    return call


_ALL = [
    Objective("reinforce", _reinforce, "token-mean", "leave_one_out_advantages", False, "−A log π", "Williams 1992"),
    Objective("reinforce-is", _reinforce_is, "token-mean", "leave_one_out_advantages", True, "−sg[π_θ/μ] A log π_θ", "Williams 1992"),
    Objective("ppo", _two(_token.ppo), "token-mean", "gae", False, "clipped ratio", "Schulman et al. 2017"),
    Objective("ppo-dual", _two(_token.ppo, dual=3.0), "token-mean", "gae", False, "clipped ratio, bounded where A < 0", "Ye et al. 2020"),
    Objective("grpo", _two(_token.ppo), "seq-mean-token-mean", "group_advantages", False,
              "clipped ratio, every sequence the same weight", "DeepSeekMath 2024"),
    Objective("dr-grpo", _two(_token.ppo), "seq-mean-token-sum", "group_advantages(scale=False)", False,
              "clipped ratio, no length and no standard deviation", "Dr. GRPO 2025"),
    Objective("dapo", _two(_token.ppo, high=0.28), "token-mean", "group_advantages", False,
              "clip-higher, every token the same weight", "DAPO 2025"),
    Objective("gspo", _two(_sequence.gspo), "seq-mean-token-mean", "group_advantages", False,
              "clipped geometric mean of the ratios", "GSPO 2025"),
    Objective("gspo-token", _two(_sequence.gspo_token), "seq-mean-token-mean", "group_advantages", False,
              "GSPO with the token's own advantage", "GSPO 2025"),
    Objective("gmpo", _two(_sequence.gmpo), "seq-mean-token-mean", "group_advantages", False,
              "geometric mean of clipped ratios", "GMPO 2025"),
    Objective("sapo", _two(_token.sapo), "seq-mean-token-mean", "group_advantages", False, "a soft gate for the clip", "SAPO 2025"),
    Objective("cispo", _two(_token.cispo), "token-mean", "group_advantages", False,
              "clipped ratio as a weight: clipped tokens keep a gradient", "MiniMax-M1 2025"),
    Objective("m2po", _two(_token.m2po), "token-mean", "group_advantages", False, "second moment of log r bounded", "M2PO 2025"),
    Objective("vespo", _two(_sequence.vespo), "seq-mean-token-sum", "group_advantages", False,
              "smooth kernel of the sequence ratio", "VESPO 2026"),
    Objective("dppo-tv", _two(_token.dppo, "rollout_logp"), "token-mean", "group_advantages", True,
              "π_θ/μ, masked by the total variation from the sampler", "DPPO 2026"),
    Objective("dppo-kl", _two(_token.dppo, "rollout_logp", divergence="kl", high=0.05), "token-mean", "group_advantages", True,
              "π_θ/μ, masked by the binary KL from the sampler", "DPPO 2026"),
    Objective("topr", _two(_token.topr, "rollout_logp"), "token-mean", "group_advantages", True,
              "negative advantages tapered by the sequence ratio", "TOPR 2025"),
    Objective("minirl", _three(_token.minirl), "seq-mean-token-sum", "group_advantages", True,
              "π_θ/μ as a weight, PPO's mask on π_θ/π_old", "Zheng et al. 2025"),
    Objective("decoupled-ppo", _three(_token.decoupled_ppo), "token-mean", "gae", True,
              "PPO around π_old, weight π_old/μ", "Hilton et al. 2021; AReaL 2025"),
    Objective("score-centering", _centred(None), "token-mean", "group_advantages", True,
              "the mean score under the sampler subtracted", "arXiv 2609.20807, 2026"),
    Objective("score-centering-tis", _centred(2.0), "token-mean", "group_advantages", True,
              "the same with truncated importance weights", "arXiv 2609.20807, 2026"),
]  # fmt: skip

OBJECTIVES: Mapping[str, Objective] = {objective.name: objective for objective in _ALL}
"""Name → objective."""
