"""Plain text of an HTML page, to be read on a terminal."""

import re
import textwrap
from html.parser import HTMLParser

_SKIPPED = {"script", "style", "head", "nav", "header", "footer", "svg", "button", "form", "template", "devsite-header"}
_BLOCKS = {
    "p",
    "div",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "li",
    "ul",
    "ol",
    "tr",
    "table",
    "section",
    "article",
    "br",
    "main",
}


class _TextOf(HTMLParser):
    def __init__(self, only: str | None) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = [""]
        self._only = only
        self._inside = 0 if only else 1
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in _SKIPPED
        self._inside += tag == self._only
        if tag in _BLOCKS:
            self.lines.append("- " if tag == "li" else "")

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in _SKIPPED and self._skipped > 0
        self._inside -= tag == self._only and self._inside > 0
        if tag in _BLOCKS:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if self._inside and not self._skipped:
            self.lines[-1] += data


def text_of_html(page: str, width: int = 100) -> str:
    """The page's article (its body when it has no `<article>`) as wrapped paragraphs."""
    parser = _TextOf("article" if re.search(r"<article\b", page) else None)
    parser.feed(page)
    parser.close()
    paragraphs = [" ".join(line.split()) for line in parser.lines]
    wrapped = [textwrap.fill(p, width, subsequent_indent="  " if p.startswith("- ") else "") for p in paragraphs]
    return "\n\n".join(p for p in wrapped if p not in ("", "-"))
