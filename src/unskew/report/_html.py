"""One self-contained HTML page: verdict first, then numbers, causes, what is left, plots, worst tokens, environment."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from unskew import __version__
from unskew.report._figures import figures, rows_of_numbers
from unskew.report._floor import expected, noise_floor
from unskew.report._plots import plots
from unskew.report._svg import gauge, share_bar
from unskew.report._tokens import heat_steps, token_text, worst_passages
from unskew.report._wire import by_framework, complete_measurement, complete_verdict
from unskew.report._words import finite, interval, number, percent, plain_json, sentence, short, signed, visible
from unskew.trace import Trace

__all__ = ["render"]

_MAX_ROWS = 4000
_MAX_SLICES = 24
_KINDS = {
    "reproduced": "re-scoring with it closes the gap",
    "matched": "the gap has its size and shape",
    "lint": "read from the record",
}


def render(
    trace: Trace, measurement: Mapping[str, Any] | None, verdict: Mapping[str, Any] | None, *, title: str,
    tokenizer_texts: Sequence[str] | None = None,
) -> str:  # fmt: skip
    """The page, the same bytes for the same input.

    It opens from a file, loads nothing, runs no script, and everything from the trace is escaped. Plots are drawn from
    at most 4,000 sequences, evenly spaced, which the page then says.

    Args:
        trace: usable rows; plots and worst tokens need `old_logp`, recorded or filled by a scorer.
        measurement: `Measurement.to_dict()`, or None where there is no `old_logp`.
        verdict: `Verdict.to_dict()`, or None: the page says that nothing was diagnosed.
        title: heading of the page.
        tokenizer_texts: text of each token id; without it, or beyond it, ids are shown.

    Example:
        >>> trace = Trace.from_rows([{"response_ids": [5, 6], "rollout_logp": [-0.5, -1.0], "old_logp": [-0.4, -1.0]}])
        >>> page = render(trace, None, None, title="<run>")
        >>> "&lt;run&gt;" in page, "Not diagnosed" in page
        (True, True)
    """
    data = _embedded({"verdict": verdict, "measurement": measurement})
    verdict, measurement = complete_verdict(verdict), complete_measurement(measurement)
    drawn = trace
    if len(trace) > _MAX_ROWS:
        drawn = trace.select(np.unique(np.linspace(0, len(trace) - 1, _MAX_ROWS).astype(int)))
    floor = noise_floor(drawn, verdict)
    at_floor = expected(floor, drawn.mask, drawn.row_of_token, len(drawn))
    known = figures(measurement, verdict)
    worst = worst_passages(trace, tokenizer_texts)
    folder = files("unskew.report") / "templates"
    style = (folder / "report.css").read_text("utf-8")
    return _environment().from_string((folder / "report.html").read_text("utf-8")).render(
        title=title, version=__version__, verdict=verdict, measurement=measurement, kinds=_KINDS,
        style=Markup(style), style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        numbers=rows_of_numbers(known, at_floor), gauge=_gauge(known, verdict), plots=plots(drawn, floor),
        worst=worst, steps=heat_steps(max(abs(p.d) for p in worst)) if worst else (), has_texts=tokenizer_texts is not None,
        has_old=trace.has("old_logp"), facts=_facts(drawn, trace), slices=_slices(measurement), n_rows=len(trace), n_drawn=len(drawn),
        snippets=by_framework, token=lambda token: _evidence_text(token, tokenizer_texts), data=Markup(data),
    )  # fmt: skip


def _environment() -> Environment:
    def safe(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=safe)
    environment.filters |= {
        "number": number, "percent": percent, "interval": lambda bounds, shares=False: interval(bounds, percent if shares else number),
        "sentence": sentence, "short": short, "signed": signed,
        "share_bar": lambda share, bounds: Markup(share_bar(share, bounds)), "svg": Markup,
    }  # fmt: skip
    environment.tests["finite"] = finite
    return environment


def _embedded(data: Any) -> str:
    """JSON that nothing can end early inside a script element."""
    text = json.dumps(plain_json(data), sort_keys=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _evidence_text(token: Mapping[str, Any], texts: Sequence[str] | None) -> str:
    """The text that the verdict holds, else the tokenizer's, else the id."""
    if token["text"] is not None:
        return token_text(0, [token["text"]])
    return "not known" if token["token_id"] is None else token_text(token["token_id"], texts)


def _gauge(known: Mapping[str, Mapping[str, Any]], verdict: Mapping[str, Any] | None) -> Markup | None:
    floor = verdict["floor"] if verdict else {"logit_noise": {"value": None}, "above": None}
    values = [known.get("logit_noise", {}).get("value"), floor["logit_noise"]["value"], floor["above"]]
    if not all(map(finite, values)) or values[0] < 0 or min(values[1:]) <= 0:
        return None
    return Markup(gauge(*values))


def _slices(measurement: Mapping[str, Any] | None) -> list[tuple[str, list[tuple[str, Mapping[str, Any]]]]]:
    parts = measurement["slices"] if measurement else {}
    return [(kind.replace("_", " "), list(rows.items())[:_MAX_SLICES]) for kind, rows in parts.items() if len(rows) > 1]


def _facts(drawn: Trace, trace: Trace) -> dict[str, list[tuple[str, str]]]:
    """By group, declared settings that the rows share, and how many values the others have."""
    out = {"trace": [("file", PurePath(trace.path).name), ("sequences", f"{len(trace):,}"), ("response tokens", f"{trace.n_tokens:,}"),
                     ("tokens of the loss", f"{int(trace.mask.sum()):,}")]}  # fmt: skip
    for group in ("source", "sampling", "trainer"):
        seen: dict[str, set[str]] = {}
        for record in drawn.rows(group):
            for key, value in (record or {}).items():
                if value is not None:
                    seen.setdefault(key, set()).add(short(value if isinstance(value, str) else json.dumps(value), 120))
        out[group] = [(key, next(iter(v)) if len(v) == 1 else f"{len(v)} different values") for key, v in seen.items()]
    return out
