"""Plots as inline SVG: axes with round ticks, lines, bands, bars, points. Colours come from classes of the page's CSS."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

from unskew.report._words import finite, number, percent, visible

__all__ = ["Axis", "Plot", "gauge", "log_marks", "share_bar", "ticks"]

WIDTH, HEIGHT = 500, 300
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 40, 44

Mark = tuple[float, str]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers from `low` to `high`.

    Example:
        >>> ticks(0, 10)
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(count - 1, 1)
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    return [float(f"{k * step:.12g}") for k in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def log_marks(low: int, high: int, at_most: int = 6) -> tuple[Mark, ...]:
    """Marks at whole powers of ten, evenly spaced from the highest down.

    Example:
        >>> log_marks(-3, 0)
        ((-3.0, '0.001'), (-2.0, '0.01'), (-1.0, '0.1'), (0.0, '1'))
    """
    step = max(1, ceil((high - low + 1) / at_most))
    return tuple((float(k), power(k)) for k in range(high - (high - low) // step * step, high + 1, step))


def power(exponent: int) -> str:
    """10 to a whole power: "0.001", "10⁻⁶", "1,000"."""
    return number(10.0**exponent).split("\N{NO-BREAK SPACE}")[-1] if exponent < 0 else f"{10**exponent:,}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: what it shows, in which unit, and its range; `marks` overrides ticks as (position, label)."""

    title: str
    low: float
    high: float
    marks: tuple[Mark, ...] = ()

    def at(self, value: float) -> float:
        """Fraction of the way along the axis, clipped to [0, 1]."""
        span = self.high - self.low
        return min(max((value - self.low) / span, 0.0), 1.0) if span > 0 else 0.0

    def labelled(self, count: int) -> tuple[Mark, ...]:
        """Its marks, or about `count` round ones."""
        return self.marks or tuple((t, number(t)) for t in ticks(self.low, self.high, count))


class Plot:
    """Collects shapes in data coordinates and writes one `<svg>`; `legend` lists (CSS class, label) of what has a label."""

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self._title, self._x, self._y = title, x, y
        self._shapes: list[str] = []
        self.legend: list[tuple[str, str]] = []

    def line(self, xs: Sequence[float], ys: Sequence[float], kind: str = "line", label: str = "") -> None:
        """A line through the points; points that are not finite break it."""
        run: list[str] = []
        for x, y in [*zip(xs, ys, strict=True), (0.0, float("nan"))]:
            if isfinite(y):
                run.append(self._point(x, y))
            elif run:
                self._shapes.append(f'<polyline class="{kind}" points="{" ".join(run)}"/>')
                run = []
        self._name(kind, label)

    def band(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], kind: str = "band", label: str = "") -> None:
        """The area between two lines."""
        up = [self._point(x, y) for x, y in zip(xs, high, strict=True)]
        down = [self._point(x, y) for x, y in zip(reversed(xs), reversed(low), strict=True)]
        self._shapes.append(f'<polygon class="{kind}" points="{" ".join(up + down)}"/>')
        self._name(kind, label)

    def bars(self, edges: Sequence[float], heights: Sequence[float], kinds: Sequence[str]) -> None:
        """Bars between consecutive edges, those at the axis left out."""
        for low, high, height, kind in zip(edges[:-1], edges[1:], heights, kinds, strict=True):
            if height > self._y.low:
                x, y = self._px(low), self._py(height)
                size = f'width="{max(self._px(high) - x - 0.7, 0.7):.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
                self._shapes.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" {size}/>')

    def points(self, xs: Sequence[float], ys: Sequence[float], labels: Sequence[str] = (), kind: str = "dot") -> None:
        """A dot a pair that is finite; `labels` become tooltips."""
        for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if isfinite(y):
                tip = f"<title>{_text(labels[k])}</title>" if labels else ""
                self._shapes.append(
                    f'<circle class="{kind}" cx="{self._px(x):.1f}" cy="{self._py(y):.1f}" r="2.6">{tip}</circle>'
                )

    def upright(self, x: float, text: str) -> None:
        """A vertical dashed line with words at its top."""
        at = self._px(x)
        self._shapes.append(
            f'<line class="rule" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="note" x="{at:.1f}" y="{TOP - 4}" text-anchor="middle">{_text(text)}</text>'
        )

    def svg(self) -> str:
        """The picture."""
        base, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{_text(self._title)}</title>']
        for value, label in self._y.labelled(5):
            y = self._py(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_text(label)}</text>')
        for value, label in self._x.labelled(6):
            x = self._px(value)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 17}" text-anchor="middle">{_text(label)}</text>')
        parts.append(
            f'<text class="name" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 7}" text-anchor="middle">{_text(self._x.title)}</text>'
        )
        parts.append(f'<text class="name" x="2" y="13">{_text(self._y.title)}</text>')
        axis = f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{base}" y2="{base}"/>'
        return "".join([*parts, *self._shapes, axis, "</svg>"])

    def _name(self, kind: str, label: str) -> None:
        if label:
            self.legend.append((kind, label))

    def _point(self, x: float, y: float) -> str:
        return f"{self._px(x):.1f},{self._py(y):.1f}"

    def _px(self, value: float) -> float:
        return LEFT + self._x.at(value) * (WIDTH - LEFT - RIGHT)

    def _py(self, value: float) -> float:
        return HEIGHT - BOTTOM - self._y.at(value) * (HEIGHT - TOP - BOTTOM)


def share_bar(share: float, bounds: Sequence[float] | None) -> str:
    """A share of 1 as a bar, with its interval as a whisker."""
    bounds = bounds if bounds and all(map(finite, bounds)) else None
    low, high = (min(max(float(v), 0.0), 1.0) * 240 for v in (bounds or (share, share)))
    whisker = f'<path class="whisker" d="M{low:.1f} 3V15M{low:.1f} 9H{high:.1f}M{high:.1f} 3V15"/>' if bounds else ""
    words = f"{percent(share)} explained" + (f", 95 % interval {percent(bounds[0])} to {percent(bounds[1])}" if bounds else "")
    return (
        f'<svg class="share" viewBox="-2 0 244 18" role="img"><title>{_text(words)}</title>'
        f'<rect class="track" x="0" y="5" width="240" height="8" rx="2"/>'
        f'<rect class="bar" x="0" y="5" width="{min(max(share, 0.0), 1.0) * 240:.1f}" height="8" rx="2"/>{whisker}</svg>'
    )


def gauge(value: float, floor_value: float, above: float) -> str:
    """A noise against its floor on a logarithmic scale: what counts as at the floor is shaded."""
    low = log10(min(value, floor_value)) - 0.6 if value > 0 else log10(floor_value) - 2
    high = log10(max(value, floor_value * above)) + 0.6
    width, left = 640, 4

    def at(x: float) -> float:
        return left + min(max((log10(max(x, 1e-300)) - low) / (high - low), 0.0), 1.0) * (width - 2 * left)

    words = (
        f"σ̂ of the gap {number(value)} nat, floor {number(floor_value)} nat, at the floor up to {number(floor_value * above)} nat"
    )
    anchor = "end" if at(value) > width * 0.7 else "start" if at(value) < width * 0.3 else "middle"
    return (
        f'<svg class="gauge" viewBox="0 0 {width} 64" role="img"><title>{_text(words)}</title>'
        f'<rect class="track" x="{left}" y="28" width="{width - 2 * left}" height="10" rx="5"/>'
        f'<rect class="zone" x="{left}" y="28" width="{at(floor_value * above) - left:.1f}" height="10" rx="5"/>'
        f'<line class="axis" x1="{at(floor_value):.1f}" x2="{at(floor_value):.1f}" y1="25" y2="41"/>'
        f'<text class="tick" x="{at(floor_value):.1f}" y="58" text-anchor="middle">floor {_text(number(floor_value, 2))} nat</text>'
        f'<circle class="mark" cx="{at(value):.1f}" cy="33" r="7"/>'
        f'<text class="name" x="{at(value):.1f}" y="17" text-anchor="{anchor}">gap {_text(number(value, 2))} nat</text></svg>'
    )


def _text(text: str) -> str:
    return escape(visible(text), quote=True)
