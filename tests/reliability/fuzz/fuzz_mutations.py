"""Mutations of valid files that know their structure: JSON, lines with JSON, TOML, plain bytes."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Mutation = Callable[[Random, bytes], bytes]

# JSON texts of values, as text, so that what json.dumps cannot write is among them.
HOSTILE_STRINGS = (
    '""',
    '"."',
    '".."',
    '"../../../../etc/passwd"',
    '"/dev/zero"',
    '"a/b"',
    '"a\\u0000b"',
    '"\\ud800"',
    '"\\udc80"',
    '"\\ud83d\\ude00"',
    '"\\u001b[2J\\u001b]0;title\\u0007"',
    '"two\\nlines\\r"',
    '"\\u202egpj.exe"',
    '"<u4"',
    '"|O"',
    '"__class__"',
    '"%s%n{0.__class__}"',
    f'"{"n" * 300}"',
)
HOSTILE_NUMBERS = (
    "0",
    "1",
    "-1",
    "-0.0",
    "0.5",
    "255",
    "256",
    "65536",
    "4294967296",
    "281474976710657",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "1e18",
    "1e308",
    "1e999",
    "-1e999",
    "1e-999",
    "NaN",
    "Infinity",
    "-Infinity",
    "9" * 40,
)
HOSTILE_OTHERS = ("null", "true", "false", "[]", "{}", "[[]]", '{"a": 1, "a": 2}', "[1, 2, 3]", "")
# Dear to parse: one in fifty values.
HUGE = (
    "9" * 4000,
    "9" * 5000,
    "[" * 900 + "]" * 900,
    "[" * 3000 + "]" * 3000,
    "[" * 20_000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    f'"{"x" * 50_000}"',
    f'"{chr(92)}u0007{"x" * 20_000}"',
)
_HOLE = "\x00a value goes here\x00"
_HOLE_TEXT = json.dumps(_HOLE)


def mutate_bytes(rng: Random, contents: bytes) -> bytes:
    """Flip, cut, double, insert or exchange bytes."""
    changed = bytearray(contents)
    for _ in range(rng.choice((1, 1, 2, 8))):
        start = rng.randrange(len(changed) + 1)
        stop = min(len(changed), start + rng.choice((1, 1, 2, 8, 64)))
        what = rng.randrange(6)
        if what == 0 and start < len(changed):
            changed[start] ^= 1 << rng.randrange(8)
        elif what == 1:
            del changed[start:stop]
        elif what == 2:
            changed[start:start] = changed[start:stop]
        elif what == 3:
            changed[start:start] = rng.randbytes(rng.choice((1, 4, 16)))
        elif what == 4:
            changed[start:stop] = rng.choice((b"\0", b"\xff", b"\n", b"9")) * (stop - start)
        elif rng.random() < 0.3:
            del changed[start:]
    return bytes(changed)


def mutate_json(rng: Random, contents: bytes) -> bytes:
    """Exchange, remove, rename, nest or double members of a JSON document, or change its bytes."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, contents)
    values = {"": json.loads(contents)}
    text = None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = _mutate_value(rng, values) or text
    changed = json.dumps(values[""]) if "" in values else ""
    return changed.replace(_HOLE_TEXT, text or "null").encode("utf-8", "surrogatepass")


def mutate_tensors(rng: Random, contents: bytes) -> bytes:
    """Change the JSON header of a safetensors file, its length, or any bytes."""
    size = int.from_bytes(contents[:8], "little")
    header, rest = contents[8 : 8 + size], contents[8 + size :]
    if rng.random() < 0.3:
        return mutate_bytes(rng, contents)
    if rng.random() < 0.7:
        header = rng.choice((mutate_json, _mutate_ranges))(rng, header)
        size = len(header)
    else:
        size = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1))
    return size.to_bytes(8, "little") + header + rest


def _mutate_ranges(rng: Random, header: bytes) -> bytes:
    """Change the JSON that is a string of the header's own metadata, where it has any."""
    values = json.loads(header)
    if "ranges" not in values.get("__metadata__", ()):
        return mutate_json(rng, header)
    ranges = mutate_json(rng, values["__metadata__"]["ranges"].encode())
    values["__metadata__"]["ranges"] = ranges.decode("utf-8", "replace")
    return json.dumps(values).encode()


def mutate_lines(prefix: str, key_chance: float = 0.6) -> Mutation:
    """Change a line, or the order of lines, in a file of lines of `prefix` and a JSON object."""

    def mutate(rng: Random, contents: bytes) -> bytes:
        lines = contents.split(b"\n")
        number = rng.randrange(len(lines) - 1)
        if rng.random() < key_chance:
            value = lines[number].removeprefix(prefix.encode())
            lines[number] = prefix.encode() + mutate_json(rng, value)
        else:
            _mutate_lines(rng, lines, number)
        return b"\n".join(lines)

    return mutate


def mutate_toml(rng: Random, contents: bytes) -> bytes:
    """Exchange values, keys and lines of a TOML file, or change its bytes."""
    lines = contents.split(b"\n")
    number = rng.randrange(len(lines))
    key, equals, _ = lines[number].partition(b" = ")
    if equals and rng.random() < 0.6:
        lines[number] = key + equals + _toml_value(rng).encode("utf-8", "surrogatepass")
    elif rng.random() < 0.4:
        lines[number] = rng.choice(_TOML_LINES).encode()
    elif rng.random() < 0.5:
        _mutate_lines(rng, lines, number)
    else:
        return mutate_bytes(rng, contents)
    return b"\n".join(lines)


_TOML_LINES = (
    "[run]",
    "[[run]]",
    "run = 3",
    "[unknown]\nkey = 1",
    "[run.seed]",
    "seed.seed.seed = 1",
    f"[{'a.' * 400}a]",
    f"[{'a.' * 20_000}a]",
    "x = " + "[" * 400 + "]" * 400,
    "x = " + "[\n" * 5000,
    "x = 1979-05-27T07:32:00Z",
    "x = 9999-99-99",
    '"\\u001b[31m" = 1',
    '"" = 1',
    "'a\tb' = '''\n'''",
)


def _toml_value(rng: Random) -> str:
    special = ("inf", "nan", "-nan", "0x" + "f" * 200, "0x" + "f" * 9000, "0b1", "1_000", "{}")
    special += ("2020-01-01", "07:32:00", "'''\na'''", '"\\U00110000"', '"\\ud800"', "{a = 1}")
    return rng.choice(special) if rng.random() < 0.4 else hostile_value(rng)


def hostile_value(rng: Random) -> str:
    """The JSON text of a value that a parser may not expect."""
    if rng.random() < 0.02:
        return rng.choice(HUGE)
    return rng.choice(rng.choice((HOSTILE_STRINGS, HOSTILE_NUMBERS, HOSTILE_OTHERS)))


def _mutate_lines(rng: Random, lines: list[bytes], number: int) -> None:
    other = rng.randrange(len(lines))
    what = rng.randrange(5)
    if what == 0:
        del lines[number]
    elif what == 1:
        lines.insert(other, lines[number])
    elif what == 2:
        lines[number], lines[other] = lines[other], lines[number]
    elif what == 3:
        lines[number] = mutate_bytes(rng, lines[number])
    else:
        lines[number] += rng.choice((b"\r", b"\0", b" ", b"\xff", b"}", b"\x0c", lines[other]))


def _mutate_value(rng: Random, document: dict[str, Any]) -> str | None:
    """Change one member of `document[""]`; the text for the hole that it may leave."""
    places = list(_places(document))
    if not places:
        return None
    container, key = rng.choice(places)
    what = rng.randrange(8)
    if what <= 3:
        container[key] = _HOLE
        return hostile_value(rng)
    if what == 4:
        del container[key]
    elif what == 5:
        other, other_key = rng.choice(places)
        container[key] = json.loads(json.dumps(other[other_key]))
    elif what == 6:
        container[key] = rng.choice(([container[key]], {"a": container[key]}, str(container[key])))
    elif isinstance(container, list):
        container.extend([container[key]] * rng.choice((1, 2, 100)))
    else:
        container[rng.choice(("", "a\nb", "\x1b[31m", "..", key + " ", "x" * 300))] = container[key]
    return None


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every member of a JSON value, as its container and its key there."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        found.append((value, key))
        if isinstance(item, dict | list):
            found += _places(item)
    return found
