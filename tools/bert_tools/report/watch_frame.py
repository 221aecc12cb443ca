"""A look at a run as a frame of text of limited lines and columns.

The order is by importance, so a small terminal shows the first parts: state, alerts, progress and
remaining time, figures, then curves. Curves are braille dots, or stars on an ASCII terminal.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from rich.text import Text

from bert_tools.report.chart import MINUS, Chart, Series, significant
from bert_tools.report.watch_files import Record
from bert_tools.report.watch_look import Alert, Look, duration
from mlperf_bert.common.errors import one_line

Characters = Literal["unicode", "ascii"]
Mark = Literal["empty", "curve", "target"]
Cell = tuple[str, Mark]
Dots = set[tuple[int, int]]

MOST_ALERTS = 5
LEAST_CHART_LINES = 5
LEAST_WIDTH, THREE = 36, 120  # columns of a chart; of a terminal with three charts
TWO_COLUMNS = 70  # of a terminal with figures side by side
_GUTTER = 9  # columns of a chart's labels
_LABEL, _COLUMN = 12, 39  # columns of a figure's name, and with its value
_ALERT_STYLES = {"grave": "bold red", "mild": "yellow"}
_STYLES: dict[Mark, str] = {"empty": "", "curve": "cyan", "target": "green"}
_BRAILLE = 0x2800
_BITS: dict[Characters, tuple[tuple[int, ...], ...]] = {  # bits of a cell's dots, row by row
    "unicode": ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)),
    "ascii": ((1,),),
}


def frame(look: Look, width: int, height: int, characters: Characters, hint: str) -> list[Text]:
    """A frame of at most `height` lines and `width` columns; the last line is the `hint`."""
    lines = [_title(look, width), *_wrapped(_alerts(look), width, height)]
    said = [Text(f"log    {look.remarks.lines[-1]}", "dim")] if look.remarks.lines else []
    if look.history.last is None:
        lines.append(Text(_waiting(look)))
    else:
        lines.append(_progress(look, width, characters))
        lines += _left_lines(look, width)
        lines += _figures(look, look.history.last, width)
        room = height - 1 - len(lines) - len(said)
        if room >= LEAST_CHART_LINES:
            lines += _charts(look, width, room, characters)
    lines = [*lines, *said][: max(1, height - 1)]
    if height > len(lines):
        lines.append(Text(hint, "dim"))
    for line in lines:
        if not line.plain.isprintable():  # raw text of files must never reach the terminal
            line.plain = one_line(line.plain)
        line.truncate(width)
        if characters == "ascii":
            line.plain = line.plain.encode("ascii", "backslashreplace").decode("ascii")
            line.truncate(width)
    return lines


def status_line(look: Look) -> str:
    """A look in one line, for terminals that cannot draw."""
    last, words = look.history.last, [look.name, look.state]
    if last is not None:
        loss = "no number" if last["loss"] is None else f"{last['loss']:.4f}"
        evaluations = look.history.evaluations
        accuracy = f"{evaluations[-1].accuracy:.4f}" if evaluations else "-"
        words += [f"step {_steps(look, last)}", f"loss {loss}", f"accuracy {accuracy}"]
        words.append(f"{count(last.get('samples_per_s') or 0)} samples/s")
    return "  ".join([*words, *filter(None, [_left(look)])])


def figure(value: float | None, digits: int = 4) -> str:
    """A number with significant digits, as in reports; `-` for None."""
    return "-" if value is None else significant(value, digits).replace(MINUS, "-")


def count(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.2e}"


def size(num_bytes: float | None) -> str:
    """A size in MiB or GiB."""
    if num_bytes is None:
        return "-"
    mib = num_bytes / 2**20
    return f"{figure(mib)} MiB" if mib < 1024 else f"{figure(mib / 1024)} GiB"


def _title(look: Look, width: int) -> Text:
    room = max(1, width - len(look.state) - 2)
    name = look.name if len(look.name) <= room else f"..{look.name[-max(1, room - 2) :]}"
    good = look.outcome is None or look.outcome.status == "success"
    style = "bold green" if good and look.state != "silent" else "bold red"
    return Text.assemble((f"{name:<{room}}", "bold"), "  ", (look.state, style))


def _alerts(look: Look) -> list[Text]:
    alerts = [*look.alerts]
    if len(alerts) > MOST_ALERTS:
        more = len(alerts) - MOST_ALERTS + 1
        alerts[MOST_ALERTS - 1 :] = [Alert("file", "mild", f"{more} more alerts: --json has all")]
    return [Text(f"! {alert.text}", _ALERT_STYLES[alert.weight]) for alert in alerts]


def _wrapped(texts: list[Text], width: int, height: int) -> list[Text]:
    """Texts in lines; long ones take two lines if there is room for all."""
    if width < 20 or 2 * len(texts) > height // 3:
        return texts
    lines = []
    for text in texts:
        if text.cell_len <= width:
            lines.append(text)
            continue
        cut = text.plain.rfind(" ", 0, width)
        cut = cut if cut > width // 2 else width
        lines += [text[:cut], Text(f"  {text.plain[cut:].strip()}", text.style)]
    return lines


def _waiting(look: Look) -> str:
    if look.phase == "no run":
        return "waiting: no run has begun here yet"
    if look.outcome is not None:
        return "the run ended before it wrote any metrics"
    return "waiting: the run has begun and not written any metrics yet (start-up)"


def _steps(look: Look, last: Record) -> str:
    return count(last["step"]) + (f" of {count(look.config.max_steps)}" if look.config else "")


def _progress(look: Look, width: int, characters: Characters) -> Text:
    assert look.history.last is not None
    text = f"step   {_steps(look, look.history.last)}"
    if look.config is None:
        return Text(text)
    share = min(1.0, look.history.last["step"] / look.config.max_steps)
    percent = f"{share:4.0%}"
    room = width - len(text) - len(percent) - 4
    if room < 10:
        return Text(f"{text} {percent}")
    full, empty = ("\u2501", "\u2500") if characters == "unicode" else ("#", "-")
    done = int(share * room)
    return Text.assemble(
        text, "  ", (full * done, "cyan"), (empty * (room - done), "dim"), f" {percent}"
    )


def _left_lines(look: Look, width: int) -> list[Text]:
    """The remaining time, on two lines if one is too short."""
    words = _left(look)
    first, cut, second = words.partition("; ")
    if len(words) <= width or not cut:
        return [Text(words)] if words else []
    return [Text(first), Text(f"       {second}")]


def _left(look: Look) -> str:
    """The remaining time, or the duration of a finished run."""
    if look.outcome is not None:
        done = look.outcome
        return (
            f"ended  {duration(done.seconds)} of training, {count(done.steps)} steps, "
            f"{count(done.samples)} samples"
        )
    remaining, target = look.remaining, look.target
    if remaining.to_last_step_s is None:
        return ""
    words = f"left   at most {duration(remaining.to_last_step_s)} to the last step"
    if target is None:
        return words
    words += f"; to {target:g}: "
    if remaining.to_target_s is None:
        return words + remaining.why_not
    low, high = remaining.to_target_s
    if low > remaining.to_last_step_s:
        return f"{words}not within its steps, by {remaining.basis}"
    until = duration(high) if high <= remaining.to_last_step_s else "never (the steps may end)"
    return f"{words}{duration(low)} to {until}, by {remaining.basis}"


def _figures(look: Look, last: Record, width: int) -> list[Text]:
    """The newest record: one line per pair, or per two pairs if two columns fit."""
    left, right = _speed(look, last), _quality(look, last)
    if width >= TWO_COLUMNS:
        return [Text.assemble(*_pair(*a), *_pair(*b)) for a, b in zip(left, right, strict=True)]
    return [Text.assemble(*_pair(*each)) for each in (*right, *left)]


def _pair(label: str, value: str) -> tuple[tuple[str, str], str]:
    return (f"{label:<{_LABEL}}", "dim"), f"{value:<{_COLUMN - _LABEL}} "


def _speed(look: Look, last: Record) -> list[tuple[str, str]]:
    usual = look.history.usual("samples_per_s")
    rate, tokens = (
        "-" if last.get(key) is None else count(last[key])
        for key in ("samples_per_s", "tokens_per_s")
    )
    memory, idle = size(last.get("memory_bytes")), last.get("idle_fraction")
    imbalance = f"{figure(last.get('imbalance_tokens'))} tokens"
    return [
        ("samples", f"{count(last['samples'])} in {duration(look.history.trained_s)}"),
        ("samples/s", rate if usual is None else f"{rate} (median {count(usual)})"),
        ("tokens/s", tokens),
        ("step", f"{figure(last.get('step_ms'))} ms, wait {figure(last.get('wait_ms'), 2)} ms"),
        ("imbalance", imbalance if idle is None else f"{imbalance}, idle {_share(idle):.1%}"),
        ("memory", f"{memory} on rank 0" if memory != "-" else memory),
    ]


def _quality(look: Look, last: Record) -> list[tuple[str, str]]:
    history, target = look.history, look.target
    loss = "no number" if last["loss"] is None else figure(last["loss"], 5)
    accuracy = "no evaluation yet"
    if history.evaluations:
        newest, best = history.evaluations[-1].accuracy, history.best_accuracy
        accuracy = f"{newest:.4f}" + ("" if best == newest else f", best {best:.4f}")
        accuracy += f" of {target:g}" if target else ""
    ratio, clipped = last.get("slowest_over_median"), last.get("clipped_fraction")
    clipping = "" if clipped is None else f", clipped {_share(clipped):.0%}"
    return [
        ("loss", loss),
        ("accuracy", accuracy),
        ("learn. rate", figure(last.get("learning_rate"), 3)),
        ("grad. norm", f"{figure(last.get('grad_norm'))}{clipping}"),
        ("skipped", f"{count(last['skipped_steps'])} now, {count(history.skipped_steps)} in all"),
        ("slow rank", "not measured" if ratio is None else f"{ratio:.2f} x the median"),
    ]


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _charts(look: Look, width: int, height: int, characters: Characters) -> list[Text]:
    """Curves side by side in `height` lines, the most important first, as many as fit."""
    history, target = look.history, look.target
    title = "mlm_accuracy" if target is None else f"mlm_accuracy, target {target:g}"
    charts = [
        Chart(
            key=name,
            title=name,
            series=(Series(run=0, label=name, points=tuple(points)),),
            levels=((target, "target"),) if name == title and target is not None else (),
        )
        for name, points in (
            (title, history.accuracy.points),
            ("loss", history.loss.points),
            ("samples/s", history.samples_per_s.points),
        )
    ]
    if width < THREE:
        charts = charts[:2]
    if width < 2 * LEAST_WIDTH:
        charts = [next((each for each in charts if each.series[0].points), charts[0])]
    if width < LEAST_WIDTH:
        return []
    assert history.last is not None
    x_high = max(1.0, float(history.last["samples"]))
    own = width // len(charts)
    blocks = [_chart(chart, own, height, x_high, characters) for chart in charts]
    return [Text.assemble(*parts) for parts in zip(*blocks, strict=True)]


def _chart(
    chart: Chart, width: int, height: int, x_high: float, characters: Characters
) -> list[Text]:
    """A chart: a title, the rows with their labels, and the samples below."""
    columns, rows = width - _GUTTER - 2, height - 2
    lines = [Text(_fit(f"{'':{_GUTTER}} {chart.title}", width), "bold")]
    points = [(x, value) for x, value in chart.series[0].points if value is not None]
    if not points:
        lines.append(Text(_fit(f"{'':{_GUTTER}} nothing yet", width), "dim"))
        return lines + [Text(" " * width) for _ in range(height - len(lines))]
    levels = [value for value, _ in chart.levels]
    values = [*chart.series[0].values, *levels]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - abs(low) / 10 - 0.01, high + abs(high) / 10 + 0.01
    target = levels[0] if levels else None
    cells = plot(
        points, columns, rows, (0.0, x_high), (low, high), target=target, characters=characters
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


def _fit(text: str, width: int) -> str:
    return f"{text[:width]:<{width}}"


def plot(
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    *,
    target: float | None = None,
    characters: Characters = "unicode",
) -> list[list[Cell]]:
    """`height` rows of `width` cells, the top one first: the points joined by lines.

    Args:
        points: finite numbers, in the order they are joined; those outside the ranges are left out.
        width: cells of a row, at least 1.
        height: rows, at least 1.
        x_range: values of the left and the right edge.
        y_range: values of the lower and the upper edge.
        target: a level across the whole width, behind the curve.
        characters: how dots are shown.
    """
    bits = _BITS[characters]
    columns, rows = width * len(bits[0]), height * len(bits)
    places = [
        (_place(x, x_range, columns), rows - 1 - _place(y, y_range, rows))
        for x, y in points
        if x_range[0] <= x <= x_range[1] and y_range[0] <= y <= y_range[1]
    ]
    curve: Dots = set(places)
    for one, other in pairwise(places):
        curve.update(_line(one, other))
    level: Dots = set()
    if target is not None and y_range[0] <= target <= y_range[1]:
        row = rows - 1 - _place(target, y_range, rows)
        level = {(column, row) for column in range(0, columns, len(bits[0]))}
    return [
        [_cell(column, row, curve, level, characters) for column in range(width)]
        for row in range(height)
    ]


def _place(value: float, limits: tuple[float, float], dots: int) -> int:
    """The number of the dot between the limits; the middle one if the limits are equal."""
    low, high = limits
    share = (value - low) / (high - low) if high > low else 0.5
    return min(dots - 1, int(share * dots))


def _line(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots between two dots, one step at a time along the longer axis."""
    across, down = other[0] - one[0], other[1] - one[1]
    steps = max(abs(across), abs(down))
    return [
        (one[0] + round(across * step / steps), one[1] + round(down * step / steps))
        for step in range(1, steps)
    ]


def _cell(column: int, row: int, curve: Dots, level: Dots, characters: Characters) -> Cell:
    bits = _BITS[characters]
    layers: tuple[tuple[Dots, Mark, str], ...] = ((curve, "curve", "*"), (level, "target", "-"))
    for dots, mark, star in layers:
        found = sum(
            bit
            for down, line in enumerate(bits)
            for right, bit in enumerate(line)
            if (len(line) * column + right, len(bits) * row + down) in dots
        )
        if found:
            return (star if characters == "ascii" else chr(_BRAILLE + found)), mark
    return " ", "empty"
