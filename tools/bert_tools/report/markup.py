"""HTML and SVG put together from parts, where text is escaped unless it is markup of ours."""

import html
from typing import TypeAlias

from mlperf_bert.common.errors import one_line

VOID = frozenset({"meta", "br", "line", "rect", "circle", "path"})


class Markup(str):
    """Text that goes into a page as it stands; made by the functions here only."""

    __slots__ = ()


Content: TypeAlias = "Markup | str | int | None"


def escaped(content: Content) -> str:
    """What a page may hold of it: of a text from outside one printable line, never a tag."""
    if isinstance(content, Markup):
        return content
    return html.escape(one_line(str(content))) if content is not None else ""


def element(name: str, /, *children: Content, **attributes: Content) -> Markup:
    """One element; `class_` is the attribute class, `stroke_width` is stroke-width.

    A child or an attribute that is no Markup is escaped; an attribute of None is left out.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escaped(value)}"')
    opening = " ".join(words)
    if name in VOID and not children:
        return Markup(f"<{opening}>" if name in ("meta", "br") else f"<{opening}/>")
    return Markup(f"<{opening}>{joined(*children)}</{name}>")


def joined(*children: Content) -> Markup:
    """One after the other."""
    return Markup("".join(map(escaped, children)))


def raw(text: str) -> Markup:
    """Text of this package, as a style sheet, that is not to be escaped."""
    return Markup(text)
