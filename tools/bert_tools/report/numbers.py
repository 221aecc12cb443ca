"""Numbers as a report writes them: a unit to each, few digits, even steps on an axis."""

import math
from collections.abc import Sequence

MINUS = "\N{MINUS SIGN}"
_MINUTE, _HOUR = 60.0, 3600.0
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_MOST_PLAIN = 1e15


def significant(value: float, digits: int = 4) -> str:
    """With so many significant digits or all those before the point, as 36,272 or 0.2719."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < _MOST_PLAIN:
        return f"{value:.{max(0, digits - 2)}e}".replace("-", MINUS)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def seconds(value: float) -> str:
    """As `95.2 s`, `12 min 05 s` or `3 h 07 min`."""
    if value < 2 * _MINUTE:
        return f"{value:.1f} s" if value >= 1 or value == 0 else f"{value:.3f} s"
    if value < 2 * _HOUR:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02d} s"
    if value >= _MOST_PLAIN:
        return f"{value / _HOUR:.2e} h"
    hours, rest = divmod(round(value / _MINUTE), 60)
    return f"{hours:,} h {rest:02d} min"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Even values within low .. high, each a multiple of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw >= 1e-300 else 0.0
    if not power or not math.isfinite(power):
        return [low, high]
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last - first > 2 * most:  # a range below what floating point can part
        return [low, high]
    return [number * step for number in range(first, last + 1)] or [low, high]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Of ticks in a row: as many decimals as they differ by, and one prefix for all, as 40 k."""
    largest = max(map(abs, values), default=0.0)
    step = values[1] - values[0] if len(values) > 1 else largest
    if largest >= _MOST_PLAIN or 0 < step < 1e-4:
        return [f"{value:.1e}".replace("-", MINUS) if value else "0" for value in values]
    found = [pair for pair in _PREFIXES if largest >= max(1e4, pair[0])]
    factor, prefix = found[0] if found else (1.0, "")
    decimals = _decimals(step / factor)
    return [
        f"{value / factor:,.{decimals}f} {prefix}".strip().replace("-", MINUS) if value else "0"
        for value in values
    ]


def _decimals(step: float) -> int:
    """Places after the point in which multiples of a step differ."""
    decimals = 0
    while decimals < 6 and abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1
    return decimals
