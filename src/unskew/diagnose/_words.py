"""A verdict in words: severity, evidence, fix, what is left and what could not be checked."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unskew.causes import CAUSES, Cause, Intervention, Reading
from unskew.causes._settings import snippets
from unskew.diagnose._floor import ABOVE, FEW_TOKENS, FLOORS, logit_noise
from unskew.diagnose._verdict import CauseFinding, Evidence, Fix, Verdict
from unskew.measure import compute

if TYPE_CHECKING:
    from unskew.diagnose._diagnose import Findings, SideResult

__all__ = ["write_verdict"]

NOISE_CLASS = (
    "numerics.body", "numerics.batch-variance", "numerics.tensor-parallel", "numerics.attention-kernel",
    "numerics.fused-kernel",
)  # fmt: skip
_SEVERITY = {"error": 0, "warn": 1, "info": 2}


def write_verdict(found: "Findings", *, decode: Callable[[int], str] | None, framework: str | None, seconds: float) -> Verdict:
    """The verdict that these findings support."""
    writer = _Writer(found, decode, framework)
    causes = writer.causes()
    top = [cause for cause in causes if cause.severity != "info"]
    unknown = not found.at_floor and any(not side.at_floor for side in found.sides) and not _noise_named(causes)
    n = int(found.keep.sum())
    if (n < FEW_TOKENS or found.unrelated) and not top:
        verdict = "inconclusive"
    else:
        verdict = "mismatch" if top or unknown else "clean"
    left = _left_share(found) if not found.at_floor else 0.0
    return Verdict(
        verdict=verdict,
        summary=_summary(found, verdict, top, unknown, n),
        causes=tuple(causes),
        floor=_floor(found),
        gap=_gap(found),
        matters=_matters(found),
        unexplained=round(left, 4),
        correction=_correction(found, verdict, left),
        unchecked=(*found.notes, *_unchecked(found, unknown)),
        ladder=_ladder(found),
        n_used=len(found.trace),
        n_excluded=found.n_excluded,
        cost={**found.cost, "seconds": round(seconds, 2)},
    )


class _Writer:
    """Writes one finding a cause."""

    def __init__(self, found: "Findings", decode: Callable[[int], str] | None, framework: str | None) -> None:
        self._found, self._decode, self._framework = found, decode, framework

    def causes(self) -> list[CauseFinding]:
        """All findings, gravest first; what explains more comes before what explains less."""
        found = self._found
        out = [self._reproduced(k) for k in range(len(found.interventions))]
        out += [self._read(reading) for reading in found.readings]
        for side in found.sides:
            out += self._noise(side)
        if not out and found.at_floor and found.keep.any() and not found.unrelated:
            out.append(self._finding(CAUSES["floor.noise"], "record", "info", "matched", {}, (self._floor_words(),)))
        return sorted(out, key=lambda c: (_SEVERITY[c.severity], c.kind != "lint", -(c.explained or 0.0)))

    def _reproduced(self, k: int) -> CauseFinding:
        found = self._found
        side, intervention = found.interventions[k]
        cause = CAUSES[intervention.cause]
        result = next(s for s in found.sides if s.gap.side == side)
        if side == "record" and not cause.symmetric:
            side = "rollout" if result.sign > 0 else "trainer"
        named = ", ".join(f"{name} = {_plain(value)}" for name, value in intervention.parameters.items())
        says = (
            f"the clean scorer{' with ' + named if named else ''} predicts the {side} log-probs: σ̂ of the gap falls from "
            f"{result.before:.3g} to {result.left:.3g} nat of logit noise with all named causes "
            f"(floor {result.floor.sigma:.2g})"
        )
        low, high = (float(v) for v in found.intervals[k])
        return self._finding(
            cause, side, "info" if found.shared(k) else cause.severity, "reproduced", _rounded(intervention), (says,),
            tokens=self._worst(result), explained=round(float(found.shares[k]), 4), interval=(round(low, 4), round(high, 4)),
            cls=result.rivals.get(cause.id, ()),
        )  # fmt: skip

    def _read(self, reading: Reading) -> CauseFinding:
        cause = CAUSES[reading.cause]
        of = "calibration" if "calibration" in reading.parameters else "rows" if reading.drop is not None else "gap"
        tokens = self._rows(reading.tokens[:5]) if len(reading.tokens) and not reading.drop is not None else ()
        return self._finding(
            cause, reading.side, reading.severity, cause.kind if of == "calibration" or reading.explained else "lint",
            dict(reading.parameters), reading.says, tokens=tokens, of=of, explained=reading.explained,
        )  # fmt: skip

    def _noise(self, side: "SideResult") -> list[CauseFinding]:
        """What the noise that is left on a side says: its dtype, more than its dtype, or nothing."""
        body = CAUSES["numerics.body"]
        name = side.gap.side
        low = side.dtype_noise.get("float32", FLOORS["float32"])
        if side.at_floor:
            if side.floor.dtype == "float32" or not side.left > ABOVE * low or name == "record":
                return []
            declared = "declared" if side.floor.declared else "inferred, not declared"
            says = f"σ̂ = {side.left:.3g} nat; a {side.floor.dtype} forward of this model against fp32 has {side.floor.sigma:.3g} ({side.floor.source}; {declared})"
            return [self._finding(body, name, "info", "matched", {"dtype": side.floor.dtype}, (says,), cls=NOISE_CLASS)]
        if not self._found.with_model or not _noise_like(side):
            return []
        for dtype in ("float16", "bfloat16"):
            sigma = side.dtype_noise.get(dtype, FLOORS[dtype])
            if sigma / ABOVE <= side.left <= ABOVE * sigma:
                says = (f"σ̂ = {side.left:.3g} nat where {side.floor.declared or side.floor.dtype} predicts {side.floor.sigma:.3g}; "
                        f"a {dtype} forward of this model has {sigma:.3g}")  # fmt: skip
                return [
                    self._finding(
                        body,
                        name,
                        "error",
                        "matched",
                        {"dtype": dtype},
                        (says,),
                        cls=NOISE_CLASS,
                        tokens=self._worst(side),
                    )
                ]
        if side.left > 4 * ABOVE * side.floor.sigma:
            return []
        says = f"σ̂ = {side.left:.3g} nat, {side.left / side.floor.sigma:.1f} times what {side.floor.dtype} predicts ({side.floor.sigma:.3g})"
        return [
            self._finding(
                body,
                name,
                "warn",
                "matched",
                {"dtype": side.floor.dtype},
                (says,),
                cls=NOISE_CLASS,
                tokens=self._worst(side),
            )
        ]

    def _finding(
        self, cause: Cause, side: Any, severity: Any, kind: Any, parameters: Mapping[str, Any], says: tuple[str, ...], *,
        tokens: tuple[Mapping[str, Any], ...] = (), explained: float | None = None,
        interval: tuple[float, float] | None = None, of: Any = "gap", cls: tuple[str, ...] = (),
    ) -> CauseFinding:  # fmt: skip
        evidence = tuple(Evidence(text, tokens if k == 0 else ()) for k, text in enumerate(says))
        fix = Fix(cause.remedy, snippets(cause.settings, parameters, framework=self._framework) if cause.settings else ())
        return CauseFinding(
            id=cause.id, side=side, severity=severity, kind=kind, says=cause.says, explained=explained, of=of,
            interval=interval, cls=cls, parameters=dict(parameters), evidence=evidence, refute=cause.refute, fix=fix,
        )  # fmt: skip

    def _floor_words(self) -> str:
        found = self._found
        sides = ", ".join(f"{s.gap.side} {s.floor.sigma:.2g} ({s.floor.dtype}, {s.floor.source})" for s in found.sides)
        return f"σ̂ of the gap is {found.gap_noise:.3g} nat of logit noise; the floor is {found.floor_noise:.2g}: {sides}"

    def _worst(self, side: "SideResult") -> tuple[Mapping[str, Any], ...]:
        gap = np.where(side.gap.keep, np.abs(side.gap.recorded - side.gap.clean), 0.0)
        return self._rows(np.argsort(-gap, kind="stable")[:5])

    def _rows(self, tokens: np.ndarray) -> tuple[Mapping[str, Any], ...]:
        trace, ids = self._found.trace, self._found.trace.rows("id")
        out = []
        for token in tokens[tokens < trace.n_tokens]:
            row = int(trace.row_of_token[token])
            token_id = int(trace.tokens("response_ids")[token])
            out.append({
                "row": row, "id": ids[row], "position": int(trace.position[token]), "token_id": token_id,
                "text": self._decode(token_id) if self._decode else None,
                "rollout_logp": _float(self._found.rollout[token]), "trainer_logp": _float(self._found.trainer[token]),
                "log_ratio": _float(self._found.trainer[token] - self._found.rollout[token]),
            })  # fmt: skip
        return tuple(out)


def _noise_like(side: "SideResult") -> bool:
    """Whether what is left is symmetric and no heavier-tailed than rounding noise of a whole forward is."""
    residual = side.gap.residual[side.gap.keep]
    residual = residual[np.abs(residual) > 0.1 * side.left * 0.05]
    balanced = 0.3 < float((residual > 0).mean()) < 0.7 if len(residual) else True
    return balanced and side.tail > 0.1 * side.left


def _noise_named(causes: list[CauseFinding]) -> bool:
    return any(cause.id == "numerics.body" and cause.severity != "info" for cause in causes)


def _left_share(found: "Findings") -> float:
    """Part of the noise-weighted d² that neither a cause nor the floor accounts for."""
    if all(side.at_floor for side in found.sides):
        return 0.0
    left = sum(max(side.left**2 - side.floor.sigma**2, 0.0) for side in found.sides if not side.at_floor)
    return float(min(left / max(found.gap_noise**2, 1e-300), max(1.0 - found.shares.sum(), 0.0) if len(found.shares) else 1.0))


def _summary(found: "Findings", verdict: str, top: list[CauseFinding], unknown: bool, n: int) -> str:
    ratio = found.gap_noise / found.floor_noise
    if not n and verdict == "inconclusive":
        return "No token of the loss has finite log-probs on both sides, so there is nothing to compare."
    size = (
        f"σ̂ = {found.gap_noise:.2g} nat, {ratio:.1f} times the floor of {found.floor_noise:.2g}, {n} tokens" if n else "0 tokens"
    )
    if verdict == "inconclusive" and found.unrelated:
        sides = " and ".join(f"{side.gap.side} {side.correlation:.2f}" for side in found.sides)
        return (f"This model does not predict the recorded log-probs (correlation of probabilities: {sides}): another checkpoint, "
                f"tokenizer, prompt or ids than those that were sampled; nothing can be said of engine and trainer ({size}).")  # fmt: skip
    if verdict == "inconclusive":
        return f"{n} tokens are too few for a verdict ({size})."
    if verdict == "clean":
        both = " and ".join(
            dict.fromkeys(f"{i.cause}{_parameters(i)}" for k, (_, i) in enumerate(found.interventions) if found.shared(k))
        )
        shared = f"; both differ from this model in the same way: {both}" if both else ""
        return f"Engine and trainer agree within their noise floor{shared} ({size})."
    names = " and ".join(f"{c.id}{_parameters(c)} on the {c.side} side" for c in top[:3])
    if not names:
        return f"Unknown cause: the gap is above its floor and no cause that could be tested reproduces it ({size})."
    rest = "; part of the gap is unexplained" if unknown else ""
    return f"{names}{rest} ({size})."


def _parameters(cause: CauseFinding | Intervention) -> str:
    shown = [f"{name} {_plain(value)}" for name, value in cause.parameters.items()][:3]
    return f" ({', '.join(shown)})" if shown else ""


def _floor(found: "Findings") -> dict[str, Any]:
    return {
        "logit_noise": _figure(found.floor_noise, "nat", None),
        "sides": [
            {"side": s.gap.side, "dtype": s.floor.dtype, "declared": s.floor.declared, "logit_noise": s.floor.sigma,
             "source": s.floor.source, "before": s.before, "left": s.left}
            for s in found.sides
        ],
        "above": ABOVE,
        "says": f"a gap within {ABOVE:g} times the floor counts as at the floor",
    }  # fmt: skip


def _gap(found: "Findings") -> dict[str, Any]:
    uniform = found.sides[0].gap.uniform.all()
    figures = compute(found.state, withhold="" if uniform else "rows were selected by reward, length or gap").to_dict()
    return {"logit_noise": _figure(found.gap_noise, "nat", int(found.keep.sum())), **figures}


def _matters(found: "Findings") -> dict[str, Any]:
    d = (found.trainer - found.rollout)[found.keep]
    with np.errstate(over="ignore"):
        ratio = np.exp(np.clip(d, -50, 50))
    outside = float(((ratio < 0.8) | (ratio > 1.2)).mean()) if len(d) else float("nan")
    sums = np.bincount(found.trace.row_of_token, np.where(found.keep, found.trainer - found.rollout, 0.0), len(found.trace))
    weights = np.exp(sums - sums.max()) if len(sums) else np.ones(1)
    ess = float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
    says = (f"{outside:.1%} of the tokens have a ratio outside [0.8, 1.2] before any update, so a clip of 0.2 acts on them; "
            f"the products over sequences keep {ess:.0%} of the sample size")  # fmt: skip
    return {
        "ratio_outside_0.2": _figure(outside, "share of tokens", len(d)),
        "ess_sequence": _figure(ess, "share of sequences", len(sums)), "says": says,
    }  # fmt: skip


def _correction(found: "Findings", verdict: str, left: float) -> dict[str, Any]:
    if verdict == "clean":
        return {"method": None, "says": "none: nothing above the floor is left to correct"}
    if verdict == "inconclusive":
        return {"method": None, "says": "none is advised before the diagnosis is conclusive"}
    if found.interventions and left < 0.05:
        return {
            "method": None,
            "says": "fix the causes first; what is left after them is at the floor and needs no correction",
        }
    return {
        "method": "token-tis(2)",
        "says": "until the cause is fixed, truncate token weights at 2 (TIS); it bounds the variance and leaves the bias and the cause",
    }  # fmt: skip


def _unchecked(found: "Findings", unknown: bool) -> list[Mapping[str, str]]:
    trace, out = found.trace, []

    def note(what: str, why: str, next: str) -> None:
        out.append({"what": what, "why": why, "next": next})

    if not found.with_model:
        note("sampling, weights, template and numerics causes", "no model was given", "run again with --model DIR")
    else:
        clean = found.sides[0].gap.counterfactual
        if not any(name.startswith("older:") for name in clean.scorers):
            note("weights.stale", "no older checkpoint was given", "run again with --older DIR")
        if clean.facts.bos_id is None:
            note("template.bos", "the tokenizer names no BOS token", "give a model directory with its tokenizer files")
    if not trace.has("old_logp"):
        note(
            "the trainer side",
            "old_logp is not recorded: the clean fp32 scorer stood for the trainer",
            "record old_logp",
        )
    if not trace.has("prefill_logp"):
        note("decode against prefill in the engine", "prefill_logp is not recorded", "record with --prefill")
    for side in found.sides:
        if side.unrelated:
            note(
                f"causes on the {side.gap.side} side",
                f"its probabilities correlate {side.correlation:.2f} with this model's",
                "check checkpoint, tokenizer, prompt_ids and response_ids",
            )
        if side.floor.declared is None:
            key = "source.dtype" if side.gap.side != "trainer" else "trainer.dtype"
            note(
                f"{side.gap.side} dtype",
                f"{key} is not declared; {side.floor.dtype} is inferred from the noise",
                f"record {key}",
            )
    if unknown:
        note("the rest of the gap", "no cause that could be tested reproduces it",
             "give --older DIR, record prefill_logp and routed_experts, or look at the worst tokens in the report")  # fmt: skip
    return out


def _ladder(found: "Findings") -> tuple[Mapping[str, Any], ...]:
    trace = found.trace
    steps: list[tuple[str, str, np.ndarray]] = [("decode", "rollout_logp", found.rollout)]
    if trace.has("prefill_logp"):
        steps.append(("prefill", "prefill_logp", trace.tokens("prefill_logp").astype(np.float64)))
    if trace.has("old_logp"):
        steps.append(("trainer", "old_logp", found.trainer))
    if found.with_model:
        steps.append(("fp32", "clean scorer", found.sides[0].gap.clean))
    out = []
    for (a, _, x), (b, name, y) in zip(steps, steps[1:], strict=False):
        use = found.keep & np.isfinite(y - x)
        d, scale = (y - x)[use], found.noise_scale[use]
        out.append({"step": f"{a} → {b}", "against": name, "mean_abs": float(np.abs(d).mean()) if len(d) else None,
                    "logit_noise": logit_noise(d, scale), "n": len(d)})  # fmt: skip
    return tuple(out)


def _figure(value: float, unit: str, n: int | None) -> dict[str, Any]:
    return {"value": value, "interval": None, "unit": unit, "n": n}


def _rounded(intervention: Intervention) -> dict[str, Any]:
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in intervention.parameters.items()}


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _float(value: Any) -> float:
    return round(float(value), 6)
