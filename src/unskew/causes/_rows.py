"""Record causes of the rows themselves: what the mask covers, how a response ends, which ids it has."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from unskew.causes._base import Cause, Facts, Gap, Intervention, Parameter, Reading
from unskew.causes._fit import fit_factor
from unskew.score import Inputs
from unskew.trace import SEGMENT_PADDING, SEGMENT_PROMPT, SEGMENT_SAMPLED, SEGMENT_TEMPLATE, SEGMENT_TOOL, Trace

__all__ = [
    "EosDropped", "ImageExpansion", "PaddingInMask", "PromptInMask", "Retokenized", "StopTrimmed", "ToolInMask", "Truncated",
]  # fmt: skip


class PromptInMask(Cause):
    """The loss mask covers the prompt (methods 11)."""

    id = "record.prompt-in-mask"
    says = "the loss mask covers prompt tokens, which the policy did not sample"
    sides = frozenset({"record"})
    kind = "lint"
    screens_on = "masked tokens of segment 0, or responses that begin with their own prompt inside the mask"
    refute = "no token of the mask belongs to the prompt"
    remedy = "cut the mask to the sampled tokens (segment 1)"
    settings = ()
    planted = "record"

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, rows=_prompt_into_response)

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        if trace.has("segment_ids"):
            bad = trace.mask & (trace.tokens("segment_ids") == SEGMENT_PROMPT)
            how = "their segment is 0 (prompt)"
        elif trace.has("prompt_ids"):
            bad = np.zeros(trace.n_tokens, bool)
            ids = trace.tokens("response_ids")
            for start, stop, prompt in zip(trace.cu_seqlens[:-1], trace.cu_seqlens[1:], trace.ragged("prompt_ids"), strict=True):
                if 1 < len(prompt) <= stop - start and np.array_equal(ids[start : start + len(prompt)], prompt):
                    bad[start : start + len(prompt)] = trace.mask[start : start + len(prompt)]
            how = "the response begins with its own prompt"
        else:
            return
        yield from _in_mask(self, trace, bad, f"are prompt: {how}")


class PaddingInMask(Cause):
    """The loss mask covers padding (methods 12)."""

    id = "record.padding-in-mask"
    says = "the loss mask covers padding after the responses"
    sides = frozenset({"record"})
    kind = "lint"
    screens_on = "masked tokens of segment 4, or responses that end in runs of one id with a placeholder for log-prob"
    refute = "no response ends in a run of one id inside the mask"
    remedy = "build the loss mask from the response lengths, not from the padded width"
    settings = ()
    planted = "record"

    def intervene(self, **parameters: Parameter) -> Intervention:
        def padded(trace: Trace, facts: Facts) -> Trace:
            pad = facts.eos_ids[0] if facts.pad_id is None else facts.pad_id
            longest = int(trace.lengths.max(initial=0))
            return _appended(trace, lambda row: [pad] * (longest - len(row["response_ids"])), None)

        return Intervention(self.id, {}, sampled=padded)

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        if trace.has("segment_ids"):
            bad = trace.mask & (trace.tokens("segment_ids") == SEGMENT_PADDING)
            yield from _in_mask(self, trace, bad, "are padding: their segment is 4")
            return
        ids, logp, bad = trace.tokens("response_ids"), trace.tokens("rollout_logp"), np.zeros(trace.n_tokens, bool)
        runs: dict[int, list[int]] = {}
        for row, (start, stop) in enumerate(zip(trace.cu_seqlens[:-1], trace.cu_seqlens[1:], strict=True)):
            if stop > start:
                same = (ids[start:stop] == ids[stop - 1]) & (logp[start:stop] == logp[stop - 1])
                length = int(np.argmin(same[::-1])) if not same.all() else stop - start
                if length > 1:
                    bad[stop - length : stop] = trace.mask[stop - length : stop]
                    runs.setdefault(int(ids[stop - 1]), []).append(row)
        if len(runs) == 1:
            (pad,) = runs
            yield from _in_mask(self, trace, bad, f"end their rows in runs of id {pad} with one log-prob")


class ToolInMask(Cause):
    """The loss mask covers tool output or template text (methods 18)."""

    id = "record.tool-in-mask"
    says = "the loss mask covers tool output or template text, which the policy did not sample"
    sides = frozenset({"record"})
    kind = "lint"
    screens_on = "masked tokens of segment 2 (tool, user) or 3 (template)"
    refute = "no masked token is of those segments"
    remedy = "cut the mask to the sampled tokens (segment 1)"
    settings = ()
    planted = "record"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"tokens": int(rng.integers(4, 16))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        n = int(parameters["tokens"])
        return Intervention(
            self.id,
            dict(parameters),
            sampled=lambda trace, _: _appended(trace, lambda row: row["prompt_ids"][-n:], SEGMENT_TOOL),
        )

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        if trace.has("segment_ids"):
            bad = trace.mask & np.isin(trace.tokens("segment_ids"), (SEGMENT_TOOL, SEGMENT_TEMPLATE))
            yield from _in_mask(self, trace, bad, "are tool output or template text: their segment is 2 or 3")


class _End(Cause):
    """Something about how responses end, read off finish_reason, the last ids and the declared stop strings."""

    sides = frozenset({"record"})
    kind = "lint"
    settings = ()
    planted = "record"


class EosDropped(_End):
    """A sampled EOS that is missing from the record (methods 15)."""

    id = "record.eos-dropped"
    says = "the EOS that ended the responses was sampled and is missing from the ids: nothing teaches the policy to stop"
    screens_on = "rows that finished by stop do not end in EOS, at all lengths"
    refute = "rows that finished by stop end in EOS, or stop strings are declared"
    remedy = "keep the EOS that the engine returns in response_ids, with its log-prob and inside the mask"

    def intervene(self, **parameters: Parameter) -> Intervention:
        return Intervention(self.id, {}, sampled=lambda trace, facts: _cut(trace, lambda row: _before(row, facts.eos_ids)))

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        rows, stopped = _unended(trace, facts)
        if len(rows) > max(1, 0.5 * stopped) and not _at_limit(trace, rows) and not any(trace.setting("sampling", "stop")):
            says = f"{len(rows)} of {stopped} rows that finished by stop do not end in {_ids(facts)}"
            yield Reading(self.id, "record", "error", (says,), {"rows": len(rows)}, trace.cu_seqlens[rows + 1] - 1)


class Truncated(_End):
    """Responses cut at a limit that the record does not know of (methods 16)."""

    id = "record.truncated"
    says = "responses are cut at a length limit, and finish_reason (and so reward and mask) is that of the whole response"
    screens_on = "rows that finished by stop but do not end in EOS all have the greatest length"
    refute = "rows of the greatest length end in EOS or have finish_reason length"
    remedy = (
        "one limit for engine and trainer; set finish_reason to length on cut rows and leave them out of the loss or the reward"
    )
    settings = ("rollout.max_tokens",)

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"max_tokens": int(rng.integers(24, 48))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        limit = int(parameters["max_tokens"])
        return Intervention(self.id, dict(parameters), sampled=lambda trace, _: _cut(trace, lambda _row: limit))

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        rows, stopped = _unended(trace, facts)
        if len(rows) > 1 and _at_limit(trace, rows):
            limit = int(trace.lengths.max())
            says = f"{len(rows)} of {stopped} rows that finished by stop have exactly {limit} tokens and no EOS at their end"
            yield Reading(
                self.id, "record", "error", (says,), {"rows": len(rows), "max_tokens": limit}, trace.cu_seqlens[rows + 1] - 1
            )
        cut = np.array([reason == "length" for reason in trace.rows("finish_reason")], bool)
        if cut.mean() > 0.1 if len(cut) else False:
            says = f"{int(cut.sum())} of {len(cut)} rows have finish_reason length: their reward is that of a cut answer"
            yield Reading(self.id, "record", "info", (says,), {"rows": int(cut.sum()), "max_tokens": int(trace.lengths.max())})


class StopTrimmed(_End):
    """A stop string that was sampled and is missing from the ids."""

    id = "record.stop-trimmed"
    says = "the stop string that ended the responses was sampled and is missing from the ids"
    screens_on = "stop strings are declared, and rows that finished by stop end neither in one of them nor in EOS"
    refute = "the text of rows that finished by stop ends in a stop string"
    remedy = "keep the stop string in the returned ids, with its log-probs and inside the mask"
    settings = ("rollout.stop_trim",)

    def intervene(self, **parameters: Parameter) -> Intervention:
        def trimmed(trace: Trace, facts: Facts) -> Trace:
            dot = facts.tokenizer.encode(".", add_special_tokens=False)[-1]
            out = _cut(trace, lambda row: _before(row, (dot,)))
            return out.with_rows(sampling=[{**sampling, "stop": ["."]} for sampling in out.rows("sampling")])

        return Intervention(self.id, {}, sampled=trimmed)

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        stops = sorted({text for texts in trace.setting("sampling", "stop") for text in texts or ()})
        rows, stopped = _unended(trace, facts)
        if not stops or facts.tokenizer is None:
            return
        ends = [
            facts.tokenizer.decode(ids[-16:].tolist()) for k, ids in enumerate(trace.ragged("response_ids")) if k in set(rows)
        ]
        bare = rows[[not any(stop in end for stop in stops) for end in ends]] if len(rows) else rows
        if len(bare) > max(1, 0.5 * len(rows)):
            says = f"{len(bare)} of {stopped} rows that finished by stop end in neither EOS nor one of {stops}"
            yield Reading(self.id, "record", "error", (says,), {"rows": len(bare)}, trace.cu_seqlens[bare + 1] - 1)


class ImageExpansion(Cause):
    """A placeholder of the prompt that stands once on one side and once for each patch on the other (methods 45)."""

    id = "record.image-expansion"
    says = "a placeholder of the prompt (of an image, say) is expanded to another number of tokens on one side"
    sides = frozenset({"rollout", "trainer"})
    screens_on = "prompts with a placeholder; another number of copies of it reproduces the recorded log-probs"
    refute = "no other number of copies brings the clean scorer nearer to the recorded log-probs"
    remedy = "pass the engine's expanded prompt ids to the trainer, or the same processor on both sides"
    settings = ("rollout.prompt_ids",)
    needs_model = True
    costly = True
    fitted = 2
    planted = "rollout"

    def draw(self, rng: np.random.Generator) -> dict[str, Parameter]:
        return {"id": 2, "copies": int(rng.integers(2, 24))}

    def intervene(self, **parameters: Parameter) -> Intervention:
        change = _Expanded(int(parameters["id"]), int(parameters["copies"]))
        return Intervention(self.id, {"id": change.id, "copies": change.copies}, inputs=change)

    def propose(self, gap: Gap) -> Iterable[Intervention]:
        tokenizer = gap.counterfactual.facts.tokenizer
        prompts = gap.trace.contexts()
        for token in getattr(tokenizer, "all_special_ids", ()):
            if all(token in prompt[1:] for prompt in prompts):
                found = fit_factor(
                    gap, lambda copies, token=token: self.intervene(id=token, copies=round(copies)), ((2.0, 4.0, 8.0, 16.0, 64.0, 256.0),)
                )  # fmt: skip
                if found is not None:
                    yield found


@dataclass(frozen=True, slots=True)
class _Expanded:
    """Every run of an id in a prompt, but for its first token, `copies` long."""

    id: int
    copies: int

    def __call__(self, inputs: Inputs, _: Trace, __: Facts) -> Inputs:
        return replace(inputs, prompts=[np.asarray(self._expanded(list(prompt)), np.int64) for prompt in inputs.prompts])

    def _expanded(self, prompt: list[int]) -> list[int]:
        out = prompt[:1]
        for token, run in groupby(prompt[1:]):
            out += [token] * (self.copies if token == self.id else len(list(run)))
        return out


class Retokenized(Cause):
    """Ids differ from the sampled ids, same text (methods 17)."""

    id = "record.retokenized"
    says = "the trainer scored other token ids than the engine sampled: exact up to a point in each row, wrong from there"
    sides = frozenset({"record"})
    kind = "lint"
    screens_on = "in each row |d| is at its floor before an onset and far above it from there on; onsets differ by row"
    refute = "tokens before and after the onset differ alike"
    remedy = "pass token ids from the engine to the trainer; never decode and encode again"
    settings = ("rollout.return_token_ids",)

    def read(self, trace: Trace, facts: Facts) -> Iterable[Reading]:
        if not (trace.has("old_logp") and trace.has("rollout_logp")):
            return
        gap = np.abs(trace.tokens("old_logp").astype(np.float64) - trace.tokens("rollout_logp"))
        wrong = trace.mask & (gap > 0.02)
        onsets, clean_before = [], []
        for start, stop in zip(trace.cu_seqlens[:-1], trace.cu_seqlens[1:], strict=True):
            hits = np.flatnonzero(wrong[start:stop])
            after = stop - start - (hits[0] if len(hits) else 0)
            if len(hits) > 2 and hits[0] > 2 and after > 4 and len(hits) > 0.3 * after:
                onsets.append(int(hits[0]))
                clean_before.append(float(gap[start : start + hits[0]].max()))
        if len(onsets) > 0.5 * len(trace) and len(set(onsets)) > 2 and np.median(clean_before) < 1e-3:
            first = trace.cu_seqlens[:-1][: len(onsets)] + np.asarray(onsets)
            yield Reading(
                self.id, "record", "error",
                (f"{len(onsets)} of {len(trace)} rows agree within {max(clean_before):.1g} nat up to an onset at tokens "
                 f"{min(onsets)}–{max(onsets)} and disagree from there",),
                {"onset": int(np.median(onsets))}, first,
            )  # fmt: skip


def _prompt_into_response(trace: Trace) -> Trace:
    """Rows whose response is the full row, with log-prob 0 on the prompt and the mask over all of it."""
    rows = trace.table.to_pylist()
    for row in rows:
        n = len(row["prompt_ids"])
        row["response_ids"] = row["prompt_ids"] + row["response_ids"]
        for name in ("rollout_logp", "old_logp", "entropy", "noise_scale"):
            if row.get(name) is not None:
                row[name] = [0.0] * n + row[name]
        row.pop("mask", None)
    return Trace.from_rows(rows, path=trace.path)


def _in_mask(cause: Cause, trace: Trace, bad: np.ndarray, how: str) -> Iterable[Reading]:
    """A reading where more than a tenth of the rows have masked tokens that should not be, bool (N,)."""
    rows = np.unique(trace.row_of_token[bad])
    if len(rows) > 0.1 * len(trace):
        yield Reading(
            cause.id, "record", "error", (f"{int(bad.sum())} of {int(trace.mask.sum())} masked tokens in {len(rows)} rows {how}",),
            {"tokens": int(bad.sum())}, np.flatnonzero(bad), bad,
        )  # fmt: skip


def _appended(trace: Trace, more: Callable[[dict[str, Any]], list[int]], segment: int | None) -> Trace:
    """Rows with more ids at their end, of log-prob 0 and inside the mask; `segment` says what they are."""
    rows = trace.table.to_pylist()
    for row in rows:
        n, ids = len(row["response_ids"]), more(row)
        row["response_ids"] = [*row["response_ids"], *ids]
        row["rollout_logp"] = [*row["rollout_logp"], *[0.0] * len(ids)]
        row["mask"] = [1] * (n + len(ids))
        if segment is not None:
            row["segment_ids"] = [SEGMENT_SAMPLED] * n + [segment] * len(ids)
    return Trace.from_rows(rows, path=trace.path)


def _cut(trace: Trace, length: Callable[[dict[str, Any]], int]) -> Trace:
    """Rows whose responses are cut to a length."""
    rows = trace.table.to_pylist()
    for row in rows:
        for name in ("response_ids", "rollout_logp"):
            row[name] = row[name][: length(row)]
        row["routed_experts"] = None
    return Trace.from_rows([row for row in rows if row["response_ids"]], path=trace.path)


def _before(row: dict[str, Any], ends: tuple[int, ...]) -> int:
    """Place of the first of these ids in a response; its length where there is none."""
    return next((k for k, token in enumerate(row["response_ids"]) if token in ends), len(row["response_ids"]))


def _unended(trace: Trace, facts: Facts) -> tuple[np.ndarray, int]:
    """Rows that finished by stop and do not end in EOS, and how many finished by stop; none where EOS is not known."""
    stopped = np.array([reason == "stop" for reason in trace.rows("finish_reason")], bool) & (trace.lengths > 0)
    if not facts.eos_ids or not stopped.any():
        return np.zeros(0, np.int64), int(stopped.sum())
    last = trace.tokens("response_ids")[np.maximum(trace.cu_seqlens[1:] - 1, 0)]
    rows = np.flatnonzero(stopped & ~np.isin(last, facts.eos_ids))
    # One last id in most of those rows is an EOS that the model's files do not name.
    common = np.bincount(last[rows]).max(initial=0) if len(rows) else 0
    return (rows if common < max(4, 0.8 * len(rows)) else np.zeros(0, np.int64)), int(stopped.sum())


def _at_limit(trace: Trace, rows: np.ndarray) -> bool:
    return len(np.unique(trace.lengths[rows])) == 1 and bool((trace.lengths[rows] == trace.lengths.max()).all())


def _ids(facts: Facts) -> str:
    return "EOS (id " + ", ".join(str(token) for token in facts.eos_ids) + ")"
