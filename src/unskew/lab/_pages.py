"""A page of the documentation for each cause, made from its class, with a figure of what it does to the log-ratio."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from html import escape
from math import ceil, floor, log10
from pathlib import Path

import numpy as np

from unskew.causes import CAUSES, Cause
from unskew.lab._faults import LabModel, Planted, lab_model, plant
from unskew.report._svg import Axis, Plot, log_marks, ticks
from unskew.report._words import number, sentence, short

__all__ = ["cause_figure", "cause_page", "index_page", "write_pages"]

_SEQUENCES, _DOTS = 48, 400
_POSITIONS, _FEW = 100, 3
_PARAMETERS = 4
_HIDDEN = 2.0
"""Below this many times the clean run's mean |d| a fault does not show in d."""

_UNITS = {0: "nat", 3: "10⁻³ nat", 6: "10⁻⁶ nat"}
_KINDS = {
    "reproduced": "re-scoring with it closes the gap",
    "matched": "the gap has its size and shape",
    "lint": "read from the record",
}

_STYLE = (
    "svg{overflow:visible;--ink:#1b2330;--soft:#566171;--line:#dfe3e9;--page:#fdfdfc;--hit:#1f5f9e;--bare:#98a1ad}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e4e8ee;--soft:#9ba6b5;--line:#2f3742;--page:#12161b;--hit:#83b7ea;--bare:#6d7785}}"
    'text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;fill:var(--soft);'
    "font-variant-numeric:tabular-nums}.name,.head{fill:var(--ink)}.head{font-size:17px;font-weight:600}"
    ".page{fill:var(--page);stroke:var(--line)}.grid{stroke:var(--line)}.axis{stroke:var(--soft)}"
    "polyline{fill:none;stroke-width:2.2;stroke-linejoin:round}.hit{stroke:var(--hit)}.bare{stroke:var(--bare)}"
    ".hits{marker:url(#hit)}.bares{marker:url(#bare)}circle.hit{fill:var(--hit);fill-opacity:.6;stroke:none}"
    "circle.bare{fill:var(--bare);stroke:none}"
)
_MARKERS = "".join(
    f'<marker id="{name}" markerUnits="userSpaceOnUse" markerWidth="6" markerHeight="6" refX="3" refY="3">'
    f'<circle class="{name}" cx="3" cy="3" r="2.4"/></marker>'
    for name in ("hit", "bare")
)


def cause_page(cause: Cause) -> str:
    """The Markdown page of a cause: what it says, what shows, refutes and fixes it, and how to see it happen."""
    facts = {
        "side": ", ".join(sorted(cause.sides)),
        "kind": f"{cause.kind}: {_KINDS[cause.kind]}",
        "severity": cause.severity,
        "needs a model": "yes" if cause.needs_model else "no",
        "fitted parameter": f"`{cause.parameter}`" if cause.parameter else "–",
    }
    parts = [
        f"# {cause.id}",
        _prose(cause.says),
        "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in facts.items())]),
        f"## What shows it\n\n{_prose(cause.screens_on)}",
        f"## What would refute it\n\n{_prose(cause.refute)}",
        f"## Fix\n\n{_prose(cause.remedy)}",
        f"## Settings\n\n{_settings(cause)}",
        f"## See it happen\n\n{_example(cause)}",
        _made_from(f"`{type(cause).__name__}` in `{type(cause).__module__}`"),
    ]
    return "\n\n".join(parts) + "\n"


def index_page() -> str:
    """The Markdown tables of all causes, one a family."""
    parts = ["# Causes", f"What `unskew diagnose` can name: {len(CAUSES)} causes. {_made_from('`unskew.causes.CAUSES`')}"]
    for family in dict.fromkeys(map(_family, CAUSES.values())):
        rows = [
            f"| [{cause.id}]({cause.id}.md) | {_cell(cause.says)} | {cause.kind} |"
            for cause in CAUSES.values()
            if _family(cause) == family
        ]
        parts.append("\n".join([f"## {family}\n", "| cause | what is wrong | kind |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def cause_figure(cause: Cause, seed: int = 0) -> str:
    """An SVG of a planted run beside a clean one of the same seed: d against the rollout log-prob, |d| along the response.

    Raises:
        UnskewError: the lab cannot plant this cause.
    """
    planted = plant(cause.id, seed=seed, n=_SEQUENCES)
    hit, bare = _run(planted), _clean(planted.model, seed)
    shown = [f"{name} = {short(number(value), 30)}" for name, value in planted.causes[cause.id].items()]
    parameters = ", ".join(shown[:_PARAMETERS]) + ", …" * (len(shown) > _PARAMETERS)
    words = _caption(hit, bare)
    height = 400 + 22 * len(words)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1080 {height}" role="img">',
        f"<title>{escape(f'{cause.id}: ' + ' '.join(words))}</title><style>{_STYLE}</style><defs>{_MARKERS}</defs>",
        f'<rect class="page" x=".5" y=".5" width="1079" height="{height - 1}" rx="8"/>',
        f'<text x="24" y="34"><tspan class="head">{escape(cause.id)}</tspan><tspan dx="14">{escape(parameters)}</tspan></text>',
        '<circle class="hit" cx="784" cy="29" r="4"/><text x="796" y="34">planted</text>',
        '<circle class="bare" cx="872" cy="29" r="4"/><text x="884" y="34">clean run, same seed</text>',
        *(_placed(plot, x) for x, plot in ((34, _by_logp(hit, bare)), (562, _by_position(hit, bare)))),
        *(f'<text x="24" y="{398 + 22 * k}">{escape(line)}</text>' for k, line in enumerate(words)),
        "</svg>\n",
    ]
    return "".join(parts)


def write_pages(out: Path, *, progress: Callable[[str], object] = lambda _: None) -> None:
    """Write the index, the page of every cause and, into `figures/`, the figure of each that the lab can plant."""
    (out / "figures").mkdir(parents=True, exist_ok=True)
    (out / "index.md").write_text(index_page(), encoding="utf-8")
    for cause in CAUSES.values():
        (out / f"{cause.id}.md").write_text(cause_page(cause), encoding="utf-8")
        if cause.planted:
            (out / "figures" / f"{cause.id}.svg").write_text(cause_figure(cause), encoding="utf-8")
        progress(cause.id)


def _family(cause: Cause) -> str:
    return cause.id.split(".")[0]


def _made_from(source: str) -> str:
    return f"Made from {source} by `unskew lab pages -o docs/causes`."


def _settings(cause: Cause) -> str:
    links = (f"- [{name}](../settings.md#{re.sub(r'[^a-z0-9_-]', '', name)})" for name in cause.settings)
    return "\n".join(links) or "No setting of a framework is known to fix it."


def _example(cause: Cause) -> str:
    if not cause.planted:
        return "The lab cannot plant this cause, so there is no figure."
    model = lab_model(cause.plants_in)
    drawn = cause.intervene(**cause.draw(np.random.default_rng([0, 0])))
    options = [("--model", model.path)]
    options += [("--older", path) for path in model.older if "older" in drawn.scorer]
    options += [("--adapter", model.adapter)] if model.adapter else []
    given = " ".join(f"{option} $LAB/{Path(path).name}" for option, path in options)
    return "\n".join([
        "```sh",
        "LAB=$(python -c 'from unskew.lab import model_path; print(model_path(\"dense\").parent)')",
        f"unskew lab fault {cause.id} -o trace.jsonl",
        f"unskew diagnose trace.jsonl {given}",
        "```",
        "",
        f"Planted on the {cause.planted} side, seed 0:",
        "",
        f"![Log-ratio of each token against its rollout log-prob, and mean |d| by position, with and without {cause.id}]"
        f"(figures/{cause.id}.svg)",
        "",
        f"Left: d = old_logp − rollout_logp of {_DOTS} tokens, evenly spaced in order of rollout log-prob. Right: mean |d| by position",
        "in the response, where at least three tokens are; the line breaks where d is exactly 0. Grey: the same seed without the fault.",
    ])  # fmt: skip


def _text(text: str) -> str:
    """Text as Markdown that shows it as it is."""
    safe = re.sub(r"[&<>~]", lambda found: f"&#{ord(found[0])};", text)
    return re.sub(r"[\\`*\[\]]|(?<!\w)_|_(?!\w)", lambda found: f"\\{found[0]}", safe)


def _cell(text: str) -> str:
    """Text as Markdown inside a table."""
    return _text(text).replace("|", "\\|")


def _prose(text: str) -> str:
    return sentence(_text(text))


@dataclass(frozen=True, eq=False, slots=True)
class _Run:
    """Tokens of the loss with a finite log-ratio: d, rollout log-prob, position, all (n,); how many lack one; responses."""

    d: np.ndarray
    rollout: np.ndarray
    position: np.ndarray
    lost: int
    rows: int

    @property
    def mean_abs(self) -> float:
        return float(np.abs(self.d).mean()) if len(self.d) else float("nan")


def _run(planted: Planted) -> _Run:
    trace = planted.trace
    rollout, old = (trace.tokens(name).astype(np.float64) for name in ("rollout_logp", "old_logp"))
    keep = trace.mask & np.isfinite(rollout) & np.isfinite(old)
    lost = int(trace.mask.sum() - keep.sum())
    return _Run((old - rollout)[keep], rollout[keep], trace.position[keep], lost, len(trace))


@cache
def _clean(model: LabModel, seed: int) -> _Run:
    return _run(plant(None, seed=seed, n=_SEQUENCES, model=model))


def _caption(hit: _Run, bare: _Run) -> list[str]:
    """Lines under a figure: of what it is, and what it does not show."""
    largest = float(np.abs(hit.d).max(initial=0.0))
    lines = [
        f"{len(hit.d):,} tokens of the loss in {hit.rows} responses: mean |d| {number(hit.mean_abs, 2)} nat, "
        f"largest {number(largest, 2)} nat; in the clean run, mean {number(bare.mean_abs, 2)} nat."
    ]
    if hit.lost:
        lines.append(f"{hit.lost:,} more tokens have no finite d and are not drawn.")
    if hit.mean_abs < _HIDDEN * bare.mean_abs:
        lines.append("The fault does not show in d.")
    return lines


def _placed(plot: Plot, x: int) -> str:
    return plot.svg().replace("<svg ", f'<svg x="{x}" y="62" width="500" height="300" ', 1)


def _by_logp(hit: _Run, bare: _Run) -> Plot:
    shown = [_dots(bare), _dots(hit)]
    xs, ds = (np.concatenate(parts) for parts in zip(*shown, strict=True))
    reach = max(float(np.abs(ds).max(initial=0.0)), 1e-9)
    scale, unit = next((10.0**k, name) for k, name in _UNITS.items() if reach * 10.0**k >= 0.02 or k == 6)
    low, high = _padded(min(float(ds.min(initial=0.0)), 0.0), max(float(ds.max(initial=0.0)), 0.0))
    left, right = _padded(float(xs.min(initial=-1.0)), float(xs.max(initial=0.0)))
    marks = tuple((t, number(t)) for t in ticks(low * scale, high * scale))
    plot = Plot(
        "Log-ratio of each token against its rollout log-prob",
        Axis("rollout log-prob (nat)", left, right),
        Axis(f"log-ratio d ({unit})", low * scale, high * scale, marks),
    )
    for (x, d), kind in zip(shown, ("bares", "hits"), strict=True):
        plot.line(x.tolist(), (d * scale).tolist(), kind)
    return plot


def _dots(run: _Run) -> tuple[np.ndarray, np.ndarray]:
    """Rollout log-prob and d of tokens evenly spaced in order of rollout log-prob."""
    order, count = np.argsort(run.rollout, kind="stable"), min(len(run.d), _DOTS)
    some = order[((np.arange(count) + 0.5) * len(order) / max(count, 1)).astype(int)]
    return run.rollout[some], run.d[some]


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or 1e-6
    return low - room, high + room


def _by_position(hit: _Run, bare: _Run) -> Plot:
    width = ceil((max(int(run.position.max(initial=0)) for run in (hit, bare)) + 1) / _POSITIONS)
    lines = [_means(run, width) for run in (bare, hit)]
    last = max(float(xs.max(initial=0.0)) for xs, _ in lines) + width
    sizes = np.concatenate([size for _, size in lines])
    positive = sizes[sizes > 0]
    top = ceil(log10(positive.max())) if len(positive) else 0
    bottom = floor(log10(positive.min())) if len(positive) else -2
    plot = Plot(
        "Mean absolute log-ratio by position in the response",
        Axis("position in the response (token)", 0, last),
        Axis("mean |d| (nat)", bottom, max(top, bottom + 1), log_marks(bottom, max(top, bottom + 1))),
    )
    for (xs, size), kind in zip(lines, ("bare", "hit"), strict=True):
        with np.errstate(divide="ignore"):
            plot.line(xs.tolist(), np.log10(size).tolist(), kind)
    return plot


def _means(run: _Run, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Middle and mean |d| of the bins of `width` positions; those with fewer than three tokens are NaN, or left out at the end."""
    label = run.position // width
    count, total = np.bincount(label), np.bincount(label, np.abs(run.d))
    end = int(np.flatnonzero(count >= _FEW).max(initial=-1)) + 1
    size = np.where(count >= _FEW, total / np.maximum(count, 1), np.nan)[:end]
    return (np.arange(end) + 0.5) * width, size
