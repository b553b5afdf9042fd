"""Pages with charts, read back."""

import base64
import gzip
import json
from html.parser import HTMLParser


class Parsed(HTMLParser):
    """The texts of a page's scripts by id, and the places that its elements name."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self.places: list[str | None] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.places += [found[name] for name in ("src", "href", "action", "data", "srcset") if name in found]
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)
        if tag == "script":
            self.scripts[found.get("id")] = ""
            self.last = found.get("id")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[self.last] += data


def check_self_contained(html: str) -> None:
    """The page is whole, names no other file, and brings its library."""
    page = Parsed(html)
    assert page.open == [] and page.places == []
    assert "url(" not in html and "@import" not in html
    assert "://" not in "".join(text for name, text in page.scripts.items() if name != "library")
    assert gzip.decompress(base64.b64decode(page.scripts["library"])).startswith(b"/**\n* plotly.js v")


def embedded_charts(html: str) -> list[dict]:
    return json.loads(Parsed(html).scripts["charts"])
