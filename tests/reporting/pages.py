"""A page as a browser takes it in."""

from html.parser import HTMLParser
from pathlib import Path

ADDRESSES = ("src", "href", "xlink:href", "srcset", "action", "poster")
VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """Text, addresses, ids and tables of a page; complains where tags do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text("utf-8")
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.classes: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.sections: dict[str, list[str]] = {}
        self.section_words: list[str] = []
        self.feed(self.html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.addresses += [values[name] for name in ADDRESSES if name in values]
        self.classes += values.get("class", "").split()
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "section":
            self.section_words = self.sections[values.get("id", "")] = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        self.section_words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        """All words, with plain single spaces."""
        return " ".join(" ".join(self.words).split())

    def section(self, name: str) -> str:
        """The words of the section of this id."""
        return " ".join(" ".join(self.sections[name]).split())

    def row(self, name: str, *, after: int = 0, column: int = 0) -> list[str]:
        """The table row of this name, or the one that comes so many later."""
        cells = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        return [row for row in cells if row[column : column + 1] == [name]][after]
