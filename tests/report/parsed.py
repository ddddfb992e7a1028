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
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str) -> List[Dict[str, Optional[str]]]:
        return [attributes for name, attributes in self.elements if name == tag]
