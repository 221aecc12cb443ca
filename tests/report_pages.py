"""The allowed contents of a report's page, whatever the run's files say."""

import base64
import hashlib
import re
from html.parser import HTMLParser

from bert_tools.report.page import report_page
from bert_tools.report.run import find_runs, read_run

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "footer"),
    *("section", "div", "span", "p", "b", "h1", "h2", "h3", "ul", "li"),
    *("figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *("svg", "text", "line", "path", "circle"),
}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class"),
    *("scope", "role", "tabindex", "aria-hidden"),
    *("viewbox", "preserveaspectratio", "width", "height", "d", "r", "text-anchor"),
    *("x", "y", "dx", "dy", "x1", "x2", "y1", "y2", "cx", "cy"),
}
UNCLOSED = {"meta"}


class Page(HTMLParser):
    """A page as a browser's parser sees it: elements, attributes and texts; fails where an element
    is not closed in its turn.
    """

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags = []
        self.attributes = []
        self.texts = []
        self.style = ""
        self._open = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in UNCLOSED:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data):
        if self._open[-1:] == ["style"]:
            self.style += data
        elif data.strip():
            self.texts.append(data.strip())

    @property
    def words(self):
        """All that a reader reads."""
        return "\n".join(self.texts)

    def charts(self):
        """For each chart its title and its description for readers who cannot see it."""
        said = [text for text in self.texts if " over samples: " in text]
        return dict(text.split(" over samples: ", 1) for text in said)


def page_of(*paths):
    """As `mlperf_bert report page` makes it."""
    return report_page([read_run(path, label) for label, path in find_runs(paths).items()])


def checked(text):
    """The page, which is of known elements, runs nothing and loads nothing."""
    page = Page(text)
    assert set(page.tags) <= TAGS
    assert {name for _, name, _ in page.attributes} <= ATTRIBUTES
    assert page.tags.count("style") == 1
    (policy,) = (v for _, name, v in page.attributes if name == "content" and "-src" in v)
    sources = dict(each.split(" ", 1) for each in policy.split("; "))
    assert sources["default-src"] == "'none'" and "script-src" not in sources
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert sources["style-src"] == f"'sha256-{digest}'"
    assert not re.search(r"url\(|@import", page.style)
    assert all(character.isprintable() for each in page.texts for character in each)
    return page
