"""Advantages from rewards, and which samples take part."""

import torch

__all__ = ["gae", "group_advantages", "informative_groups", "leave_one_out_advantages", "overlong_penalty"]


def group_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, *, scale: bool = True, eps: float = 1e-6) -> torch.Tensor:
    """(R − mean) / (std + eps) within each group (GRPO); R − mean without `scale` (Dr. GRPO).

    Args:
        rewards: one a sequence, float (B,).
        group_ids: the prompt of each sequence, integers (B,).
        scale: divide by the group's standard deviation (n − 1 in its denominator; 0 of a group of one).
        eps: added to it.

    Returns:
        (B,); 0 for a group of one.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]), scale=False).tolist()
        [0.5, -0.5, 0.0]

    Reference: GRPO in DeepSeekMath (2024); Dr. GRPO (2025).
    """
    index, count, mean = _groups(rewards, group_ids)
    centred = rewards - mean[index]
    if not scale:
        return centred
    square = torch.zeros_like(mean).index_add(0, index, centred * centred)
    return centred / ((square / (count - 1).clamp(min=1)).sqrt()[index] + eps)


def leave_one_out_advantages(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """R minus the mean of the others in its group (RLOO), (B,); 0 for a group of one.

    Example:
        >>> leave_one_out_advantages(torch.tensor([2.0, 0.0]), torch.tensor([7, 7])).tolist()
        [2.0, -2.0]

    Reference: Ahmadian et al., RLOO (2024).
    """
    index, count, mean = _groups(rewards, group_ids)
    return (rewards - mean[index]) * (count / (count - 1).clamp(min=1))[index]


def gae(
    rewards: torch.Tensor, values: torch.Tensor, *, mask: torch.Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} − V_t, over the masked tokens alone.

    Args:
        rewards, values: of each token, float (B, T).
        mask: nonzero where the policy acted; tokens between (tool output, padding) are stepped over.
        gamma, lam: γ and λ.

    Returns:
        (advantages, returns), both (B, T), 0 outside the mask; returns = advantages + values.

    Example:
        >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), mask=torch.ones(1, 2), gamma=1.0, lam=0.5)[0].tolist()
        [[0.125, 0.75]]

    Reference: Schulman et al. (2016).
    """
    keep = mask.bool()
    rewards, values = (torch.where(keep, x, torch.zeros_like(x)) for x in (rewards, values))
    advantages = torch.zeros_like(values)
    following, following_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        here = rewards[:, t] + gamma * following_value - values[:, t] + gamma * lam * following
        following = torch.where(keep[:, t], here, following)
        following_value = torch.where(keep[:, t], values[:, t], following_value)
        advantages[:, t] = torch.where(keep[:, t], here, torch.zeros_like(here))
    return advantages, advantages + values


def informative_groups(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """bool (B,): sequences of groups whose rewards differ; the others have no advantage (DAPO's dynamic sampling).

    Example:
        >>> informative_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
        [False, False, True, True]
    """
    index, _, mean = _groups(rewards, group_ids)
    low, high = (
        torch.zeros_like(mean).scatter_reduce(0, index, rewards, reduce, include_self=False) for reduce in ("amin", "amax")
    )
    return (low < high)[index]


def overlong_penalty(lengths: torch.Tensor, *, max_length: int, cache: int) -> torch.Tensor:
    """0 up to max_length − cache, then linear to −1 at max_length, −1 beyond: DAPO's soft overlong punishment, (B,).

    Example:
        >>> overlong_penalty(torch.tensor([10, 16, 18, 20, 25]), max_length=20, cache=4).tolist()
        [0.0, 0.0, -0.5, -1.0, -1.0]

    Reference: DAPO (2025).
    """
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


def _groups(rewards: torch.Tensor, group_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(index of each sequence's group (B,), count (G,), mean reward (G,))."""
    _, index = torch.unique(group_ids, return_inverse=True)
    count = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=rewards.dtype, device=rewards.device)
    count = count.index_add(0, index, torch.ones_like(rewards))
    return index, count, torch.zeros_like(count).index_add(0, index, rewards) / count
