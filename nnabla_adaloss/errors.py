# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings of this package."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Optional, Type


class LossScaleError(RuntimeError):
    """No loss scale can help: the loss itself is not finite, or the scale is at its floor."""


class GraphChangedError(RuntimeError):
    """A graph was rewired between two backward passes of one wrapped loss."""


class LossScaleWarning(UserWarning):
    """Training goes on, but something about the loss scale needs attention."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error of nnabla, CuPy or NumPy reports that there is no memory left."""
    match = re.search("out of memory|failed to allocate", str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and match is not None)


def missing_code(error: BaseException, card: str) -> Optional[str]:
    """Explanation of an error of nnabla or CuPy that has no code for a card; None for other errors."""
    if re.search("no kernel image is available|invalid value for --gpu-architecture", str(error)) is None:
        return None
    library = "CuPy" if type(error).__module__.startswith("cupy") else "nnabla's CUDA extension"
    return (
        f"{library} was built without code for {card}: install the extra for another CUDA version, one that "
        "is as new as the GPU; `python -m nnabla_adaloss doctor --gpu` tells whether it suits"
    )


def warn(message: str, category: Type[Warning] = LossScaleWarning) -> None:
    """Warn at the calling line outside of this package, where the user can act."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
