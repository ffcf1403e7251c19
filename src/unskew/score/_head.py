"""Log-probs from hidden states: the logits of a large vocabulary never stand in memory for the whole batch."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from unskew.score._edit import Edit
from unskew.score._edits import edited_head
from unskew.score._logits import TokenScores, score_logits
from unskew.score._transforms import LogitEdits, SamplingTransform

__all__ = ["HeadStates"]

_CHUNK_ELEMENTS = 1 << 24
_NEUTRAL = SamplingTransform().edits


class HeadStates:
    """Hidden states before the head at the positions that predict N response tokens.

    Args:
        hidden: (N, D) in the model's dtype, on its device.
        head: from (n, D) to logits (n, V), in the model's dtype; softcap and scaling included.
        prompts: context ids of each sequence.
        responses: response ids of each sequence, N together.
        cache_bytes: logits are kept in float32 once computed if they need no more than this.
        missing: tokens without a prediction (the first one of an empty prompt), bool (N,); their figures are NaN.

    Example:
        >>> states = HeadStates.from_logits(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), [[0]], [[0, 1]])
        >>> states.logp([SamplingTransform(), SamplingTransform(temperature=0.5)]).round(4).tolist()
        [[-0.6931, -1.3133], [-0.6931, -2.1269]]
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        prompts: Sequence[Sequence[int] | np.ndarray],
        responses: Sequence[Sequence[int] | np.ndarray],
        *,
        cache_bytes: int = 1 << 29,
        missing: np.ndarray | None = None,
    ) -> None:
        self._hidden, self._head = hidden, head
        self._prompts, self._responses = prompts, responses
        ids = np.concatenate([np.asarray(r, np.int64) for r in responses]) if len(responses) else np.zeros(0, np.int64)
        self._ids = torch.from_numpy(ids).to(hidden.device)
        self._missing = np.zeros(len(ids), bool) if missing is None else missing
        self._cache_bytes = cache_bytes
        self._kept: dict[int, torch.Tensor] = {}
        self._sorted: dict[int, torch.Tensor] = {}

    @classmethod
    def from_logits(
        cls, logits: torch.Tensor, prompts: Sequence[Sequence[int] | np.ndarray], responses: Sequence[Sequence[int] | np.ndarray]
    ) -> "HeadStates":
        """States whose logits (N, V) are known already."""
        return cls(logits, lambda hidden: hidden, prompts, responses)

    def under(self, head: Callable[[torch.Tensor], torch.Tensor]) -> "HeadStates":
        """The same hidden states under another head."""
        return HeadStates(
            self._hidden, head, self._prompts, self._responses, cache_bytes=self._cache_bytes, missing=self._missing
        )

    def mapped(self, model: Any, edits: Sequence[Edit]) -> "HeadStates":
        """The same hidden states under an edited head."""
        return self.under(edited_head(model, self._head, edits))

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def vocab_size(self) -> int:
        """Number of logits a token."""
        with torch.no_grad():
            return int(self._head(self._hidden[:1]).shape[-1])

    @torch.no_grad()
    def logp(self, transforms: Sequence[SamplingTransform], *, tokens: np.ndarray | None = None) -> np.ndarray:
        """Log-prob of each sampled token under each transform, float64 (K, N); −inf where it is cut off.

        One pass over the logits serves all transforms; those that truncate share one sort. `tokens` (sorted indices)
        limits the work to some; the others are NaN.
        """
        out = np.full((len(transforms), len(self)), np.nan)
        wanted = np.arange(len(self)) if tokens is None else tokens
        groups: dict[LogitEdits, list[int]] = {}
        for k, transform in enumerate(transforms):
            groups.setdefault(transform.edits, []).append(k)
        for start, chunk in self._logits():
            index = wanted[(wanted >= start) & (wanted < start + len(chunk))]
            if not len(index):
                continue
            some = slice(None) if len(index) == len(chunk) else torch.from_numpy(index - start).to(chunk.device)
            ids = self._ids[start : start + len(chunk), None][some]
            for edits, members in groups.items():
                plain = edits == _NEUTRAL
                logits = chunk[some] if plain else self._edited(chunk[some], index, edits)
                chosen = logits.gather(1, ids)
                ordered = rank = None
                if any(transforms[k].truncates for k in members):
                    ordered = self._order(start, chunk)[some] if plain and self._kept else _sorted(logits)
                    rank = (logits > chosen).sum(1)
                for temperature in dict.fromkeys(transforms[k].temperature for k in members):
                    same = [k for k in members if transforms[k].temperature == temperature]
                    full, cumulative = score_logits(logits, ids[:, 0], temperature=temperature).logp, None
                    for k in same:
                        value = full
                        if transforms[k].likeliest:
                            top = logits.argmax(1)
                            value = score_logits(logits, top, temperature=temperature).logp
                        if transforms[k].truncates:
                            assert ordered is not None and rank is not None
                            if cumulative is None:
                                cumulative = (ordered / temperature).softmax(1).double().cumsum(1)
                            place = torch.zeros_like(rank) if transforms[k].likeliest else rank
                            value = value - _log_kept(transforms[k], ordered, cumulative, place).cpu().numpy()
                        out[k, index] = value
        out[:, self._missing] = np.nan
        return out

    @torch.no_grad()
    def scores(self, transform: SamplingTransform = SamplingTransform()) -> TokenScores:
        """Log-prob, entropy and noise scale of the transformed distribution from one pass over the logits."""
        out = np.full((4, len(self)), np.nan)
        for start, raw in self._logits(widened=transform.edits != _NEUTRAL or transform.truncates):
            stop = start + len(raw)
            logits = raw if transform.edits == _NEUTRAL else self._edited(raw, np.arange(start, stop), transform.edits)
            logits = _truncated(transform, logits) if transform.truncates else logits
            found = score_logits(logits, self._ids[start:stop], temperature=transform.temperature)
            out[:, start:stop] = found.logp, found.entropy, found.noise_scale, found.collision
        out[:, self._missing] = np.nan
        return TokenScores(*out)

    @torch.no_grad()
    def probabilities(self, transform: SamplingTransform, *, tokens: np.ndarray) -> np.ndarray:
        """Probability of every id at some tokens (sorted indices) under a transform, float32 (n, V); n V numbers in memory."""
        out = np.zeros((len(tokens), self.vocab_size), np.float32)
        for start, raw in self._logits():
            place = np.flatnonzero((tokens >= start) & (tokens < start + len(raw)))
            if not len(place):
                continue
            logits = raw[torch.from_numpy(tokens[place] - start).to(raw.device)]
            logits = logits if transform.edits == _NEUTRAL else self._edited(logits, tokens[place], transform.edits)
            logits = _truncated(transform, logits) if transform.truncates else logits
            out[place] = (logits / transform.temperature).softmax(1).float().cpu().numpy()
        return out

    @torch.no_grad()
    def residuals(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(first token, hidden (n, D), e_y − p (n, V)) in chunks: the gradient of log p(y) by the logits."""
        for start, logits in self._logits():
            stop = start + len(logits)
            residual = -logits.softmax(1)
            residual.scatter_add_(1, self._ids[start:stop, None], torch.ones_like(residual[:, :1]))
            yield start, self._hidden[start:stop], residual

    def _logits(self, *, widened: bool = True) -> Iterator[tuple[int, torch.Tensor]]:
        """Chunks of logits (first token, (n, V)), in float32 at least where they are `widened` or kept."""
        if not len(self):
            return
        if self._kept:
            yield from self._kept.items()
            return
        vocab = self.vocab_size
        keep = 4 * len(self) * vocab <= self._cache_bytes
        step = max(1, _CHUNK_ELEMENTS * (2 if widened else 3) // (2 * vocab))
        kept = {}
        for start in range(0, len(self), step):
            logits = self._head(self._hidden[start : start + step])
            if (widened or keep) and logits.dtype != torch.float64:
                logits = logits.float()
            if keep:
                kept[start] = logits
            yield start, logits
        self._kept = kept

    def _order(self, start: int, logits: torch.Tensor) -> torch.Tensor:
        if start not in self._sorted:
            self._sorted[start] = _sorted(logits)
        return self._sorted[start]

    def _edited(self, logits: torch.Tensor, index: np.ndarray, edits: LogitEdits) -> torch.Tensor:
        logits = logits.clone()
        if edits.allowed_ids:
            banned = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            banned[list(edits.allowed_ids)] = False
            logits[:, banned] = -torch.inf
        if edits.min_tokens:
            early = torch.from_numpy(np.flatnonzero(self._position[index] < edits.min_tokens)).to(logits.device)
            logits[early[:, None], torch.tensor(edits.stop_ids, device=logits.device)] = -torch.inf
        for token, value in edits.logit_bias:
            logits[:, token] += value
        if edits.repetition_penalty == 1.0 and not (edits.presence_penalty or edits.frequency_penalty):
            return logits
        rows, cols, in_output = self._seen(index)
        if edits.repetition_penalty != 1.0:
            seen = logits[rows, cols]
            logits[rows, cols] = torch.where(seen > 0, seen / edits.repetition_penalty, seen * edits.repetition_penalty)
        if edits.presence_penalty or edits.frequency_penalty:
            logits[rows, cols] -= edits.frequency_penalty * in_output + edits.presence_penalty * (in_output > 0)
        return logits

    @property
    def _position(self) -> np.ndarray:
        """Position of each token in its response."""
        return np.concatenate([np.arange(len(response)) for response in self._responses])

    def _seen(self, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(place in `index`, token id, count in the output so far) of every token seen before each of these tokens."""
        place = {int(token): k for k, token in enumerate(index)}
        rows, cols, counts, first = [], [], [], 0
        for prompt, response in zip(self._prompts, self._responses, strict=True):
            if np.searchsorted(index, first) < np.searchsorted(index, first + len(response)):
                output: Counter[int] = Counter({int(t): 0 for t in prompt})
                for offset, token in enumerate(response):
                    if (row := place.get(first + offset)) is not None:
                        rows += [row] * len(output)
                        cols += list(output)
                        counts += list(output.values())
                    output[int(token)] += 1
            first += len(response)
        device = self._ids.device
        return (
            torch.tensor(rows, dtype=torch.long, device=device),
            torch.tensor(cols, dtype=torch.long, device=device),
            torch.tensor(counts, dtype=torch.float32, device=device),
        )


def _sorted(logits: torch.Tensor) -> torch.Tensor:
    return logits.sort(dim=1, descending=True).values


def _truncated(transform: SamplingTransform, logits: torch.Tensor) -> torch.Tensor:
    ordered = _sorted(logits)
    cumulative = (ordered / transform.temperature).softmax(1).double().cumsum(1)
    smallest = ordered.gather(1, _n_kept(transform, ordered, cumulative)[:, None] - 1)
    return logits.masked_fill(logits < smallest, -torch.inf)


def _n_kept(transform: SamplingTransform, ordered: torch.Tensor, cumulative: torch.Tensor) -> torch.Tensor:
    """How many of the most likely tokens survive, int64 (n,); `ordered` raw logits, `cumulative` probabilities."""
    vocab = ordered.shape[1]
    kept = torch.full((len(ordered),), vocab, dtype=torch.long, device=ordered.device)
    if transform.min_p > 0:
        bound = ordered[:, :1] + transform.temperature * float(np.log(transform.min_p))
        kept = (ordered >= bound).sum(1)
    if 0 < transform.top_k < vocab:
        kept = torch.minimum(kept, (ordered >= ordered[:, transform.top_k - 1, None]).sum(1))
    if transform.top_p < 1:
        mass = cumulative.gather(1, kept[:, None] - 1)
        # A token stays while the mass of the tokens before it is below p.
        inside = torch.searchsorted(cumulative, transform.top_p * mass).squeeze(1) + 1
        kept = torch.minimum(kept, inside)
    return kept


def _log_kept(transform: SamplingTransform, ordered: torch.Tensor, cumulative: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """log of the mass that survives, float64 (n,); +inf where the chosen token, at `rank` from 0, does not."""
    kept = _n_kept(transform, ordered, cumulative)
    mass = cumulative.gather(1, kept[:, None] - 1)[:, 0].log()
    return torch.where(rank < kept, mass, torch.inf)
