"""Numbers as a terminal shows them: short, whatever they are."""

_SECONDS_OF_DAY = 86_400
_MOST_DAYS = 9_999


def duration(seconds: float) -> str:
    """As `0:12:31`, from a day on as `3 d 4 h`."""
    if not seconds < _MOST_DAYS * _SECONDS_OF_DAY:
        return f"over {_MOST_DAYS:,} d"
    whole = int(max(0.0, seconds))
    days, hours = divmod(whole // 3600, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def figure(value: float | None, digits: int = 4) -> str:
    """With so many digits that count, at least all before the point; `-` for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e12 or size < 1e-3:
        return f"{value:.2e}"
    before = len(str(int(size)))
    after = max(0, digits - before) if size >= 1 else digits
    return f"{value:,.{after}f}"


def count(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.2e}"


def size(num_bytes: float | None) -> str:
    """In MiB or GiB."""
    if num_bytes is None:
        return "-"
    mib = num_bytes / 2**20
    return f"{figure(mib)} MiB" if mib < 1024 else f"{figure(mib / 1024)} GiB"
