"""Pages of the manual's site for files outside docs/ to which its pages link: README.md, recipes, scripts.

In the repository a page of docs/ links to them by relative paths, as a code host reads them. mkdocs calls these hooks
to give each such file a page below `repository/`, Markdown as it is and the rest as a listing, and to turn its links.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS, PAGES = "docs/", "repository/"
#: The path in a relative link or picture, without its anchor.
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)[^)#\s]+")


def source_of(file: str) -> str:
    """The place among the site's sources of a file of the repository."""
    if file.startswith(DOCS):
        return file.removeprefix(DOCS)
    return PAGES + (file if file.endswith(".md") else f"{file}.md")


def file_of(source: str) -> str:
    """The file of the repository that a Markdown page of the site shows."""
    return source.removeprefix(PAGES) if source.startswith(PAGES) else DOCS + source


def linked(file: str, text: str) -> Iterator[str]:
    """Files of the repository outside docs/ to which a page links."""
    for match in LINK.finditer(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[0]))
        if not target.startswith((DOCS, "..")) and (ROOT / target).is_file():
            yield target


def listing(file: str, text: str) -> str:
    """A page that shows a file that is no Markdown: its text, or a notebook's cells."""
    if file.endswith(".ipynb"):
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n\n".join(part if kind == "markdown" else f"~~~~python\n{part}\n~~~~" for kind, part in cells)
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(posixpath.splitext(file)[1], "text")
    return f"# {file}\n\n~~~~{language}\n{text.rstrip()}\n~~~~\n"


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages."""
    from mkdocs.structure.files import File, InclusionLevel

    known: set[str] = set()
    waiting = [(file_of(file.src_uri), file.content_string) for file in files.documentation_pages()]
    while waiting:
        for file in linked(*waiting.pop()):
            if file in known:
                continue
            known.add(file)
            text = (ROOT / file).read_text(encoding="utf-8")
            if file.endswith(".md"):
                waiting.append((file, text))
            else:
                text = listing(file, text)
            files.append(File.generated(config, source_of(file), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Turn links between docs/ and the rest of the repository to the pages of the site."""
    file, source = file_of(page.file.src_uri), page.file.src_uri
    outside = set(linked(file, markdown))

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[0]))
        if target not in outside and not (source.startswith(PAGES) and target.startswith(DOCS)):
            return match[0]
        return posixpath.relpath(source_of(target), posixpath.dirname(source) or ".")

    return LINK.sub(turned, markdown)
