# SPDX-License-Identifier: Apache-2.0
"""Imports that fail: nnabla looks for its extensions each time that it hands out an array as NumPy's."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Iterator, List


@contextmanager
def modules_looked_for() -> Iterator[List[str]]:
    """The names of modules that are looked for, because they are not imported yet."""
    asked: List[str] = []
    finder: Any = SimpleNamespace(find_spec=lambda name, path, target=None: asked.append(name))
    sys.meta_path.insert(0, finder)
    try:
        yield asked
    finally:
        sys.meta_path.remove(finder)
