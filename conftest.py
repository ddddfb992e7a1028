# SPDX-License-Identifier: Apache-2.0
"""What holds for every test and for every example in a docstring."""

from __future__ import annotations

import doctest
import gc
import sys
from functools import partial

import nnabla as nn
import pytest

from tests.imports import LOOKED_FOR
from tests.pasted import failures_of, in_a_fresh_process

pytest_plugins = ["tests.context_option"]

# A third of a test's time can be nnabla's search for these modules, which exist nowhere.
sys.modules.update(dict.fromkeys(LOOKED_FOR))


@pytest.fixture(autouse=True)
def _no_parameters() -> None:
    """NNabla keeps parameters by name, and where they are drawn from, for the whole process; no test sees
    those of another, whichever ran before it.
    """
    nn.clear_parameters()
    nn.random.set_parameter_seed(313)


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay until the end: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """An example of a docstring imports what it needs: it runs as it is pasted, in a process of its own."""
    if isinstance(item, pytest.DoctestItem):
        item.runtest = partial(_run_as_pasted, item.dtest)  # type: ignore[method-assign]


def _run_as_pasted(found: doctest.DocTest) -> None:
    pasted = doctest.DocTest(
        found.examples, {"__name__": "__main__"}, found.name, found.filename, found.lineno, found.docstring
    )
    failures = in_a_fresh_process(failures_of, pasted)
    if failures:
        pytest.fail(failures, pytrace=False)
