"""Log-prob, entropy and Σp² of sampled tokens from logits, in one pass."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

from unskew._errors import UnskewError

__all__ = ["TokenScores", "score_logits"]

_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What a scorer says of N sampled tokens, each float64 (N,), nats.

    `entropy` is of the distribution that `logp` is of, and so is `collision`, Σ_v p_v². `noise_scale`
    s = √((1 − p_y)² + Σ_{v≠y} p_v²) is how far log p_y moves for a unit of independent noise on every logit.
    """

    logp: np.ndarray
    entropy: np.ndarray
    noise_scale: np.ndarray
    collision: np.ndarray


@torch.no_grad()
def score_logits(logits: torch.Tensor, ids: torch.Tensor, *, temperature: float = 1.0) -> TokenScores:
    """Log-prob of each chosen token with the entropy and Σp² of its distribution: log softmax(logits / T) at y.

    Sums are float64 over float32 terms: within 1e-6 nats of exact evaluation of the same logits, also where they are
    bfloat16 or float16. On the CPU, with the extra `fast`, one compiled pass that keeps no array of the logits' size.

    Args:
        logits: (N, V), any float dtype and device; −inf has probability 0.
        ids: (N,), int64, the chosen token of each row.
        temperature: > 0.

    Returns:
        Figures of N tokens; −inf log-prob where the chosen logit is −inf, NaN where a row has NaN or +inf, or only −inf.

    Raises:
        UnskewError: shapes that do not fit, an id that is no column, a temperature that is not above 0.

    Example:
        >>> scores = score_logits(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
        >>> scores.logp.round(6).tolist(), scores.entropy.round(6).tolist(), scores.collision.tolist()
        ([-0.693147], [0.693147], [0.5])
    """
    if logits.ndim != 2 or ids.shape != logits.shape[:1] or not logits.is_floating_point():
        raise UnskewError(
            f"logits {tuple(logits.shape)} {logits.dtype}, ids {tuple(ids.shape)}: expected floats (N, V) and (N,)", exit_code=2
        )
    if not temperature > 0:
        raise UnskewError(f"temperature {temperature:g} is not above 0", hint="greedy sampling has no log-probs", exit_code=2)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[1]:
        raise UnskewError(f"ids from {int(ids.min())} to {int(ids.max())}, logits have {logits.shape[1]} columns", exit_code=2)
    out = np.empty((4, len(ids)))
    if logits.device.type == "cpu" and logits.dtype != torch.float64 and find_spec("numba"):
        _compiled(logits, ids, temperature, out)
    else:
        step = max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
        for start in range(0, len(ids), step):
            out[:, start : start + step] = _plain(logits[start : start + step], ids[start : start + step], temperature)
    logp, entropy, miss, others = out
    return TokenScores(logp, entropy, np.sqrt(miss**2 + others), np.exp(logp) ** 2 + others)


def _compiled(logits: torch.Tensor, ids: torch.Tensor, temperature: float, out: np.ndarray) -> None:
    from unskew.score._fused import score_rows

    step = max(1, min(_CHUNK_ELEMENTS // max(1, logits.shape[1]), -(-len(ids) // torch.get_num_threads())))
    chosen = ids.numpy().astype(np.int64)

    def score(start: int) -> None:
        part = logits[start : start + step]
        part = (part if part.dtype in (torch.float32, torch.bfloat16) else part.float()).contiguous()
        half = part.dtype == torch.bfloat16
        rows = part.view(torch.int16).numpy().view(np.uint16) if half else part.numpy().view(np.int32)
        found = np.empty((4, len(part)))
        score_rows(rows, 16 if half else 0, chosen[start : start + step], float(temperature), found)
        out[:, start : start + step] = found

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(score, range(0, len(ids), step)))


def _plain(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> np.ndarray:
    """Log-prob, entropy, Σ_{v≠y} p_v and Σ_{v≠y} p_v² in torch operations, float64 (4, n)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    top = logits.amax(1, keepdim=True)
    scaled = (logits - top) / temperature
    weights = scaled.exp()
    far = scaled.gather(1, ids[:, None])[:, 0].double()
    others = weights.scatter(1, ids[:, None], 0.0)
    rest = others.sum(1, dtype=torch.float64)
    total = rest + far.exp()
    log_total = torch.where(far == 0, rest.log1p(), total.log())
    mean = (weights * torch.where(weights > 0, scaled, 0.0)).sum(1, dtype=torch.float64) / total
    square = (others * others).sum(1, dtype=torch.float64) / total**2
    return torch.stack([far - log_total, log_total - mean, rest / total, square]).cpu().numpy()
