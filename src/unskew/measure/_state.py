"""Sufficient statistics of a mismatch that merge: over shards, ranks and steps."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import reduce
from importlib.util import find_spec
from typing import Any

import numpy as np

from unskew._errors import UnskewError
from unskew.measure._layout import Layout
from unskew.measure._terms import BIG, BINS, TAUS, TOP, TokenSums, probability_terms, ratio_terms, skew_terms, token_sums

__all__ = ["MEANS", "TAUS", "TOP", "MismatchState"]

MEANS = (
    "d", "abs", "square", "k3", "ratio", "ratio_square", "k3_reverse", "rollout", "old", "calibration", "noise", "scale",
    "skew_positive", "skew_negative", "weight_skew_positive", "weight_skew_negative",
    "js", "spread", "probability_gap", "p_rollout", "p_old", "p_rollout_square", "p_old_square", "p_product",
)  # fmt: skip
"""Token statistics whose sums are kept, over tokens and, for intervals, squared over clusters."""

_CHUNK = 1 << 16
_EDGES = (np.arange(BINS, dtype=np.uint32) << np.uint32(16)).view(np.float32)
_COMPILED = 1 << 18
"""Tokens in one call from which on the compiled scan is used where numba is installed: loading it takes half a second."""


@dataclass(frozen=True, slots=True, eq=False)
class MismatchState:
    """Everything that the figures of a mismatch are computed from; a monoid under `merge`.

    Merging shards of whole sequences gives counts, maxima, histogram and largest weights identical to the pooled ones
    and sums within 1e-12.

    Args:
        n_tokens, n_sequences, n_clusters: kept tokens, sequences with one, and clusters (groups, else sequences).
        n_masked, n_nan, n_inf: tokens outside the mask; in it with a NaN or infinite log-ratio, left out of sums.
        sums: Σ over tokens of each of `MEANS`, float64; tokens with d > 30 enter ratio statistics through `big`.
        counts: tokens behind each sum (calibration, noise and what was not asked for are not known for all).
        cluster_square, cluster_cross, cluster_size: Σ_c y_c², Σ_c y_c n_c, Σ_c n_c² of each of `MEANS`.
        cluster_more: number of clusters with a calibration, Σ_c of noise · scale, and of (ρ − 1) · (ρ² − 1).
        big: tokens with d > 30 as (number, max d, Σ e^(d − max), Σ d, Σ d e^(d − max)).
        histogram: int64 counts of d by the upper 16 bits of its float32 (sign, exponent, 7 bits): relative width 1/128.
        above: int64 counts of |d| > log τ for `TAUS`.
        max_abs: largest |d|; max_probability_gap: largest |p_old − p_rollout|; top: the largest d; top_product: the largest Σ_t d of sequences; both in any order.
        product: sequence products as (max S, Σ e^(S − max), Σ e^(2(S − max)), Σ e^(4(S − max))).
        sequence: Σ over sequences of S, S², |S|, G = S/T, G², |G|, perplexity rollout, perplexity old, T; maxima of |S|, |G|.
    """

    n_tokens: int
    n_sequences: int
    n_clusters: int
    n_masked: int
    n_nan: int
    n_inf: int
    sums: np.ndarray
    counts: np.ndarray
    cluster_square: np.ndarray
    cluster_cross: np.ndarray
    cluster_size: np.ndarray
    cluster_more: np.ndarray
    big: np.ndarray
    histogram: np.ndarray
    above: np.ndarray
    max_abs: float
    max_probability_gap: float
    top: np.ndarray
    top_product: np.ndarray
    product: np.ndarray
    sequence: np.ndarray
    sequence_max: np.ndarray

    @classmethod
    def empty(cls) -> "MismatchState":
        """The state of nothing."""
        k = len(MEANS)
        zero = np.zeros
        return cls(
            0, 0, 0, 0, 0, 0, zero(k), zero(k, np.int64), zero(k), zero(k), zero(k), zero(3),
            np.array([0.0, -np.inf, 0.0, 0.0, 0.0]), zero(BINS, np.int64), zero(len(TAUS), np.int64), 0.0, 0.0, zero(0), zero(0),
            np.array([-np.inf, 0.0, 0.0, 0.0]), zero(9), zero(2),
        )  # fmt: skip

    @classmethod
    def from_packed(
        cls, rollout_logp: Any, old_logp: Any, *, mask: Any, cu_seqlens: Any, entropy: Any = None, noise_scale: Any = None,
        advantage: Any = None, group_ids: Any = None, probabilities: bool = False,
    ) -> "MismatchState":  # fmt: skip
        """State of packed sequences.

        Args:
            rollout_logp, old_logp: (N,), any float dtype, numpy or CPU torch; nats.
            mask: (N,), nonzero where a token takes part.
            cu_seqlens: (B+1,) bounds of the sequences.
            entropy: (N,) of the distribution that `old_logp` is of; NaN where unknown.
            noise_scale: (N,) √((1 − p_y)² + Σ_{v≠y} p_v²); NaN where unknown.
            advantage: (N,), for the skew it sees.
            group_ids: (B,) cluster of each sequence; every cluster must lie in one shard. None: each sequence is one.
            probabilities: also what is read off e^logp: Jensen–Shannon, mean e^|d|, |p_old − p_rollout| and correlation.

        Raises:
            UnskewError: shapes that do not fit.
        """
        rollout, old, keep = (_numpy(values) for values in (rollout_logp, old_logp, mask))
        cu = _numpy(cu_seqlens).astype(np.int64)
        n = len(rollout)
        per_token = {"old_logp": old, "mask": keep, "entropy": entropy, "noise_scale": noise_scale, "advantage": advantage}
        for name, values in per_token.items():
            if values is not None and np.shape(values) != (n,):
                raise UnskewError(f"{name} has shape {np.shape(values)}, rollout_logp ({n},)", exit_code=2)
        if cu.ndim != 1 or len(cu) < 1 or cu[0] != 0 or cu[-1] != n or (np.diff(cu) < 0).any():
            raise UnskewError(f"cu_seqlens must rise from 0 to {n}", exit_code=2)
        known = [None if values is None else _numpy(values) for values in (entropy, noise_scale)]
        groups = None if group_ids is None else np.unique(_numpy(group_ids), return_inverse=True)[1]
        tally = _Tally(len(cu) - 1)
        if n >= _COMPILED and find_spec("numba"):
            tally.scan(rollout, old, keep != 0, cu, known[0], known[1], probabilities)
        else:
            for first, last, part in _chunks(cu):
                tally.add(rollout[part], old[part], keep[part] != 0, cu[first : last + 1] - cu[first], first,
                          *(None if values is None else values[part] for values in known))  # fmt: skip
                if probabilities:
                    tally.add_probabilities(rollout[part], old[part], keep[part] != 0, cu[first : last + 1] - cu[first], first)
        if advantage is not None:
            weight = _numpy(advantage)
            for first, last, part in _chunks(cu):
                tally.add_skew(rollout[part], old[part], keep[part] != 0, weight[part], cu[first : last + 1] - cu[first], first)
        return tally.state(groups)

    @classmethod
    def from_padded(
        cls, rollout_logp: Any, old_logp: Any, *, mask: Any, cu_seqlens: Any = None, group_ids: Any = None, probabilities: bool = False,
        **known: Any,
    ) -> "MismatchState":  # fmt: skip
        """State of a padded batch, computed where it lies: numpy, torch on any device, any array-API library.

        The same figures as `from_packed`, which is faster on numpy; padding counts as masked. One transfer, at the end;
        `token_sums` gives what is transferred, to keep it on the device or to compile it.

        Args:
            rollout_logp, old_logp, mask: (B, T); or (N,) with `cu_seqlens` (B+1,), which is padded first.
            group_ids: (B,) cluster of each sequence, on the host.
            known: entropy, noise_scale, advantage, as in `from_packed`.

        Example:
            >>> a, b = np.log([[0.5, 0.5], [0.5, 0.5]]), np.log([[0.5, 0.25], [1.0, 0.5]])
            >>> MismatchState.from_padded(a, b, mask=np.array([[1, 1], [1, 0]])).n_tokens
            3

        Raises:
            UnskewError: shapes that do not fit.
        """
        if cu_seqlens is not None:
            layout = Layout.of(rollout_logp, mask, cu_seqlens)
            rollout_logp, old_logp = layout.gathered(rollout_logp), layout.gathered(old_logp)
            known = {name: None if x is None else layout.gathered(x) for name, x in known.items()}
            mask = layout.mask
        return cls.from_sums(token_sums(rollout_logp, old_logp, mask, probabilities=probabilities, **known), group_ids=group_ids)

    @classmethod
    def from_sums(cls, sums: TokenSums, *, group_ids: Any = None) -> "MismatchState":
        """State of what `token_sums` left on a device."""
        tally = _Tally(0)
        tally.take(sums)
        return tally.state(None if group_ids is None else np.unique(_numpy(group_ids), return_inverse=True)[1])

    def all_reduce(self, group: Any = None) -> "MismatchState":
        """This state merged over all ranks of torch.distributed; every rank gets the same.

        Each rank has whole sequences, and whole clusters. Counts, maxima, histogram and largest weights are those of the
        pooled tokens, sums within 1e-12.

        Args:
            group: process group; the default one where not given. Its tensors go to the current CUDA device under NCCL.
        """
        import torch
        import torch.distributed as dist

        where = "cuda" if dist.get_backend(group) == "nccl" else "cpu"

        def over_ranks(values: Any, op: Any) -> Any:
            tensor = torch.as_tensor(np.array(values), device=where)
            dist.all_reduce(tensor, op, group=group)
            return tensor.cpu().numpy()

        def gathered(values: np.ndarray) -> list[np.ndarray]:
            length = int(over_ranks(len(values), dist.ReduceOp.MAX))
            mine = torch.full((length,), -np.inf, dtype=torch.float64)
            mine[: len(values)] = torch.as_tensor(values.copy())
            parts = [torch.empty(length, dtype=torch.float64, device=where) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine.to(where), group=group)
            return [part.cpu().numpy() for part in parts]

        added: dict[str, Any] = {
            f.name: over_ranks(getattr(self, f.name), dist.ReduceOp.SUM) for f in fields(self) if f.name not in _SPECIAL
        }
        most = {
            name: over_ranks(getattr(self, name), dist.ReduceOp.MAX)
            for name in ("max_abs", "max_probability_gap", "sequence_max")
        }
        for name in ("top", "top_product"):
            values = np.concatenate(gathered(getattr(self, name)))
            most[name] = _largest(values[values > -np.inf])
        found: dict[str, Any] = {name: x.item() if x.ndim == 0 else x for name, x in (added | most).items()}
        return MismatchState(
            **found, big=reduce(_merge_big, gathered(self.big)), product=reduce(_merge_scaled, gathered(self.product))
        )

    def merge(self, other: "MismatchState") -> "MismatchState":
        """State of both parts' sequences together."""
        values = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name not in _SPECIAL}
        return MismatchState(
            **values,
            big=_merge_big(self.big, other.big),
            max_abs=max(self.max_abs, other.max_abs),
            max_probability_gap=max(self.max_probability_gap, other.max_probability_gap),
            top=_largest(self.top, other.top),
            top_product=_largest(self.top_product, other.top_product),
            product=_merge_scaled(self.product, other.product),
            sequence_max=np.maximum(self.sequence_max, other.sequence_max),
        )


_SPECIAL = ("big", "max_abs", "max_probability_gap", "top", "top_product", "product", "sequence_max")


class _Tally:
    """Mutable sums while one call walks its chunks; per-sequence sums are kept until clusters are formed."""

    def __init__(self, n_sequences: int) -> None:
        k = len(MEANS)
        self.by_sequence = np.zeros((k, n_sequences))
        self.n_by_sequence = np.zeros((k, n_sequences))
        self.big_by_sequence = np.zeros(n_sequences)
        self.histogram = np.zeros(BINS, np.int64)
        self.above = np.zeros(len(TAUS), np.int64)
        self.n_masked = self.n_nan = self.n_inf = 0
        self.max_abs = self.max_probability_gap = 0.0
        self.big = np.array([0.0, -np.inf, 0.0, 0.0, 0.0])
        self.tops: list[np.ndarray] = []

    def add(
        self, rollout: np.ndarray, old: np.ndarray, mask: np.ndarray, cu: np.ndarray, first: int,
        entropy: np.ndarray | None, scale: np.ndarray | None,
    ) -> None:  # fmt: skip
        with np.errstate(invalid="ignore"):
            d = old.astype(np.float64) - rollout
        finite = np.isfinite(d)
        keep = mask & finite
        self.n_masked += int(len(mask) - np.count_nonzero(mask))
        if not finite.all():
            bad = mask & ~finite
            nan = np.isnan(rollout) | np.isnan(old)
            self.n_nan += int((bad & nan).sum())
            self.n_inf += int((bad & ~nan).sum())
        whole = bool(keep.all())
        if not whole:
            d = np.where(keep, d, 0.0)
        size = np.abs(d)
        limit = float(size.max(initial=0.0))
        self.max_abs = max(self.max_abs, limit)
        kept = d if whole else d[keep]
        self.histogram += np.bincount(kept.astype(np.float32).view(np.uint32) >> np.uint32(16), minlength=BINS)
        for index, tau in enumerate(TAUS):
            if limit <= np.log(tau):
                break
            self.above[index] += np.count_nonzero(size > np.log(tau))
        self.tops.append(kept)
        if sum(map(len, self.tops)) > 4 * TOP:
            self.tops = [_largest(*self.tops)]
        small = d
        if limit > BIG and (large := d > BIG).any():
            self.big = _merge_big(self.big, _big(d[large]))
            self.big_by_sequence[first : first + len(cu) - 1] += _segments(large.astype(np.float64), cu)
            small = np.where(large, 0.0, d)
        square = d * d
        terms = [d, size, square, *ratio_terms(np, small)]
        rows = slice(first, first + len(cu) - 1)
        for index, values in enumerate(terms):
            self.by_sequence[index, rows] = _segments(values, cu)
        self.by_sequence[7, rows] = _segments(rollout if whole else np.where(keep, rollout, 0.0), cu)
        self.by_sequence[8, rows] = _segments(old if whole else np.where(keep, old, 0.0), cu)
        count = np.diff(cu).astype(np.float64) if whole else _segments(keep.astype(np.float64), cu)
        self.n_by_sequence[:9, rows] = count
        if entropy is not None:
            known = keep & np.isfinite(entropy)
            self.by_sequence[9, rows] = _segments(np.where(known, old + entropy.astype(np.float64), 0.0), cu)
            self.n_by_sequence[9, rows] = _segments(known.astype(np.float64), cu)
        if scale is not None:
            known = keep & np.isfinite(scale)
            self.by_sequence[10, rows] = _segments(np.where(known, square, 0.0), cu)
            self.by_sequence[11, rows] = _segments(np.where(known, scale.astype(np.float64) ** 2, 0.0), cu)
            self.n_by_sequence[10:12, rows] = _segments(known.astype(np.float64), cu)

    def add_skew(
        self, rollout: np.ndarray, old: np.ndarray, mask: np.ndarray, advantage: np.ndarray, cu: np.ndarray, first: int
    ) -> None:
        """Σ A d and Σ A (ρ − 1) at tokens with positive and with negative advantage; d above 30 counts as 30."""
        with np.errstate(invalid="ignore"):
            d = old.astype(np.float64) - rollout
        known = mask & np.isfinite(d) & np.isfinite(advantage)
        d = np.where(known, d, 0.0)
        weight = np.where(known, advantage, 0.0).astype(np.float64)
        rows = slice(first, first + len(cu) - 1)
        for index, (values, tokens) in enumerate(skew_terms(np, d, weight), start=12):
            self.by_sequence[index, rows] = _segments(values, cu)
            self.n_by_sequence[index, rows] = _segments(tokens.astype(np.float64), cu)

    def add_probabilities(self, rollout: np.ndarray, old: np.ndarray, mask: np.ndarray, cu: np.ndarray, first: int) -> None:
        """Statistics of p_rollout = e^rollout and p_old = e^old at tokens with a finite log-ratio."""
        with np.errstate(invalid="ignore"):
            d = old.astype(np.float64) - rollout
        keep = mask & np.isfinite(d)
        terms = probability_terms(np, rollout.astype(np.float64), old.astype(np.float64), np.where(keep, d, 0.0), keep)
        self.max_probability_gap = max(self.max_probability_gap, float(terms[2].max(initial=0.0)))
        rows = slice(first, first + len(cu) - 1)
        count = _segments(keep.astype(np.float64), cu)
        for index, values in enumerate(terms, start=16):
            self.by_sequence[index, rows] = _segments(values, cu)
            self.n_by_sequence[index, rows] = count

    def take(self, sums: TokenSums) -> None:
        """A padded batch's sums, brought to the host."""
        at = {f.name: _numpy(getattr(sums, f.name)) for f in fields(sums)}
        self.by_sequence, self.n_by_sequence, self.big_by_sequence = at["sums"], at["counts"], at["large"]
        self.n_masked, self.n_nan, self.n_inf = (int(x) for x in at["bad"])
        self.above, self.histogram, self.big = at["above"], at["histogram"], at["big"]
        self.max_abs, self.max_probability_gap = (float(x) for x in at["extremes"])
        self.tops = [at["top"][at["top"] > -np.inf]]

    def scan(
        self, rollout: np.ndarray, old: np.ndarray, mask: np.ndarray, cu: np.ndarray,
        entropy: np.ndarray | None, scale: np.ndarray | None, probabilities: bool,
    ) -> None:  # fmt: skip
        """All sequences at once by the compiled kernel: the same counts, sums within rounding."""
        from unskew.measure._fused import scan

        none = np.zeros(0, np.float32)
        tables, counts, top = np.zeros((2, BINS), np.int64), np.zeros((3, len(cu) - 1)), np.empty(4 * TOP)
        bad = np.zeros(3, np.int64)
        self.max_abs, self.max_probability_gap, filled = scan(
            _floats(rollout), _floats(old), none.view(np.uint8) if mask.all() else mask.view(np.uint8), cu,
            none if entropy is None else _floats(entropy), none if scale is None else _floats(scale), np.log(TAUS), _EDGES,
            self.by_sequence, counts, self.big_by_sequence, tables, self.above, bad, self.big, top, TOP, probabilities,
        )  # fmt: skip
        self.n_masked, self.n_nan, self.n_inf = (int(x) for x in bad)
        self.histogram += tables.sum(axis=0)
        self.n_by_sequence[:9], self.n_by_sequence[9], self.n_by_sequence[10:12] = counts[0], counts[1], counts[2]
        self.n_by_sequence[16:] = counts[0] if probabilities else 0.0
        self.tops = [top[:filled]]

    def state(self, groups: np.ndarray | None) -> MismatchState:
        used = self.n_by_sequence[0] > 0
        y, n = self.by_sequence[:, used], self.n_by_sequence[:, used]
        total, length = y[0], n[0]
        yc, nc = y, n
        if groups is not None and used.any():
            label = np.unique(groups[used], return_inverse=True)[1]
            yc = np.stack([np.bincount(label, row) for row in y])
            nc = np.stack([np.bincount(label, row) for row in n])
        mean = total / np.maximum(length, 1)
        with np.errstate(over="ignore"):
            ppl = [np.exp(-y[index] / np.maximum(length, 1)) for index in (7, 8)]
        stats = [total, total**2, np.abs(total), mean, mean**2, np.abs(mean), *ppl, length]
        return MismatchState(
            n_tokens=int(length.sum()), n_sequences=int(used.sum()), n_clusters=int(yc.shape[1]), n_masked=self.n_masked,
            n_nan=self.n_nan, n_inf=self.n_inf, sums=y.sum(axis=1), counts=n.sum(axis=1).astype(np.int64),
            cluster_square=(yc**2).sum(axis=1), cluster_cross=(yc * nc).sum(axis=1), cluster_size=(nc**2).sum(axis=1),
            cluster_more=np.array([np.count_nonzero(nc[9]), (yc[10] * yc[11]).sum(), (yc[4] * yc[5]).sum()], np.float64), big=self.big,
            histogram=self.histogram, above=self.above, max_abs=self.max_abs,
            max_probability_gap=self.max_probability_gap, top=_largest(*self.tops),
            top_product=_largest(total), product=_scaled(total), sequence=np.array([s.sum() for s in stats]),
            sequence_max=np.array([np.abs(total).max(initial=0.0), np.abs(mean).max(initial=0.0)]),
        )  # fmt: skip


def _chunks(cu: np.ndarray) -> Iterator[tuple[int, int, slice]]:
    """(first sequence, last + 1, their tokens) of runs of whole sequences that stay in the cache."""
    first = 0
    while first < len(cu) - 1:
        last = max(first + 1, int(np.searchsorted(cu, cu[first] + _CHUNK, side="right")) - 1)
        yield first, last, slice(cu[first], cu[last])
        first = last


def _numpy(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    return np.asarray(values)


def _floats(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values if values.dtype in (np.float32, np.float64) else values.astype(np.float32))


def _segments(values: np.ndarray, cu: np.ndarray) -> np.ndarray:
    """Sum of each sequence, float64 (B,), without cumulative sums, which lose small terms next to large ones."""
    out = np.zeros(len(cu) - 1)
    some = np.flatnonzero(np.diff(cu))
    if len(some):
        out[some] = np.add.reduceat(values, cu[:-1][some], dtype=np.float64)
    return out


def _largest(*parts: np.ndarray) -> np.ndarray:
    """The `TOP` largest, in any order: sorting them costs more than all else a merge does."""
    values = np.concatenate(parts) if parts else np.zeros(0)
    return np.partition(values, len(values) - TOP)[len(values) - TOP :] if len(values) > TOP else values


def _scaled(total: np.ndarray) -> np.ndarray:
    if not len(total):
        return np.array([-np.inf, 0.0, 0.0, 0.0])
    weights = np.exp(total - total.max())
    return np.array([total.max(), weights.sum(), (weights**2).sum(), (weights**4).sum()])


def _merge_scaled(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    top = max(a[0], b[0])
    if top == -np.inf:
        return a
    fa, fb = np.exp(a[0] - top), np.exp(b[0] - top)
    return np.array([top, a[1] * fa + b[1] * fb, a[2] * fa**2 + b[2] * fb**2, a[3] * fa**4 + b[3] * fb**4])


def _big(d: np.ndarray) -> np.ndarray:
    weights = np.exp(d - d.max())
    return np.array([len(d), d.max(), weights.sum(), d.sum(), (d * weights).sum()])


def _merge_big(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not a[0] or not b[0]:
        return b if b[0] else a
    top = max(a[1], b[1])
    fa, fb = np.exp(a[1] - top), np.exp(b[1] - top)
    return np.array([a[0] + b[0], top, a[2] * fa + b[2] * fb, a[3] + b[3], a[4] * fa + b[4] * fb])
