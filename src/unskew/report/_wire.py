"""A verdict or a measurement as read from JSON, with every key that a report looks at."""

from collections.abc import Mapping
from typing import Any

__all__ = ["by_framework", "complete_measurement", "complete_verdict"]

_VERDICT: Mapping[str, Any] = {
    "verdict": "", "summary": "", "causes": (), "floor": {}, "gap": {}, "matters": {}, "unexplained": None, "correction": {},
    "unchecked": (), "ladder": (), "n_used": None, "n_excluded": None,
}  # fmt: skip
_CAUSE: Mapping[str, Any] = {
    "id": "unnamed", "side": "unknown", "severity": "info", "kind": "", "says": "", "explained": None, "of": "gap", "interval": None,
    "class": (), "parameters": {}, "evidence": (), "refute": "", "fix": {},
}  # fmt: skip
_FIX: Mapping[str, Any] = {"says": "", "snippets": ()}
_TOKEN: Mapping[str, Any] = {
    "row": None, "id": None, "position": None, "token_id": None, "text": None, "rollout_logp": None, "trainer_logp": None, "log_ratio": None,
}  # fmt: skip
_STEP: Mapping[str, Any] = {"step": "", "against": "", "mean_abs": None, "logit_noise": None, "n": None}
_SIDE: Mapping[str, Any] = {
    "side": "", "dtype": "", "declared": None, "logit_noise": None, "source": "", "before": None, "left": None,
}  # fmt: skip
_MEASUREMENT: Mapping[str, Any] = {
    "against": None,
    "n_rows": None,
    "n_excluded": None,
    "lint": {},
    "notes": (),
    "overall": {},
    "slices": {},
}


def complete_verdict(verdict: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The verdict with what is missing or null set to "none of it", also inside causes, evidence, ladder and floor.

    Example:
        >>> complete_verdict({"verdict": "clean", "causes": [{"id": "floor.noise"}]})["causes"][0]["severity"]
        'info'
    """
    if verdict is None:
        return None
    out = _fill(_VERDICT, verdict)
    out["causes"] = [_cause(cause) for cause in out["causes"]]
    out["ladder"] = [_fill(_STEP, step) for step in out["ladder"]]
    out["unchecked"] = [_fill({"what": "", "why": "", "next": "not known"}, item) for item in out["unchecked"]]
    out["matters"], out["correction"] = ({"says": "", **out[name]} for name in ("matters", "correction"))
    floor = _fill({"says": "", "sides": (), "logit_noise": {}, "above": None}, out["floor"])
    out["floor"] = {
        **floor,
        "logit_noise": {"value": None, **floor["logit_noise"]},
        "sides": [_fill(_SIDE, s) for s in floor["sides"]],
    }
    return out


def complete_measurement(measurement: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The measurement with what is missing set to "none of it"."""
    return None if measurement is None else _fill(_MEASUREMENT, measurement)


def by_framework(fix: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """(language, snippet) pairs of each framework; of snippets that differ in a trailing remark, the one with it.

    Example:
        >>> by_framework({"snippets": [("trl", "python", "f(1)"), ("trl", "python", "f(1)  # both read it")]})
        {'trl': [('python', 'f(1)  # both read it')]}
    """
    out: dict[str, dict[str, tuple[str, str]]] = {}
    for framework, language, text in fix["snippets"]:
        have, bare = out.setdefault(framework, {}), text.split("  #")[0].rstrip()
        if len(text) > len(have.get(bare, ("", ""))[1]):
            have[bare] = (language, text)
    return {framework: list(have.values()) for framework, have in out.items()}


def _cause(cause: Mapping[str, Any]) -> dict[str, Any]:
    out = _fill(_CAUSE, cause)
    out["fix"] = _fill(_FIX, out["fix"])
    out["evidence"] = [
        {"says": e.get("says") or "", "tokens": [_fill(_TOKEN, token) for token in e.get("tokens") or ()]}
        for e in out["evidence"]
    ]
    return out


def _fill(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults, **{k: v for k, v in given.items() if v is not None}}
