"""The curves of a run side by side: accuracy with its target, loss, and with more room the rate."""

from dataclasses import dataclass

from rich.text import Text

from bert_tools.watch.look import Look
from bert_tools.watch.plot import Characters, Mark, plot
from bert_tools.watch.words import count, figure

LEAST_WIDTH, THREE = 36, 120  # columns of a chart; of a terminal that three of them fit into
_GUTTER = 9  # columns of the labels
_STYLES: dict[Mark, str] = {"empty": "", "curve": "cyan", "target": "green"}


@dataclass(frozen=True, slots=True)
class Curve:
    """What one chart shows."""

    title: str
    points: list[tuple[float, float]]
    target: float | None = None


def charts(look: Look, width: int, height: int, characters: Characters) -> list[Text]:
    """`height` lines of at most `width` columns; none where they are too few."""
    curves = _curves(look)
    if width < THREE:
        curves = curves[:2]
    if width < 2 * LEAST_WIDTH:
        curves = [next((each for each in curves if each.points), curves[0])]
    if width < LEAST_WIDTH or height < 4:
        return []
    assert look.history.last is not None
    x_high = max(1.0, float(look.history.last["samples"]))
    own = width // len(curves)
    blocks = [_chart(curve, own, height, x_high, characters) for curve in curves]
    return [Text.assemble(*parts) for parts in zip(*blocks, strict=True)]


def _curves(look: Look) -> list[Curve]:
    """In the order of what matters."""
    history = look.history
    target = look.config.eval.target_accuracy if look.config else None
    title = "mlm_accuracy" if target is None else f"mlm_accuracy, target {target:g}"
    return [
        Curve(title, history.accuracy.points, target),
        Curve("loss", history.loss.points),
        Curve("samples/s", history.samples_per_s.points),
    ]


def _chart(
    curve: Curve, width: int, height: int, x_high: float, characters: Characters
) -> list[Text]:
    """A title, the rows with their labels, and the samples below."""
    columns, rows = width - _GUTTER - 2, height - 2
    lines = [Text(_fit(f"{'':{_GUTTER}} {curve.title}", width), "bold")]
    if not curve.points:
        lines.append(Text(_fit(f"{'':{_GUTTER}} nothing yet", width), "dim"))
        return lines + [Text(" " * width) for _ in range(height - len(lines))]
    low, high = _y_range(curve)
    cells = plot(
        curve.points,
        columns,
        rows,
        x_range=(0.0, x_high),
        y_range=(low, high),
        target=curve.target,
        characters=characters,
    )
    labels = {0: high, rows - 1: low}
    for number, row in enumerate(cells):
        label = figure(labels[number]) if number in labels else ""
        line = Text(f"{label[:_GUTTER]:>{_GUTTER}}|", "dim")
        for text, mark in row:
            line.append(text, _STYLES[mark])
        lines.append(line.append(" "))
    end = f"{count(x_high)} samples"
    lines.append(Text(_fit(f"{'':{_GUTTER}}0{end:>{max(0, columns - 1)}}", width), "dim"))
    return lines


def _y_range(curve: Curve) -> tuple[float, float]:
    """From the lowest to the highest, and to the target."""
    values = [y for _, y in curve.points]
    low, high = min(values), max(values)
    if curve.target is not None:
        low, high = min(low, curve.target), max(high, curve.target)
    if low == high:
        return low - abs(low) / 10 - 0.01, high + abs(high) / 10 + 0.01
    return low, high


def _fit(text: str, width: int) -> str:
    return f"{text[:width]:<{width}}"
