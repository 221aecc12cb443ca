"""The allowed contents of a report's page, whatever the run's files say; runs to report."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from bert_tools.report.charts import charts_of
from bert_tools.report.facts import RunFacts, read_facts
from bert_tools.report.page import report_page
from bert_tools.report.run_files import find_runs

TAGS = {
    *("html", "head", "meta", "title", "style", "script", "body", "main", "header", "footer"),
    *("section", "div", "span", "p", "b", "h1", "h2", "h3", "ul", "ol", "li"),
    *("figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *("svg", "text", "line", "path", "rect", "circle"),
}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "id", "type"),
    *("scope", "role", "tabindex", "aria-hidden", "data-chart"),
    *("viewbox", "preserveaspectratio", "width", "height", "d", "r", "text-anchor"),
    *("x", "y", "dx", "dy", "x1", "x2", "y1", "y2", "cx", "cy"),
}
UNCLOSED = {"meta"}


class Page(HTMLParser):
    """A page as a browser's parser sees it: elements, attributes and texts; fails where an element
    is not closed in its turn.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.within: dict[str, list[str]] = {"script": [], "style": []}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in UNCLOSED:
            self._open.append(tag)
        if tag in self.within:
            self.within[tag].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside in self.within:
            self.within[inside][-1] += data
        elif data.strip():
            self.texts.append(data)

    @property
    def words(self) -> str:
        """All that a reader reads."""
        return "\n".join(self.texts)

    @property
    def values(self) -> list[dict[str, Any]]:
        """The values that the script shows under the pointer: its charts."""
        found: list[dict[str, Any]] = json.loads(self.within["script"][0])
        return found


def page_of(*paths: Path) -> str:
    """As `mlperf_bert report page` makes it."""
    runs: Sequence[RunFacts] = [read_facts(files) for files in find_runs(paths)]
    return report_page(runs, *charts_of(runs))


def checked(text: str) -> Page:
    """The page, which is of known elements, runs one script and loads nothing."""
    page = Page(text)
    assert set(page.tags) <= TAGS
    assert {name for _, name, _ in page.attributes} <= ATTRIBUTES
    assert page.tags.count("script") == 2 and page.tags.count("style") == 1
    scripts = [value for tag, name, value in page.attributes if (tag, name) == ("script", "type")]
    assert scripts == ["application/json"]  # of the first, which therefore does not run
    (policy,) = (v for _, name, v in page.attributes if name == "content" and "-src" in v)
    sources = dict(each.split(" ", 1) for each in policy.split("; "))
    assert sources["default-src"] == "'none'"
    assert sources["script-src"] == f"'sha256-{digest(page.within['script'][1])}'"
    assert sources["style-src"] == f"'sha256-{digest(page.within['style'][0])}'"
    assert not re.search(r"url\(|@import", page.within["style"][0])
    assert all(character.isprintable() for each in page.texts for character in each)
    return page


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
