"""A correction as a value: written, parsed, composed, applied."""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from unskew._errors import UnskewError
from unskew.correct._batch import Batch
from unskew.correct._methods import METHODS, Method
from unskew.correct._smooth import smoothed
from unskew.correct._weights import Weights
from unskew.measure import Layout

__all__ = ["Correction", "Term"]

_BLOCK = 1 << 16
_COMPILED = 1 << 18
"""Tokens in one call from which on the compiled pass is used where numba is installed."""
_TERM = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\(([^()]*)\))?\s*")


@dataclass(frozen=True, slots=True)
class Term:
    """One method with its arguments.

    Example:
        >>> str(Term("geo-mask", (0.999, 1.001)))
        'geo-mask(0.999,1.001)'
    """

    name: str
    args: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        method = METHODS.get(self.name)
        if method is None:
            near = difflib.get_close_matches(self.name, METHODS, n=3) or sorted(METHODS)[:3]
            raise UnskewError(
                f"no correction {self.name!r}", hint=f"did you mean {', '.join(near)}? `unskew explain corrections`", exit_code=2
            )
        if not self.args:
            object.__setattr__(self, "args", method.defaults)
        if len(self.args) not in {len(names) for names in method.takes}:
            raise UnskewError(f"{self.name} with {len(self.args)} arguments", hint=f"write {method.signature()}", exit_code=2)
        if any(math.isnan(a) for a in self.args) or (
            len(self.args) == 2 and self.name != "dppo-tv" and self.args[0] > self.args[1]
        ):
            raise UnskewError(f"{self}: bounds must rise", hint=f"write {method.signature()}", exit_code=2)

    @property
    def method(self) -> Method:
        """What it does."""
        return METHODS[self.name]

    def __str__(self) -> str:
        return f"{self.name}({','.join(_plain(a) for a in self.args)})" if self.args else self.name

    def statistic(self, batch: Batch) -> tuple[Any, float, float]:
        """(statistic (B, T) or (B, 1), its lower bound, its upper bound)."""
        return self.method.statistic(batch, *self.args), *self.method.bounds(batch, *self.args)

    def within(self, batch: Batch) -> Any:
        """bool (B, T): tokens that this term alone keeps in the loss."""
        xp = batch.layout.xp
        if self.method.form not in ("mis", "mask"):
            return batch.mask & xp.broadcast_to(_whole(self, batch), batch.layout.shape)
        values, low, high = self.statistic(batch)
        return batch.mask & xp.broadcast_to((values >= low) & (values <= high) & _whole(self, batch), batch.layout.shape)


@dataclass(frozen=True, slots=True)
class Correction:
    """Terms that hold together: at most one weight, any number of rejections, at most one normalisation.

    A token stays where every term keeps it. Weights are normalised last, over what stays.

    Args:
        terms: in the order they are written; the order changes nothing.

    Example:
        >>> import numpy as np
        >>> correction = Correction.parse("token-tis(2)+geo-mask(0.5,2)+veto(1e-4)")
        >>> str(correction)
        'token-tis(2)+geo-mask(0.5,2)+veto(0.0001)'
        >>> rollout = np.log([[0.1, 0.5], [0.5, 0.5]])
        >>> kept = correction(rollout, np.log([[0.4, 0.5], [0.5, 1e-6]]), mask=np.ones((2, 2)))
        >>> kept.weight.round(3).tolist(), kept.keep.tolist()
        ([[2.0, 1.0], [0.0, 0.0]], [[True, True], [False, False]])
    """

    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        for forms, what in ((("is", "tis", "mis", "psis"), "importance weight"), (("batch-norm",), "normalisation")):
            found = [term for term in self.terms if term.method.form in forms]
            if len(found) > 1:
                raise UnskewError(
                    f"{' and '.join(map(str, found))}: a correction has one {what}", hint="rejections compose freely", exit_code=2
                )

    @classmethod
    def parse(cls, text: str) -> "Correction":
        """From "name(arguments)+name(arguments)"; "none" and "" are the correction that changes nothing.

        Raises:
            UnskewError: an unknown name, wrong arguments, or two weights.
        """
        if text.strip() in ("", "none"):
            return cls()
        terms = []
        for part in text.split("+") if "e+" not in text.lower() else re.split(r"\+(?=\s*[a-z])", text):
            match = _TERM.fullmatch(part)
            if match is None:
                raise UnskewError(f"cannot read {part!r} in {text!r}", hint="write name(arguments)+name(arguments)", exit_code=2)
            terms.append(Term(match[1], _numbers(match[2] or "", part)))
        return cls(tuple(terms))

    def __str__(self) -> str:
        return "+".join(map(str, self.terms)) or "none"

    def __add__(self, other: "Correction") -> "Correction":
        return Correction((*self.terms, *other.terms))

    def __call__(
        self, rollout_logp: Any, old_logp: Any, *, mask: Any, cu_seqlens: Any = None, logp: Any = None, advantages: Any = None,
        turn_ids: Any = None,
    ) -> Weights:  # fmt: skip
        """Weights and kept tokens of a batch.

        Args:
            rollout_logp, old_logp: (B, T), or (N,) with `cu_seqlens` (B+1,); any float dtype, nats; numpy or torch.
            mask: nonzero where a token takes part in the loss.
            logp: log-probs at the current weights, for methods that look at the update; `old_logp` where not given.
            advantages: per token, for methods that look at its sign.
            turn_ids: turn of each token, from 0, for turn-level weights.

        Raises:
            UnskewError: shapes that do not fit, or an array that a method needs is missing.
        """
        given = {"mask": mask, "logp": logp, "advantages": advantages, "turn_ids": turn_ids}
        if isinstance(rollout_logp, np.ndarray) and rollout_logp.ndim == 2 and rollout_logp.size > _BLOCK and self.by_rows:
            if self.by_log_ratio and rollout_logp.size >= _COMPILED and logp is None and find_spec("numba"):
                return self._compiled(rollout_logp, old_logp, mask)
            return self._in_blocks(rollout_logp, old_logp, given)
        return self.apply(Batch.of(rollout_logp, old_logp, cu_seqlens=cu_seqlens, **given))

    @property
    def by_rows(self) -> bool:
        """Whether each sequence's weights depend on that sequence alone."""
        return not any(term.name == "m2po" or term.method.form in ("psis", "batch-norm") for term in self.terms)

    @property
    def by_log_ratio(self) -> bool:
        """Whether a token's log-ratio alone decides on its weight."""
        return all(
            term.method.level == "token" and term.method.unit == "ratio" and term.method.form != "psis" for term in self.terms
        )

    def _compiled(self, rollout_logp: np.ndarray, old_logp: np.ndarray, mask: Any) -> Weights:
        """As one batch, in one compiled pass."""
        from unskew.correct._fused import token_weights

        layout = Layout.of(rollout_logp, mask)
        kind = np.float64 if np.float64 in (rollout_logp.dtype, old_logp.dtype) else np.float32
        rollout, old = (np.ascontiguousarray(x, kind).reshape(-1) for x in (rollout_logp, layout.gathered(old_logp)))
        inside, clip = (-math.inf, math.inf), (0.0, math.inf)
        for term in self.terms:
            low, high = term.method.bounds(None, *term.args)
            if term.method.form in ("mis", "mask"):
                inside = (max(inside[0], low), min(inside[1], high))
            elif term.method.form == "tis":
                clip = (math.exp(low), math.exp(high))
        out = Weights(np.empty(layout.shape, kind), np.empty(layout.shape, bool), np.empty(layout.shape, bool))
        keep, non_finite, use = (
            x.view(np.uint8).reshape(-1) for x in (out.keep, out.non_finite, np.ascontiguousarray(layout.mask))
        )
        # Bounds round to the log-ratio's dtype, as in every array library.
        inside = kind(inside[0]), kind(inside[1])
        token_weights(rollout, old, use, inside, clip, self.weighting is not None, out.weight.reshape(-1), keep, non_finite)
        return out

    def _in_blocks(self, rollout_logp: np.ndarray, old_logp: np.ndarray, given: Mapping[str, Any]) -> Weights:
        """As one batch, in blocks of rows that stay in the cache."""
        rows = max(1, _BLOCK // rollout_logp.shape[1])
        weight = np.empty(rollout_logp.shape, np.float64 if rollout_logp.dtype == np.float64 else np.float32)
        keep, non_finite = np.empty(weight.shape, bool), np.empty(weight.shape, bool)
        for start in range(0, len(weight), rows):
            part = slice(start, start + rows)
            found = self.apply(
                Batch.of(rollout_logp[part], old_logp[part], **{k: None if v is None else v[part] for k, v in given.items()})
            )
            weight[part], keep[part], non_finite[part] = found.weight, found.keep, found.non_finite
        return Weights(weight, keep, non_finite)

    def apply(self, batch: Batch) -> Weights:
        """Weights of a batch that is prepared already."""
        xp, layout = batch.layout.xp, batch.layout
        keep = batch.mask
        for term in self.terms:
            if term.method.form in ("mis", "mask") or term.method.level != "token":
                keep = keep & term.within(batch)
        weight = xp.ones_like(batch.d)
        if (term := self.weighting) is not None:
            values, low, high = term.statistic(batch)
            if term.method.form == "psis":
                values = smoothed(batch, values, by_sequence=term.method.level == "seq")
            weight = xp.astype(xp.broadcast_to(_exp(xp, values, low, high), layout.shape), batch.d.dtype)
        weight = xp.where(keep, weight, xp.zeros_like(weight))
        for term in self.terms:
            if term.method.form == "batch-norm":
                weight = weight / _mean(batch, weight, keep, by_sequence=term.method.level == "seq")
        return Weights(*(layout.restore(x) for x in (weight, keep, batch.non_finite)))

    @property
    def weighting(self) -> Term | None:
        """The term that is an importance weight."""
        return next((term for term in self.terms if term.method.form in ("is", "tis", "mis", "psis")), None)


def _whole(term: Term, batch: Batch) -> Any:
    """bool (B, 1): sequences whose statistic is known: one unknown log-ratio leaves a sequence's product unknown."""
    xp = batch.layout.xp
    bad = xp.any(batch.non_finite, axis=1, keepdims=True)
    return ~bad if term.method.level != "token" else xp.ones_like(bad)


def _exp(xp: Any, values: Any, low: float, high: float) -> Any:
    """exp of log-weights between bounds, the bounds themselves exact; +inf where it overflows."""
    top = math.log(float(xp.finfo(values.dtype).max)) - 1e-4
    if high < top:
        return _between(xp, xp.exp(_between(xp, values, -math.inf, high + 1)), math.exp(low), math.exp(high))
    out = _between(xp, xp.exp(_between(xp, values, -math.inf, top)), math.exp(low), math.inf)
    return xp.where(values > top, xp.full_like(out, xp.inf), out)


def _between(xp: Any, values: Any, low: float, high: float) -> Any:
    """xp.clip, which some libraries make several times slower than two comparisons."""
    if high < math.inf:
        values = xp.minimum(values, xp.asarray(high, dtype=values.dtype, device=values.device))
    if low > 0 or -math.inf < low < 0:
        values = xp.maximum(values, xp.asarray(low, dtype=values.dtype, device=values.device))
    return values


def _mean(batch: Batch, weight: Any, keep: Any, *, by_sequence: bool) -> Any:
    """Mean of the weights over what is kept; 1 where that is nothing, or only zeros."""
    xp = batch.layout.xp
    count = xp.sum(xp.astype(keep, xp.float64), axis=1)
    total = xp.sum(weight, axis=1, dtype=xp.float64)
    if by_sequence:
        total, count = total / xp.maximum(count, xp.ones_like(count)), xp.astype(count > 0, xp.float64)
    n = xp.sum(count)
    mean = xp.sum(total) / xp.maximum(n, xp.ones_like(n))
    return xp.astype(xp.where(mean > 0, mean, xp.ones_like(mean)), weight.dtype)


def _numbers(text: str, part: str) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in text.split(",")) if text.strip() else ()
    except ValueError:
        raise UnskewError(f"cannot read the numbers in {part!r}", hint="write name(0.5,2)", exit_code=2) from None


def _plain(value: float) -> str:
    return repr(value).removesuffix(".0")
