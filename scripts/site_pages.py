"""Pages of the manual's site for files outside docs/ to which its pages link: README.md, recipes, scripts.

In the repository a page of docs/ links to them by relative paths, as a code host reads them. mkdocs calls these hooks
to give each such file a page below `repository/`, Markdown as it is and the rest as a listing, and to turn its links.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS, PAGES = "docs/", "repository/"
#: Files whose links are turned; a program has none.
PROSE = (".md", ".ipynb")
#: Rows of tables, and code in them, in which a code host wants a backslash before a pipe and mkdocs none.
ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")
#: The path in a relative link or picture, without its anchor.
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)[^)#\s]+")


def source_of(file: str) -> str:
    """The place among the site's sources of a file of the repository."""
    if file.startswith(DOCS):
        return file.removeprefix(DOCS)
    return PAGES + (file if file.endswith(".md") else f"{file}.md")


def file_of(source: str) -> str:
    """The file of the repository that a page of the site shows."""
    if not source.startswith(PAGES):
        return DOCS + source
    file = source.removeprefix(PAGES)
    return file if (ROOT / file).is_file() else file.removesuffix(".md")


def target_of(file: str, link: str) -> str:
    """The file of the repository to which a relative link leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), link))


def is_outside(file: str) -> bool:
    """Whether a path is one of a file of the repository outside docs/."""
    return not file.startswith((DOCS, "..")) and (ROOT / file).is_file()


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
        page, text = waiting.pop()
        for file in sorted({target_of(page, link) for link in LINK.findall(text)} - known):
            if not is_outside(file):
                continue
            known.add(file)
            text = (ROOT / file).read_text(encoding="utf-8")
            if not file.endswith(".md"):
                text = listing(file, text)
            files.append(File.generated(config, source_of(file), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
            if file.endswith(PROSE):
                waiting.append((file, text))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Turn links between docs/ and the rest of the repository to the pages of the site; read tables as a code host."""
    source = page.file.src_uri
    file = file_of(source)
    if not file.endswith(PROSE):
        return markdown

    def turned(match: re.Match[str]) -> str:
        target = target_of(file, match[0])
        if not is_outside(target) and not (is_outside(file) and target.startswith(DOCS)):
            return match[0]
        return posixpath.relpath(source_of(target), posixpath.dirname(source) or ".")

    markdown = ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    return LINK.sub(turned, markdown)
