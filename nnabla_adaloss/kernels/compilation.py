# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""Compilation of the CPU kernels by numba, and what is kept of it on disk."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, Callable

import numba
from numba.core.caching import FunctionCache

logger = logging.getLogger("nnabla_adaloss")


class KeptKernels(FunctionCache):
    """numba's cache of one function: compiles again what cannot be read back, tells of the first wait."""

    told = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The machine code for a signature; None when it is to be compiled."""
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:
            # A file that was cut off, by a full disk or a kill, or that another version wrote.
            logger.warning("a compiled kernel could not be read back and is compiled again: %r", error)
            self.flush()
            found = None
        if found is None and not KeptKernels.told:
            KeptKernels.told = True
            logger.warning("compiling CPU kernels for this processor: some seconds, this once")
        return found


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, and keep the machine code on disk where there is a place for it."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    cache: Any = KeptKernels
    # Where neither the package's directory nor a user cache directory can be written, nothing is kept.
    with suppress(RuntimeError):
        dispatcher._cache = cache(function)
    return dispatcher  # type: ignore[no-any-return]
