"""Suggest names for a mistyped setting, command, option, value or file."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

MOST = 3  # names in one suggestion


def suggestions(word: str, names: Iterable[str]) -> list[str]:
    """Return up to three of `names` that the user probably meant by `word`, most likely first.

    Names may have sections, as in `optim.learning_rate`. Names in the section of `word` are
    preferred, so `optim.beta` suggests `optim.beta_1`. Case and leading hyphens do not matter.
    """
    names = list(names)
    section, _, asked = _plain(word).rpartition(".")
    if asked == "gpu":
        asked = "cuda"  # "gpu" is more similar to "cpu".
    own = [name for name in names if section and _plain(name).rpartition(".")[0] == section]
    for among in (own, names):
        if same := [name for name in among if _last(name) == asked]:
            return same[:MOST]
    for among in (own, names):
        if close := _close(asked, among):
            return close
    return []


def did_you_mean(
    word: str,
    names: Iterable[str],
    otherwise: str = "",
    *,
    shown: Mapping[str, str] | None = None,
) -> str:
    """Return "did you mean NAME?" for a mistyped word, or `otherwise` if no name is similar.

    `shown` maps a name to the text that the message shows instead of the name.
    """
    found = [(shown or {}).get(name, name) for name in suggestions(word, names)]
    return f"did you mean {or_list(found)}?" if found else otherwise


def or_list(words: Sequence[str]) -> str:
    """Join words into a list such as "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _close(asked: str, names: Sequence[str]) -> list[str]:
    """Return up to three of `names` whose last part is similar to `asked`.

    If there are none, returns names whose last part begins or ends with `asked`.
    """
    parts = dict.fromkeys(_last(name) for name in names)
    found = difflib.get_close_matches(asked, parts, MOST)
    if not found and len(asked) > MOST:
        found = [part for part in parts if part.startswith(asked) or part.endswith(asked)]
    return [name for part in found for name in names if _last(name) == part][:MOST]


def _last(name: str) -> str:
    return _plain(name).rpartition(".")[2]


def _plain(name: str) -> str:
    return name.strip().lower().lstrip("-").replace("-", "_")
