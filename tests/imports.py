# SPDX-License-Identifier: Apache-2.0
"""Imports that fail: nnabla looks for its extensions each time that it hands out an array as NumPy's."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Iterator, List

# By nnabla's Cython modules, as a Python 2 would; conftest.py has Python answer at once.
LOOKED_FOR = "nnabla.nnabla", "nnabla.nnabla_ext"


@contextmanager
def modules_looked_for() -> Iterator[List[str]]:
    """The names of modules that are looked for, because they are not imported yet."""
    asked: List[str] = []
    finder: Any = SimpleNamespace(find_spec=lambda name, path, target=None: asked.append(name))
    sys.meta_path.insert(0, finder)
    answers = {name: sys.modules.pop(name) for name in LOOKED_FOR if name in sys.modules}
    try:
        yield asked
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(answers)
