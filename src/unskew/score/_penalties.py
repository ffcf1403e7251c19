"""What is done to logits token by token before temperature: bias and penalties."""

from collections.abc import Sequence

import numpy as np
import torch

from unskew.score._transforms import SamplingTransform

__all__ = ["edited"]

Ids = Sequence[int] | np.ndarray


def edited(
    logits: torch.Tensor,
    transform: SamplingTransform,
    index: np.ndarray,
    prompts: Sequence[Ids],
    responses: Sequence[Ids],
    cu_seqlens: np.ndarray,
) -> torch.Tensor:
    """Logits after logit bias, repetition, frequency and presence penalty; a copy.

    A token counts as seen by what stood before the position: prompt and earlier response for the repetition penalty,
    earlier response only for the other two.

    Args:
        logits: (n, V), of the flat response tokens `index`.
        transform: whose bias and penalties are applied.
        index: rising indices into the flat response tokens, int (n,).
        prompts: context ids, one a sequence.
        responses: response ids, one a sequence.
        cu_seqlens: bounds of the sequences in the flat tokens, int64 (B+1,).
    """
    logits = logits.clone()
    for token, value in transform.bias:
        logits[:, token] += value
    if not transform.penalises:
        return logits
    bounds = np.searchsorted(index, cu_seqlens)
    for sequence in np.flatnonzero(np.diff(bounds)):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        offsets = index[rows] - cu_seqlens[sequence]
        _penalise(logits[rows], transform, np.asarray(prompts[sequence]), np.asarray(responses[sequence]), offsets)
    return logits


def _penalise(
    logits: torch.Tensor, transform: SamplingTransform, prompt: np.ndarray, response: np.ndarray, at: np.ndarray
) -> None:
    """Penalise one sequence's logits (n, V) in place; row i predicts response token `at[i]`."""
    before = response[: at[-1]].astype(np.int64)
    ids, place = np.unique(np.concatenate([prompt.astype(np.int64), before]), return_inverse=True)
    if not len(ids):
        return
    # counts[t, j]: times that ids[j] stands among the first t response tokens.
    counts = np.zeros((len(before) + 1, len(ids)), np.int32)
    counts[np.arange(1, len(before) + 1), place[len(prompt) :]] = 1
    counts = torch.from_numpy(np.cumsum(counts, axis=0, dtype=np.int32)[at]).to(logits.device)
    in_prompt = torch.from_numpy(np.isin(ids, prompt)).to(logits.device)
    columns = torch.from_numpy(ids).to(logits.device)
    values = logits[:, columns]
    if transform.repetition_penalty != 1.0:
        penalty = transform.repetition_penalty
        seen = in_prompt | (counts > 0)
        values = torch.where(seen, torch.where(values > 0, values / penalty, values * penalty), values)
    values = values - transform.frequency_penalty * counts - transform.presence_penalty * (counts > 0)
    logits[:, columns] = values.to(logits.dtype)
