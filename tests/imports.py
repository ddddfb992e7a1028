# SPDX-License-Identifier: Apache-2.0
"""Imports that fail: nnabla looks for its extensions each time that it hands out an array as NumPy's."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Any, Iterator, List


class _Watcher:
    """A finder of modules that finds none, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: List[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.asked.append(name)


@contextmanager
def modules_looked_for() -> Iterator[List[str]]:
    """The names of modules that are looked for, because they are not imported yet."""
    watcher: Any = _Watcher()
    sys.meta_path.insert(0, watcher)
    try:
        yield watcher.asked
    finally:
        sys.meta_path.remove(watcher)
