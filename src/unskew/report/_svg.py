"""Plots as inline SVG: axes with round ticks, lines, bands, bars, points. Colours are CSS variables of the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10

__all__ = ["Axis", "Plot", "ticks"]

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44


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
    first = int(-(-low // step)) if low >= 0 else -int(-low // step)
    return [round(k * step, 12) for k in range(first, int(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: what it shows, in which unit, and its range; `marks` overrides ticks as (position, label)."""

    title: str
    low: float
    high: float
    marks: tuple[tuple[float, str], ...] = ()

    def at(self, value: float) -> float:
        """Fraction of the way along the axis, clipped to [0, 1]."""
        span = self.high - self.low
        return min(max((value - self.low) / span, 0.0), 1.0) if span > 0 and isfinite(value) else 0.0


class Plot:
    """Collects shapes in data coordinates and writes one `<svg>` with a title for readers that do not see it."""

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        self._title, self._x, self._y = title, x, y
        self._shapes: list[str] = []

    def line(self, xs: Sequence[float], ys: Sequence[float], kind: str = "line") -> None:
        """A line through the points."""
        points = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in zip(xs, ys, strict=True) if isfinite(y))
        self._shapes.append(f'<polyline class="{kind}" points="{points}"/>')

    def band(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], kind: str = "band") -> None:
        """The area between two lines."""
        up = [f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in zip(xs, high, strict=True)]
        down = [f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in zip(reversed(xs), reversed(low), strict=True)]
        self._shapes.append(f'<polygon class="{kind}" points="{" ".join(up + down)}"/>')

    def bars(self, edges: Sequence[float], heights: Sequence[float], kinds: Sequence[str]) -> None:
        """Bars between consecutive edges; those of height 0 are left out."""
        for low, high, height, kind in zip(edges[:-1], edges[1:], heights, kinds, strict=True):
            if height > self._y.low:
                x, y = self._px(low), self._py(height)
                width = max(self._px(high) - x - 0.6, 0.6)
                self._shapes.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{self._py(self._y.low) - y:.1f}"/>'
                )

    def points(self, xs: Sequence[float], ys: Sequence[float], labels: Sequence[str] = ()) -> None:
        """A dot a pair; `labels` become tooltips."""
        for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
            tip = f"<title>{escape(labels[k])}</title>" if labels else ""
            self._shapes.append(f'<circle class="dot" cx="{self._px(x):.1f}" cy="{self._py(y):.1f}" r="3">{tip}</circle>')

    def rule(self, y: float, text: str) -> None:
        """A horizontal line with words at its right end."""
        at = self._py(y)
        self._shapes.append(
            f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="note" x="{WIDTH - RIGHT - 4}" y="{at - 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """The picture."""
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self._title, quote=True)}">',
            f"<title>{escape(self._title)}</title>",
        ]
        for value, label in self._y.marks or [(t, f"{t:g}") for t in ticks(self._y.low, self._y.high, 5)]:
            y = self._py(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        base = HEIGHT - BOTTOM
        for value, label in self._x.marks or [(t, f"{t:g}") for t in ticks(self._x.low, self._x.high, 7)]:
            x = self._px(value)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 17}" text-anchor="middle">{escape(label)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        middle = (TOP + base) / 2
        parts.append(
            f'<text class="title" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self._x.title)}</text>'
        )
        parts.append(
            f'<text class="title" x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">{escape(self._y.title)}</text>'
        )
        return "".join([*parts, *self._shapes, "</svg>"])

    def _px(self, value: float) -> float:
        return LEFT + self._x.at(value) * (WIDTH - LEFT - RIGHT)

    def _py(self, value: float) -> float:
        return HEIGHT - BOTTOM - self._y.at(value) * (HEIGHT - TOP - BOTTOM)
