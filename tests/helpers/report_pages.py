"""HTML pages of `--report`, read as a browser reads them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class ReportPage(HTMLParser):
    """Tags, tables and scripts of a page. `cells`: rows of all tables; `text`: paragraphs; `scripts`: by id or ''."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.text: list[str] = []
        self.scripts: dict[str, str] = {}
        self._in: list[str] = []
        self.source = file.read_text()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag == "p":
            self.text.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._in[-1] if self._in else ""
        if inside in ("td", "th"):
            self.cells[-1][-1] += data
        elif inside == "p":
            self.text[-1] += data
        elif inside == "script":
            self.scripts[str(self.tags[-1][1].get("id", ""))] = data

    @property
    def charts(self) -> list[dict[str, Any]]:
        charts: list[dict[str, Any]] = json.loads(self.scripts["data"])["charts"]
        return charts
