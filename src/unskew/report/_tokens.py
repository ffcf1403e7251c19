"""The worst tokens in their text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, floor, log10
from typing import Any

import numpy as np

from unskew.report._words import short, visible
from unskew.trace import Trace

__all__ = ["Passage", "heat_steps", "token_text", "worst_passages"]

_COUNT, _CONTEXT, _STEPS = 8, 12, 5


@dataclass(frozen=True, slots=True)
class Passage:
    """One bad token and its neighbours.

    `tokens`: {"text", "title", "heat" (0 to 5, or None outside the loss), "here"}.
    """

    id: str
    position: int
    d: float
    rollout_p: float
    trainer_p: float
    tokens: tuple[Mapping[str, Any], ...]


def token_text(token_id: int, texts: Sequence[str] | None) -> str:
    """A token's text with white space and control characters made visible; its id in brackets where no text is known.

    Example:
        >>> token_text(1, ["a", " b\\n"]), token_text(7, None)
        ('·b↵', '[7]')
    """
    if texts is None or not 0 <= token_id < len(texts):
        return f"[{token_id}]"
    return short(visible(texts[token_id], spaces=True), 32) or "∅"


def heat_steps(largest: float) -> tuple[float, ...]:
    """Lower bounds of the five heats, each √10 apart, for a page whose largest |d| is this.

    Example:
        >>> heat_steps(1.5)
        (0.01, 0.03, 0.1, 0.3, 1.0)
    """
    top = floor(2 * log10(max(largest, 1e-12)) + 1e-9)
    return tuple(float(f"{1 if k % 2 == 0 else 3}e{k // 2}") for k in range(top - _STEPS + 1, top + 1))


def worst_passages(trace: Trace, texts: Sequence[str] | None) -> tuple[Passage, ...]:
    """The eight tokens with the largest |d|, at most one a sequence, each within twelve neighbours on either side."""
    if not trace.has("old_logp"):
        return ()
    rollout, old = (trace.tokens(name).astype(np.float64) for name in ("rollout_logp", "old_logp"))
    keep = trace.mask & np.isfinite(old - rollout)
    size = np.where(keep, np.abs(old - rollout), 0.0)
    # The worst of each row, then the worst rows: no sort of all tokens.
    filled = trace.lengths > 0
    highest = np.zeros(len(trace))
    if filled.any():
        highest[filled] = np.maximum.reduceat(size, trace.cu_seqlens[:-1][filled])
    rows = [int(row) for row in np.argsort(-highest, kind="stable")[:_COUNT] if highest[row] > 0]
    steps = heat_steps(float(highest.max())) if rows else ()
    return tuple(_passage(trace, row, old - rollout, keep, rollout, texts, steps) for row in rows)


def _passage(
    trace: Trace, row: int, d: np.ndarray, keep: np.ndarray, rollout: np.ndarray, texts: Sequence[str] | None,
    steps: Sequence[float],
) -> Passage:  # fmt: skip
    one = trace.select([row])
    start, stop = int(trace.cu_seqlens[row]), int(trace.cu_seqlens[row + 1])
    ids = one.tokens("response_ids")
    here = int(np.argmax(np.where(keep[start:stop], np.abs(d[start:stop]), 0.0)))
    prompt = one.contexts()[0] if one.has("prompt_ids") else ids[:0]
    before = max(_CONTEXT - here, 0)
    tokens: list[Mapping[str, Any]] = [
        {"text": token_text(int(i), texts), "title": f"prompt, id {i}", "heat": None, "here": False}
        for i in (prompt[-before:] if before else prompt[:0])
    ]
    for k in range(max(0, here - _CONTEXT), min(stop - start, here + _CONTEXT + 1)):
        at, used = start + k, bool(keep[start + k])
        title = f"token {k}, id {ids[k]}" + (f", d {d[at]:+.3g} nat" if used else ", not in the loss")
        heat = sum(abs(d[at]) >= step for step in steps) if used else None
        tokens.append({"text": token_text(int(ids[k]), texts), "title": title, "heat": heat, "here": k == here})
    at = start + here
    return Passage(
        short(one.rows("id")[0] or f"row {row}"), here, float(d[at]), _probability(rollout[at]), _probability(rollout[at] + d[at]),
        tuple(tokens),
    )  # fmt: skip


def _probability(logp: float) -> float:
    return exp(min(float(logp), 0.0))
