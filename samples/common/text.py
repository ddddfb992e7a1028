# SPDX-License-Identifier: Apache-2.0
"""Text that comes with Python: its help on the language."""

from __future__ import annotations

from functools import cache
from typing import Tuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

_SYMBOLS = 64
_TEXT_LENGTH = 200_000
_TEST_LENGTH = 20_000


@cache
def text() -> Tuple[Integers, Integers, int]:
    """Load Python's help on the language as symbol numbers: training text, test text, number of symbols."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))[: _TEXT_LENGTH + _TEST_LENGTH]
    letters, counts = np.unique(list(whole), return_counts=True)
    # All rare characters are one symbol.
    common = letters[np.argsort(-counts, kind="stable")][: _SYMBOLS - 1]
    number = {letter: index for index, letter in enumerate(common)}
    tokens = np.array([number.get(letter, _SYMBOLS - 1) for letter in whole], np.int64)
    return tokens[:-_TEST_LENGTH], tokens[-_TEST_LENGTH:], _SYMBOLS


def windows(tokens: Integers, starts: Integers, length: int) -> Tuple[Integers, Integers]:
    """Cut pieces of a text, and the successor of each symbol."""
    at = starts[:, np.newaxis] + np.arange(length)
    return tokens[at], tokens[at + 1]
