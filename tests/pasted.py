# SPDX-License-Identifier: Apache-2.0
"""Examples run as a reader runs them: pasted into a Python of their own, which knows no name yet."""

from __future__ import annotations

import doctest
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Callable, TypeVar

_T = TypeVar("_T")

# Forked from a process that has imported these and done nothing else: a start takes a tenth of a second.
_FRESH = multiprocessing.get_context("forkserver")
_FRESH.set_forkserver_preload(["nnabla.parametric_functions", "nnabla.solvers", "nnabla_adaloss.updaters"])


def in_a_fresh_process(function: Callable[..., _T], *arguments: Any) -> _T:
    """What the function returns, or raises, in a process that knows no name yet."""
    with ProcessPoolExecutor(1, mp_context=_FRESH) as process:
        return process.submit(function, *arguments).result()


def failures_of(examples: doctest.DocTest) -> str:
    """Run the examples of one docstring; what they print instead of what they should, "" where they do."""
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(examples, out=told.append)
    return "".join(told)
