"""One moment of a run as a frame of text: exactly so many lines of so many columns at most.

What matters most stays where the terminal is small: how the run is, its alerts, how far it is and
how long it may still take, its figures, and then its curves.
"""

from rich.text import Text

from bert_tools.watch.alerts import Alert
from bert_tools.watch.charts import charts
from bert_tools.watch.figures import figures
from bert_tools.watch.look import Look
from bert_tools.watch.plot import Characters
from bert_tools.watch.words import count, duration
from mlperf_bert.common.errors import one_line

MOST_ALERTS = 5
LEAST_CHART_LINES = 5
_STYLES = {"grave": "bold red", "mild": "yellow"}


def frame(look: Look, width: int, height: int, characters: Characters, hint: str) -> list[Text]:
    """`height` lines at most, each of `width` columns at most; the last one is the `hint`."""
    head = [_title(look, width), *_wrapped(_alerts(look), width, height)]
    if look.history.last is None:
        body = [*_waiting(look), *_last_words(look)]
    else:
        body = _body(look, width, height - len(head) - 1, characters)
    lines = [*head, *body][: max(1, height - 1)]
    if height > len(lines):
        lines.append(Text(hint, "dim"))
    for line in lines:
        if not line.plain.isprintable():  # whatever was forgotten: files must not reach it raw
            line.plain = one_line(line.plain)
        line.truncate(width)
        if characters == "ascii":
            line.plain = line.plain.encode("ascii", "backslashreplace").decode("ascii")
            line.truncate(width)
    return lines


def status_line(look: Look) -> str:
    """The moment in one line, as for terminals that cannot draw."""
    last, words = look.history.last, [look.name, state(look)]
    if last is not None:
        loss = "no number" if last["loss"] is None else f"{last['loss']:.4f}"
        words += [f"step {_steps(look)}", f"loss {loss}", f"accuracy {_accuracy(look)}"]
        words.append(f"{count(last.get('samples_per_s') or 0)} samples/s")
    words += filter(None, [_left(look)])
    return "  ".join(words)


def state(look: Look) -> str:
    """In a word or a few how the run is."""
    outcome = look.outcome
    if outcome is None:
        silent = any(alert.kind == "silent" for alert in look.alerts)
        return "silent" if silent else look.phase
    if outcome.status == "success":
        return "ended: target reached"
    if outcome.stopped_by:
        return f"stopped by {one_line(outcome.stopped_by):.20}"
    return "ended: target NOT reached"


def _title(look: Look, width: int) -> Text:
    word = state(look)
    room = max(1, width - len(word) - 2)
    name = look.name if len(look.name) <= room else f"..{look.name[-max(1, room - 2) :]}"
    good = look.outcome is None or look.outcome.status == "success"
    style = "bold green" if good and word != "silent" else "bold red"
    return Text.assemble((f"{name:<{room}}", "bold"), "  ", (word, style))


def _alerts(look: Look) -> list[Text]:
    alerts = [*look.alerts]
    if len(alerts) > MOST_ALERTS:
        more = len(alerts) - MOST_ALERTS + 1
        alerts[MOST_ALERTS - 1 :] = [Alert("file", "mild", f"{more} more alerts: --json has all")]
    return [Text(f"! {alert.text}", _STYLES[alert.weight]) for alert in alerts]


def _wrapped(texts: list[Text], width: int, height: int) -> list[Text]:
    """Long ones on two lines, where there is room for all."""
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


def _waiting(look: Look) -> list[Text]:
    if look.phase == "no run":
        return [Text("waiting: no run has begun here yet")]
    if look.outcome is not None:
        return [Text("the run ended before it wrote any metrics")]
    return [Text("waiting: the run has begun and not written any metrics yet (start-up)")]


def _body(look: Look, width: int, height: int, characters: Characters) -> list[Text]:
    """What fits into `height` lines, the curves in what is left of them."""
    lines = [_progress(look, width, characters)]
    lines += _left_lines(look, width)
    lines += figures(look, width)
    words = _last_words(look)
    room = height - len(lines) - len(words)
    if room >= LEAST_CHART_LINES:
        lines += charts(look, width, room, characters)
    return [*lines, *words]


def _last_words(look: Look) -> list[Text]:
    lines = list(look.remarks.lines)
    return [Text(f"log    {lines[-1]}", "dim")] if lines else []


def _progress(look: Look, width: int, characters: Characters) -> Text:
    assert look.history.last is not None
    text = f"step   {_steps(look)}"
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


def _steps(look: Look) -> str:
    assert look.history.last is not None
    steps = count(look.history.last["step"])
    return f"{steps} of {count(look.config.max_steps)}" if look.config else steps


def _accuracy(look: Look) -> str:
    evaluations = look.history.evaluations
    return f"{evaluations[-1].accuracy:.4f}" if evaluations else "-"


def _left_lines(look: Look, width: int) -> list[Text]:
    """How long it may take, on two lines where one is too short."""
    words = _left(look)
    first, cut, second = words.partition("; ")
    if len(words) <= width or not cut:
        return [Text(words)] if words else []
    return [Text(first), Text(f"       {second}")]


def _left(look: Look) -> str:
    """How long it may take, or how long it took."""
    if look.outcome is not None:
        done = look.outcome
        return (
            f"ended  {duration(done.seconds)} of training, {count(done.steps)} steps, "
            f"{count(done.samples)} samples"
        )
    remaining, target = look.remaining, look.config.eval.target_accuracy if look.config else None
    if remaining.to_last_step_s is None or target is None:
        return ""
    words = f"left   at most {duration(remaining.to_last_step_s)} to the last step; "
    if remaining.to_target_s is None:
        return f"{words}to {target:g}: {remaining.why_not}"
    low, high = remaining.to_target_s
    if low > remaining.to_last_step_s:
        return f"{words}to {target:g}: not within its steps, by {remaining.basis}"
    until = duration(high) if high <= remaining.to_last_step_s else "never (the steps may end)"
    return f"{words}to {target:g}: {duration(low)} to {until}, by {remaining.basis}"
