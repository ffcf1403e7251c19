"""One self-contained HTML page: verdict first, then numbers, causes, plots, worst tokens, environment."""

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from unskew import __version__
from unskew.report._plots import plots
from unskew.trace import Trace

__all__ = ["render"]

_NUMBERS = (
    ("logit_noise", "logit noise σ̂"), ("mean_abs", "mean |d|"), ("kl_rollout_old_k3", "KL(rollout ‖ old), k3"), ("mean_ratio", "mean ratio"),
    ("calibration", "calibration C"), ("ess_sequence", "ESS of sequences"), ("khat_token", "k̂ of token ratios"),
)  # fmt: skip
_WORST, _CONTEXT, _MAX_ROWS = 8, 12, 4000


def render(
    trace: Trace, measurement: Mapping[str, Any] | None, verdict: Mapping[str, Any] | None, *, title: str,
    decode: Callable[[int], str] | None = None,
) -> str:  # fmt: skip
    """The page, the same bytes for the same input.

    Args:
        trace: usable rows; plots and worst tokens need `old_logp`.
        measurement: `Measurement.to_dict()`, or None where there is no `old_logp`.
        verdict: `Verdict.to_dict()`, or None: the page says that nothing was diagnosed.
        title: heading of the page.
        decode: token id to text; ids are shown without it.
    """
    if len(trace) > _MAX_ROWS:
        trace = trace.select(np.unique(np.linspace(0, len(trace) - 1, _MAX_ROWS).astype(int)))
    floor = verdict["floor"]["logit_noise"]["value"] if verdict else None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": _number, "percent": lambda value: f"{value:.0%}"}
    folder = files("unskew.report") / "templates"
    template = environment.from_string((folder / "report.html").read_text("utf-8"))
    data = json.dumps({"verdict": verdict, "measurement": measurement}, sort_keys=True, default=str)
    return template.render(
        title=title, version=__version__, verdict=verdict, measurement=measurement, style=(folder / "report.css").read_text("utf-8"),
        numbers=_numbers(measurement, verdict), plots=plots(trace, floor), worst=_worst(trace, decode), facts=_facts(trace),
        n_rows=len(trace),
        # Inside a script element only "<" can end it.
        data=data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    )  # fmt: skip


def _numbers(measurement: Mapping[str, Any] | None, verdict: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    figures = (verdict or {}).get("gap") or (measurement or {}).get("overall") or {}
    out = []
    for name, label in _NUMBERS:
        figure = figures.get(name)
        if figure is not None:
            floor = verdict["floor"]["logit_noise"]["value"] if verdict and name == "logit_noise" else None
            out.append({"label": label, "name": name, "floor": floor, "why": "", **figure})
    return out


def _worst(trace: Trace, decode: Callable[[int], str] | None) -> list[dict[str, Any]]:
    """The tokens with the largest |d|, at most one a sequence, each with its neighbours."""
    if not trace.has("old_logp"):
        return []
    rollout, old = (trace.tokens(name).astype(np.float64) for name in ("rollout_logp", "old_logp"))
    d = np.where(trace.mask & np.isfinite(old - rollout), old - rollout, 0.0)
    ids, names, out, seen = trace.tokens("response_ids"), trace.rows("id"), [], set()
    for token in np.argsort(-np.abs(d), kind="stable")[: 50 * _WORST]:
        row = int(trace.row_of_token[token])
        if row in seen or d[token] == 0:
            continue
        seen.add(row)
        start, stop = int(trace.cu_seqlens[row]), int(trace.cu_seqlens[row + 1])
        around = range(max(start, int(token) - _CONTEXT), min(stop, int(token) + _CONTEXT + 1))
        reach = max(abs(float(d[token])), 1e-12)
        out.append({
            "row": names[row] or f"row {row}", "position": int(token) - start, "d": float(d[token]),
            "rollout": float(rollout[token]), "old": float(old[token]),
            "tokens": [
                {"text": _shown(int(ids[k]), decode), "heat": round(min(abs(float(d[k])) / reach, 1.0), 2), "here": k == token, "d": float(d[k])}
                for k in around
            ],
        })  # fmt: skip
        if len(out) == _WORST:
            break
    return out


def _shown(token: int, decode: Callable[[int], str] | None) -> str:
    if decode is None:
        return f"{token} "
    text = decode(token).replace("\n", "↵").replace("\t", "→")
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text).replace(" ", "·")


def _facts(trace: Trace) -> list[tuple[str, str]]:
    """Declared settings that all rows share, and how many values the others have."""
    out = [("sequences", f"{len(trace):,}"), ("response tokens", f"{trace.n_tokens:,}"), ("read from", trace.path)]
    for group in ("source", "sampling", "trainer"):
        seen: dict[str, set[str]] = {}
        for record in trace.rows(group):
            for key, value in (record or {}).items():
                if value is not None:
                    seen.setdefault(key, set()).add(str(value))
        out += [(f"{group}.{key}", next(iter(v)) if len(v) == 1 else f"{len(v)} values") for key, v in seen.items()]
    return out


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
