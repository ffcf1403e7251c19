"""A verdict as Markdown, for a comment on a pull request."""

import re
from collections.abc import Mapping
from typing import Any

from unskew.report._figures import figures, rows_of_numbers
from unskew.report._wire import by_framework, complete_measurement, complete_verdict
from unskew.report._words import finite, interval, number, percent, sentence, visible

__all__ = ["markdown"]

_ICONS = {"clean": "✅ Clean", "mismatch": "❌ Mismatch", "inconclusive": "❔ Inconclusive"}


def markdown(verdict: Mapping[str, Any] | None, measurement: Mapping[str, Any] | None) -> str:
    """Verdict, numbers, causes with their fixes, and what was not checked, in GitHub's Markdown.

    Text from the trace cannot become markup, a mention or a link to an issue.

    Args:
        verdict: `Verdict.to_dict()`, or None: only numbers are given.
        measurement: `Measurement.to_dict()`, for what the verdict does not hold; or None.

    Example:
        >>> print(markdown(None, None))
        ### Not diagnosed
        <BLANKLINE>
        Run `unskew diagnose TRACE --model DIR`.
        <BLANKLINE>
    """
    verdict, measurement = complete_verdict(verdict), complete_measurement(measurement)
    known = figures(measurement, verdict)
    floor = verdict["floor"]["logit_noise"]["value"] if verdict else None
    table = _table(
        rows_of_numbers(known, {"mean_ratio": 1.0, "calibration": 0.0} | ({"logit_noise": floor} if finite(floor) else {}))
    )
    if verdict is None:
        return "\n\n".join(["### Not diagnosed", "Run `unskew diagnose TRACE --model DIR`.", *table]) + "\n"
    parts = [f"### {_ICONS.get(verdict['verdict'], 'Not diagnosed')}", _safe(sentence(verdict["summary"])), *table]
    for rank, cause in enumerate(verdict["causes"], start=1):
        parts += _cause(rank, cause)
    left = verdict["unexplained"]
    rest = f"**Unexplained:** {percent(left)}{' of the gap' if left is not None else ''}."
    correction = verdict["correction"]["says"]
    parts.append(rest + (f" **Correction for the rest:** {_safe(sentence(correction))}" if correction else ""))
    unchecked = [f"- {_safe(u['what'])}: {_safe(u['why'])}. To decide it: {_safe(u['next'])}." for u in verdict["unchecked"]]
    if unchecked:
        parts += ["<details><summary>Not checked</summary>", "\n".join(unchecked), "</details>"]
    parts.append(
        f"<sub>{number(verdict['n_used'])} sequences used, {number(verdict['n_excluded'])} excluded. d = old_logp − rollout_logp, nats, raw.</sub>"
    )
    return "\n\n".join(parts) + "\n"


def _table(rows: list[dict[str, str]]) -> list[str]:
    if not rows:
        return []
    lines = ["| figure | value | 95 % interval | at the floor | n |", "| --- | ---: | --- | --- | ---: |"]
    lines += [
        f"| {r['label']} | {_safe(r['value'])} {r['unit']} | {r['interval']} | {r['floor'] if r['floor'] != 'not known' else '–'} | {r['n']} |"
        for r in rows
    ]
    return ["\n".join(lines).replace("|d|", "\\|d\\|")]


def _cause(rank: int, cause: Mapping[str, Any]) -> list[str]:
    parameters = ", ".join(f"{_safe(k)} = {_safe(number(v))}" for k, v in cause["parameters"].items())
    share = "" if cause["explained"] is None else f", explains {percent(cause['explained'])} of the {_safe(cause['of'])}"
    if share and cause["interval"]:
        share += f" ({interval(cause['interval'], percent)})"
    head = f"**{rank}. `{_code(cause['id'])}`**{f' ({parameters})' if parameters else ''} — {_safe(cause['severity'])}, {_safe(cause['side'])} side, {_safe(cause['kind'])}{share}"
    out = [head, _safe(sentence(cause["says"]))]
    out += ["\n".join(f"- {_safe(sentence(e['says']))}" for e in cause["evidence"])] if cause["evidence"] else []
    fix = cause["fix"]
    if fix["says"] and cause["severity"] != "info":
        out.append(f"**Fix:** {_safe(sentence(fix['says']))}")
        for name, pairs in by_framework(fix).items():
            blocks = [f"{_fence(text)}{_code(language)}\n{visible(text)}\n{_fence(text)}" for language, text in pairs]
            out += [f"<details><summary>{_safe(name)}</summary>", *blocks, "</details>"]
        if cause["refute"]:
            out.append(f"Refuted if {_safe(cause['refute'])}.")
    return out


def _safe(text: Any) -> str:
    """Text as Markdown that shows it as it is: markup off, no mention, no link, one line."""
    line = " ".join(visible(text).split())
    return re.sub(r"([\\`*_\[\]<>|~#@&!])", lambda m: f"&#{ord(m[0])};" if m[0] in "<>@#&" else f"\\{m[0]}", line).replace(
        "://", ":&#47;/"
    )


def _code(text: Any) -> str:
    return re.sub(r"[`\n|]", " ", visible(text))


def _fence(text: str) -> str:
    return "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
