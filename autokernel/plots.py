"""Plots as inline SVG, drawn from numbers alone; no torch and no plotting library.

Colours come from the page's style sheet by class, so that a plot is readable in light and dark; what a colour tells,
a shape tells as well. The coordinates are those of a narrow screen, so that text stays legible on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from autokernel.markup import Markup, joined, tag

WIDTH, HEIGHT = 360.0, 232.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 16.0, 40.0
LABEL = 14.0
"""Room that a line of text takes, in height."""

LOG_FROM = 4.0
"""An axis whose values span at least this factor is logarithmic."""

UNTIMED_Y = HEIGHT - BOTTOM - 7
"""Where a mark without a latency stands: on the axis, clear of its numbers."""

SIDE_BY_SIDE = 6
"""Numbers that fit under a logarithmic axis."""

BAR, BAR_LABEL = 24.0, 112.0


def time_text(us: float) -> str:
    """A latency for people, of some four digits: `9.87 us`, `389.5 us`, `25,362 us`."""
    return f"{us:,.0f} us" if us >= 1000 else f"{us:.1f} us" if us >= 10 else f"{us:.3g} us"


class Shape(StrEnum):
    """What a mark stands for; also its class in the style sheet."""

    KEPT = "kept"  # a filled circle
    REJECTED = "rejected"  # a cross
    UNTIMED = "untimed"  # a triangle on the axis: there is no latency
    SUSPICIOUS = "suspicious"  # a hollow diamond
    REFERENCE = "reference"  # a filled square
    BASELINE = "baseline"  # a hollow square


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point of a plot; `y` is None where nothing was measured. `label` is its tooltip."""

    x: float
    y: float | None
    shape: Shape
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line: PyTorch's latency, the roofline's."""

    y: float
    label: str
    class_: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Values from `low` to `high`, put on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """Pixel of a value; one outside is put on the border."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        here = math.log10(max(value, self.low)) if self.log else value
        share = min(1.0, max(0.0, (here - low) / (high - low)))
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values within the axis, some three to ten of them."""
        if not self.log:
            step = _step((self.high - self.low) / 4)
            first = math.ceil(self.low / step)
            return [count * step for count in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if self.high <= 1e3 * self.low else (1,)
        values = [digit * 10.0**decade for decade in decades for digit in digits]
        return [value for value in values if self.low <= value <= self.high * (1 + 1e-9)]


def axis(values: Sequence[float], start: float, end: float, *, log: bool | None = None) -> Axis:
    """An axis with some room around the values, all of them above 0; logarithmic where they span much."""
    low, high = min(values), max(values)
    if log or (log is None and high >= LOG_FROM * low):
        return Axis(low=low / 1.25, high=high * 1.25, start=start, end=end, log=True)
    room = 0.1 * (high - low) or 0.1 * high
    return Axis(low=max(0.0, low - room), high=high + room, start=start, end=end, log=False)


def _step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


def progress_plot(marks: Sequence[Mark], start_us: float, levels: Sequence[Level], title: str) -> Markup:
    """Latency in us over experiments, with the incumbent's as a falling line that begins at `start_us`."""
    timed = [mark.y for mark in marks if mark.y is not None]
    ys = axis([start_us, *timed, *(level.y for level in levels)], HEIGHT - BOTTOM, TOP)
    last = max((mark.x for mark in marks), default=0.0)
    xs = Axis(low=0.0, high=max(last, 1.0) + 0.5, start=LEFT, end=WIDTH - RIGHT, log=False)
    parts = [_grid(ys, "us"), *(_number(xs, x) for x in xs.ticks() if x == int(x))]
    parts += [_incumbent(marks, start_us, xs, ys)]
    parts += _levels(ys, levels)  # over the line, so that it does not cross their labels
    parts += [_mark(xs.at(mark.x), UNTIMED_Y if mark.y is None else ys.at(mark.y), mark) for mark in marks]
    parts += [_text("experiment on this op (0: starter)", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle")]
    return _svg(title, HEIGHT, *parts)


def _incumbent(marks: Sequence[Mark], start_us: float, xs: Axis, ys: Axis) -> Markup:
    path = f"M{xs.at(0)} {ys.at(start_us)}"
    for mark in marks:
        if mark.shape is Shape.KEPT and mark.y is not None:
            path += f"H{xs.at(mark.x)}V{ys.at(mark.y)}"
    return tag("path", d=f"{path}H{xs.end}", class_="incumbent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """The measured ceilings over arithmetic intensity: `gbps` is the slope, `tflops` the flat part."""

    gbps: float
    tflops: float
    dtype: str

    def at(self, intensity: float) -> float:
        """TFLOP/s that the ceilings allow at this intensity in FLOP/byte."""
        return min(self.tflops, intensity * self.gbps / 1e3)


def roofline_plot(roof: Roof, marks: Sequence[Mark], title: str) -> Markup:
    """TFLOP/s over FLOP/byte, both logarithmic, under the roof; every mark has its `y`."""
    ridge = roof.tflops * 1e3 / roof.gbps
    intensities = [mark.x for mark in marks]
    xs = axis([*intensities, ridge / 4, ridge * 4], LEFT, WIDTH - RIGHT, log=True)
    rates = [mark.y for mark in marks if mark.y]
    least = min(roof.tflops / 10, roof.at(min(intensities)))  # a decade at least, so that the slope is seen
    ys = axis([*rates, roof.tflops, least], HEIGHT - BOTTOM, TOP, log=True)
    line = " ".join(f"{xs.at(x)},{ys.at(roof.at(x))}" for x in (max(xs.low, ys.low * 1e3 / roof.gbps), ridge, xs.high))
    name = f"{_tick(float(f'{roof.gbps:.3g}'))} GB/s, {roof.tflops:.3g} TFLOP/s {roof.dtype}"
    parts = [_grid(ys, "TFLOP/s"), *(_number(xs, x) for x in _sparse(xs.ticks()))]
    parts += [tag("polyline", points=line, class_="roof"), _text(name, xs.end, ys.at(roof.tflops) - 4, "end")]
    parts += [_mark(xs.at(mark.x), ys.at(mark.y), mark) for mark in marks if mark.y]
    parts += [_text("FLOP/byte", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle")]
    return _svg(title, HEIGHT, *parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A share in [0, 1] with its name and the text beside it."""

    label: str
    share: float
    text: str
    class_: str


def bar_plot(bars: Sequence[Bar], title: str) -> Markup:
    """Horizontal bars, a frame standing for 100 %."""
    full = WIDTH - BAR_LABEL - RIGHT
    parts = []
    for index, bar in enumerate(bars):
        y = index * BAR + 4
        width = round(full * min(1.0, max(0.0, bar.share)), 1)
        inside = width > full / 2
        parts += [
            _text(bar.label, BAR_LABEL - 8, y + 13, "end"),
            tag("rect", x=BAR_LABEL, y=y, width=full, height=BAR - 6, class_="frame"),
            tag("rect", x=BAR_LABEL, y=y, width=width, height=BAR - 6, class_=f"bar {bar.class_}"),
            _text(
                bar.text, BAR_LABEL + width + (-6 if inside else 6), y + 13, "end" if inside else "start", inside=inside
            ),
        ]
    return _svg(title, len(bars) * BAR + 6, *parts)


def _svg(title: str, height: float, *parts: str) -> Markup:
    box = f"0 0 {WIDTH:g} {height:g}"
    return tag("svg", tag("title", title), *parts, viewBox=box, role="img", aria_label=title, class_="plot")


def _grid(ys: Axis, unit: str) -> Markup:
    lines = []
    for value in ys.ticks():
        y = ys.at(value)
        lines += [tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")]
        lines += [_text(_tick(value), LEFT - 6, y + 4, "end")]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    name = tag(
        "text", unit, x=10, y=middle, text_anchor="middle", transform=f"rotate(-90 10 {middle:g})", class_="label"
    )
    return joined(*lines, name)


def _sparse(ticks: Sequence[float]) -> list[float]:
    """Powers of ten alone where all would not fit side by side."""
    return [x for x in ticks if len(ticks) <= SIDE_BY_SIDE or math.log10(x).is_integer()]


def _tick(value: float) -> str:
    return f"{value:g}" if value >= 1e6 or value < 1000 else f"{value:,.0f}"


def _number(xs: Axis, value: float) -> Markup:
    return _text(_tick(value), xs.at(value), HEIGHT - BOTTOM + 16, "middle")


def _levels(ys: Axis, levels: Sequence[Level]) -> list[Markup]:
    """Lines with their labels above them, or below where the label of the line before is in the way."""
    parts, taken = [], -math.inf
    for level in sorted(levels, key=lambda level: -level.y):
        y = ys.at(level.y)
        below = y - LABEL < taken
        taken = y + LABEL if below else y
        line = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_=f"level {level.class_}")
        parts += [line, _text(level.label, WIDTH - RIGHT, y + LABEL - 1 if below else y - 4, "end")]
    return parts


def _text(text: str, x: float, y: float, anchor: str, *, inside: bool = False) -> Markup:
    class_ = "label inside" if inside else "label"
    return tag("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=class_)


def _mark(x: float, y: float, mark: Mark) -> Markup:
    return tag("g", tag("title", mark.label), _shape(x, y, mark.shape), class_=f"mark {mark.shape}")


def _shape(x: float, y: float, shape: Shape) -> Markup:
    match shape:
        case Shape.KEPT:
            return tag("circle", cx=x, cy=y, r=5)
        case Shape.REJECTED:
            return tag("path", d=f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8")
        case Shape.UNTIMED:
            return tag("path", d=f"M{x - 5:.1f} {y + 5:.1f}h10l-5 -10z")
        case Shape.SUSPICIOUS:
            return tag("path", d=f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z")
        case Shape.REFERENCE:
            return tag("rect", x=x - 4, y=y - 4, width=8, height=8)
        case Shape.BASELINE:
            return tag("rect", x=x - 6, y=y - 6, width=12, height=12)
