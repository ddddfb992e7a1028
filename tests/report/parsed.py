# SPDX-License-Identifier: Apache-2.0
"""A page as a reader of HTML sees it."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any, Dict, List, Optional, Tuple

VOID = {"meta", "path"}
EVIL = '<script>alert("1")</script>&'


class Parsed(HTMLParser):
    """The elements of a page; fails where tags are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: List[str] = []
        self.elements: List[Tuple[str, Dict[str, Optional[str]]]] = []
        self.words: List[str] = []
        # Of the open elements, and of all that are closed: their attributes and words.
        self._begun: List[Tuple[Dict[str, Optional[str]], List[str]]] = []
        self._closed: List[Tuple[str, Dict[str, Optional[str]], str]] = []
        self.tables: Dict[str, List[List[str]]] = {}  # rows by caption, the head first
        self.folded: List[str] = []  # captions of tables that are shown on a click
        self.definitions: Dict[str, str] = {}
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self._begun.append((dict(attrs), []))

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        attributes, words = self._begun.pop()
        self._closed.append((tag, attributes, " ".join(" ".join(words).split())))
        if tag == "table":
            self._read_table()
        elif tag == "dd":
            self.definitions[self.texts("dt")[-1]] = self.texts("dd")[-1]

    def _read_table(self) -> None:
        caption, rows = self.texts("caption")[-1], [[]]
        begin = max(i for i, (tag, _, _) in enumerate(self._closed) if tag == "caption")
        for tag, _, text in self._closed[begin:]:
            if tag in ("td", "th"):
                rows[-1].append(text)
            elif tag == "tr":
                rows.append([])
        self.tables[caption] = rows[:-1]
        self.folded += [caption] * ("details" in self.open)

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        for _, words in self._begun:
            words.append(data)

    def texts(self, tag: str, kind: Optional[str] = None) -> List[str]:
        """The texts of all elements of a kind (a class), in order."""
        found = [(attributes, text) for name, attributes, text in self._closed if name == tag]
        return [text for attributes, text in found if kind in (None, attributes.get("class"))]

    def of(self, tag: str) -> List[Dict[str, Optional[str]]]:
        return [attributes for name, attributes in self.elements if name == tag]
