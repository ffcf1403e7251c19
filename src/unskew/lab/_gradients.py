"""What a mismatch does to each objective's gradient, and what each correction leaves of it, where all sequences are counted."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from unskew._errors import UnskewError
from unskew.correct import METHODS, Correction, Weights
from unskew.objective import OBJECTIVES, Objective, Streams

__all__ = ["MISMATCHES", "GradientTable", "Row", "gradients"]

VOCABULARY, LENGTH = 4, 5
_BATCH = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One objective with one correction under one mismatch.

    Args:
        bias: ‖g − g*‖/‖g*‖; g* is this objective's gradient where the sampler is the trainer, without a correction.
        cosine: of g and g*, which an optimiser that ignores scale sees.
        noise: standard deviation of the gradient of 64 sequences over ‖g*‖.
        kept: share of the tokens in the loss.
        exact: False where what is kept depends on the batch: then on one of 8192 sequences, each as often as its probability says.
    """

    mismatch: str
    objective: str
    correction: str
    bias: float
    cosine: float
    noise: float
    kept: float
    exact: bool

    @property
    def error(self) -> float:
        """√(bias² + noise²): how far the gradient of 64 sequences is from g*, over ‖g*‖."""
        return math.hypot(self.bias, self.noise)


@dataclass(frozen=True, slots=True)
class GradientTable:
    """All rows, and how large each mismatch is.

    Args:
        rows: by mismatch, objective, correction.
        mismatches: name → {"mean_abs_d": nats a token, "seq_ess": (E_μ w)²/E_μ w² of the sequence
            weights w = π/μ, "unreached": the trainer's probability of what the sampler cannot produce}.
        own: objective → cosine of its g* and the gradient of the expected advantage at the current weights.
        sequences: how many were counted.
    """

    rows: tuple[Row, ...]
    mismatches: Mapping[str, Mapping[str, float]]
    own: Mapping[str, float]
    sequences: int

    def to_dict(self) -> dict[str, object]:
        """Plain types for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """Every sequence over VOCABULARY tokens, of which token 0 ends it, up to LENGTH tokens."""

    ids: torch.Tensor
    mask: torch.Tensor
    prefix: torch.Tensor
    prefixes: int

    @classmethod
    def all(cls) -> "_Sequences":
        open_, done = [()], []
        for _ in range(LENGTH):
            grown = [(*s, v) for s in open_ for v in range(VOCABULARY)]
            done += [s for s in grown if s[-1] == 0]
            open_ = [s for s in grown if s[-1] != 0]
        done += open_
        places = {prefix: i for i, prefix in enumerate(sorted({s[:t] for s in done for t in range(len(s))}))}
        pad = [s + (0,) * (LENGTH - len(s)) for s in done]
        where = [[places[s[:t]] if t < len(s) else 0 for t in range(LENGTH)] for s in done]
        lengths = torch.tensor([len(s) for s in done])
        return cls(torch.tensor(pad), torch.arange(LENGTH) < lengths[:, None], torch.tensor(where), len(places))

    def logp(self, table: torch.Tensor) -> torch.Tensor:
        """Log-probs (B, T) of a table of log-probs (prefixes, V)."""
        return table[self.prefix].gather(-1, self.ids[..., None])[..., 0]

    def probability(self, table: torch.Tensor) -> torch.Tensor:
        """(B,), sums to 1."""
        return torch.where(self.mask, self.logp(table), 0.0).sum(1).exp()

    def take(self, rows: torch.Tensor) -> "_Sequences":
        return _Sequences(self.ids[rows], self.mask[rows], self.prefix[rows], self.prefixes)


def _rounded(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda logits, _: logits.to(dtype).to(logits.dtype).log_softmax(-1)


def _top_p(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    cut = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered >= 0.9)
    return logits.masked_fill(cut, -math.inf).log_softmax(-1)


MISMATCHES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bf16": _rounded(torch.bfloat16),
    "fp8": _rounded(torch.float8_e4m3fn),
    "top-p": _top_p,
    "staleness": lambda logits, ascent: (logits - 0.1 * ascent).log_softmax(-1),
}
"""Name → the sampler's log-probs (prefixes, V), from the trainer's logits and the direction that training went.

bf16, fp8 (E4M3): the logits rounded once. top-p: cut at 0.9, log-probs of what remains. staleness: the trainer has moved by
0.1 nat a token on average since.
"""


def gradients(
    *, objectives: Sequence[str] | None = None, corrections: Sequence[str] | None = None, update: float = 0.0002, seed: int = 0,
    progress: Callable[[str], object] = lambda _: None,
) -> GradientTable:  # fmt: skip
    """Bias and noise of the gradient of objectives with corrections, on a policy small enough to count every sequence.

    The policy is a table: logits of each of 121 prefixes, over 4 tokens, sequences of up to 5; the gradient is that by the
    logits. Expectations are sums over all 364 sequences with the sampler's probabilities, so that they have no sampling error:
    the mean over a batch is its limit for many sequences. Advantages belong to the sequences and do not change.

    Args:
        objectives, corrections: names of OBJECTIVES, and anything that Correction.parse reads; all, each alone, by default.
        update: mean |log π_θ − log π_old| of a token since old_logp, nats.
        seed: of the logits and the rewards.

    Example:
        >>> table = gradients(objectives=["grpo"], corrections=["none", "seq-is"], update=0.0)
        >>> [row.bias < 1e-9 for row in table.rows if row.correction == "seq-is"]  # top-p takes sequences away for good
        [True, True, False, True]
    """
    for name in objectives or ():
        if name not in OBJECTIVES:
            raise UnskewError(f"no objective {name!r}", hint=f"one of {', '.join(OBJECTIVES)}", exit_code=2)
    random = torch.Generator().manual_seed(seed)
    every = _Sequences.all()
    logits = 2 * torch.randn(every.prefixes, VOCABULARY, generator=random, dtype=torch.float64)
    logits[:, 0] -= 1  # sequences of several tokens
    old = logits.log_softmax(-1)
    probability = every.probability(old)
    reward = (torch.rand(len(every.ids), generator=random, dtype=torch.float64) < 0.4).double()
    mean = (probability * reward).sum()
    advantage = (reward - mean) / (probability * (reward - mean) ** 2).sum().sqrt()

    table = logits.clone().requires_grad_()
    (ascent,) = torch.autograd.grad((every.probability(table.log_softmax(-1)) * advantage).sum(), table)
    shift = torch.where(every.mask, every.logp((logits + 1e-3 * ascent).log_softmax(-1)) - every.logp(old), 0.0).abs().sum(1)
    ascent = ascent * 1e-3 / float((probability * shift).sum() / (probability * every.mask.sum(1)).sum())
    now = (logits + update * ascent).log_softmax(-1)
    current = now.clone().requires_grad_()
    (truth,) = torch.autograd.grad((every.probability(current.log_softmax(-1)) * advantage).sum(), current)

    chosen = [OBJECTIVES[name] for name in objectives or OBJECTIVES]
    written = [Correction.parse(text) for text in corrections or ("none", *METHODS)]
    bench = _Bench(every, old, now, advantage)
    target = {o.name: bench.gradient(o, old, probability, None)[0] for o in chosen}
    rows, sizes = [], {}
    for name, sampler in MISMATCHES.items():
        progress(f"{name}: {len(chosen)} objectives × {len(written)} corrections")
        rollout = sampler(logits, ascent)
        mu = every.probability(rollout)
        gap = torch.where(every.mask & (mu > 0)[:, None], every.logp(old) - every.logp(rollout), 0.0)
        sizes[name] = {
            "mean_abs_d": float((mu * gap.abs().sum(1)).sum() / (mu * every.mask.sum(1)).sum()),
            "seq_ess": float((mu * gap.sum(1).exp()).sum() ** 2 / (mu * (2 * gap.sum(1)).exp()).sum()),
            "unreached": float(probability[mu == 0].sum()),
        }
        for correction in written:
            for objective in chosen:
                found, noise, kept, exact = bench.gradient(objective, rollout, mu, correction)
                aim = target[objective.name]
                rows.append(Row(
                    name, objective.name, str(correction), float((found - aim).norm() / aim.norm()), _cosine(found, aim),
                    noise / float(aim.norm()), kept, exact,
                ))  # fmt: skip
    order = {o.name: i for i, o in enumerate(chosen)}
    rows.sort(key=lambda row: order[row.objective])
    own = {name: _cosine(-g, truth) for name, g in target.items()}
    return GradientTable(tuple(rows), sizes, own, len(every.ids))


@dataclass(frozen=True, slots=True, eq=False)
class _Bench:
    every: _Sequences
    old: torch.Tensor
    now: torch.Tensor
    advantage: torch.Tensor

    def gradient(
        self, objective: Objective, rollout: torch.Tensor, mu: torch.Tensor, correction: Correction | None
    ) -> tuple[torch.Tensor, float, float, bool]:
        """(gradient by the logits (prefixes, V), noise of 64 sequences, share kept, exact)."""
        rows = torch.nonzero(mu > 0)[:, 0]
        exact = objective.name != "m2po" and (correction is None or correction.by_rows)
        share = mu[rows] / mu[rows].sum()
        if not exact:  # as often as their probability says, and at least once
            times = (_BATCH * share).round().long().clamp(min=1)
            rows, share = rows.repeat_interleave(times), (share / times).repeat_interleave(times)
        every = self.every.take(rows)
        leaf = self.now[every.prefix].clone().requires_grad_()
        full = leaf.log_softmax(-1)
        logp = full.gather(-1, every.ids[..., None])[..., 0]
        old_logp, rollout_logp = every.logp(self.old), every.logp(rollout)
        advantages = self.advantage[rows]
        weights: Weights | None = None
        if correction is not None:
            weights = correction(
                rollout_logp, old_logp, mask=every.mask, logp=logp.detach(), advantages=advantages[:, None].expand(old_logp.shape),
                turn_ids=torch.zeros_like(every.ids),
            )  # fmt: skip
        # A token that the sampler never draws has −inf there: e^−60 is as good as none and stays finite.
        tail = rollout[every.prefix].clamp(min=-60)
        loss = objective.loss(Streams(logp, old_logp, rollout_logp, advantages, every.mask, weights, full, tail))
        tokens = loss.keep.sum(1)
        unit, each = tokens.double(), loss.loss.sum(1)
        if objective.over.startswith("seq-mean"):
            unit = (tokens > 0).double()
            each = each / tokens.clamp(min=1) if objective.over == "seq-mean-token-mean" else each
        (slope,) = torch.autograd.grad(each.sum(), leaf)
        total = (share * unit).sum().clamp(min=1e-300)
        mean = (
            torch.zeros_like(self.now).index_add(0, every.prefix.flatten(), (slope * share[:, None, None]).flatten(0, 1)) / total
        )
        # Influence of a sequence on Σ slope / Σ unit: (slope − unit · mean) / total.
        square = (slope**2).sum((1, 2)) - 2 * unit * (slope * mean[every.prefix]).sum((1, 2)) + unit**2 * (mean**2).sum()
        noise = max(float((share * square).sum()) / 64, 0.0) ** 0.5 / float(total)  # rounding may leave −1e-18
        return mean, noise, float((share * tokens).sum() / (share * every.mask.sum(1)).sum()), exact


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    scale = float(a.norm() * b.norm())
    return float((a * b).sum()) / scale if scale > 0 else math.nan
