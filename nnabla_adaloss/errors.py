# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings of their own."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Type


class LossScaleError(RuntimeError):
    """No loss scale can help: the loss itself is not finite, or the scale is at its floor."""


class GraphChangedError(RuntimeError):
    """A graph was rewired between two backward passes of one wrapped loss."""

    @classmethod
    def at(cls, type_name: str) -> GraphChangedError:
        """The error for a function, of this type, that backward did not expect."""
        return cls(
            f"{type_name} is not where it was when the loss was wrapped: the graph was rewired. "
            "These gradients are not valid; the next backward will be"
        )


class LossScaleWarning(UserWarning):
    """Training goes on, but something about the loss scale needs attention."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of nnabla, of CuPy or of NumPy says that there is no memory left."""
    said = re.search("out of memory|failed to allocate", str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and said is not None)


def warn(message: str, category: Type[Warning] = LossScaleWarning) -> None:
    """Warn at the line outside of this package that led here: something can be done about it there."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
