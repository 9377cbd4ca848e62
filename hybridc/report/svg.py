"""Line charts as SVG: both axes from zero, a grid with labels, a legend above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

BLUE, RED = "#3568c9", "#c22f3d"
_GRID, _TEXT = "#d8dde5", "#3c4553"
_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 56, 56
_LEGEND_WIDTH = 130

Tick = tuple[float, str]
"""A value on an axis, and its label."""


@dataclass(frozen=True, slots=True)
class Line:
    """A series of points; `style` is SVG attributes of its stroke."""

    points: Sequence[tuple[float, float]]
    color: str
    label: str
    style: str = 'stroke-width="2"'
    is_below: bool = False
    """Drawn before lines that are not."""


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A point that stands out; `note` is shown when the pointer is on it."""

    x: float
    y: float
    color: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows. `most_x` and `most_y` are the ends of the axes, above zero."""

    title: str
    x_title: str
    most_x: float
    most_y: float
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[Line]
    """In the order of the legend."""
    dots: Sequence[ChartPoint] = ()

    def to_svg(self) -> str:
        """The picture, ending in a newline."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'font-family="system-ui, sans-serif" font-size="12" fill="{_TEXT}">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="24" font-size="15">{escape(self.title)}</text>',
            *self._grid(),
            *map(self._polyline, sorted(self.lines, key=lambda line: not line.is_below)),
            *map(self._circle, self.dots),
            *self._legend(),
            f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(self.x_title)}</text>',
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _x(self, value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.most_x, 1)

    def _y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * max(value, 0.0) / self.most_y, 1)

    def _grid(self) -> list[str]:
        parts = []
        for value, label in self.x_ticks:
            at = self._x(value)
            parts.append(f'<path d="M{at} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{_GRID}"/>')
            parts.append(f'<text x="{at}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{label}</text>')
        for value, label in self.y_ticks:
            at = self._y(value)
            parts.append(f'<path d="M{_LEFT} {at}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{label}</text>')
        return parts

    def _polyline(self, line: Line) -> str:
        points = " ".join(f"{self._x(x)},{self._y(y)}" for x, y in line.points)
        return f'<polyline points="{points}" fill="none" stroke="{line.color}" {line.style}/>'

    def _circle(self, dot: ChartPoint) -> str:
        circle = f'<circle cx="{self._x(dot.x)}" cy="{self._y(dot.y)}" r="3.5" fill="{dot.color}"'
        return f"{circle}><title>{escape(dot.note)}</title></circle>" if dot.note else f"{circle}/>"

    def _legend(self) -> list[str]:
        parts = []
        for number, line in enumerate(self.lines):
            left = _LEFT + _LEGEND_WIDTH * number
            parts.append(f'<path d="M{left} 42h24" stroke="{line.color}" {line.style}/>')
            parts.append(f'<text x="{left + 30}" y="46">{escape(line.label)}</text>')
        return parts
