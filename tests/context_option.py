# SPDX-License-Identifier: Apache-2.0
"""`pytest --context=cudnn:half`: nets of the tests are built in that context of nnabla.

A test that asks nnabla for what the context lacks is skipped. A test that leaves a GPU in an error state ends
its worker, because whatever follows in the same process would fail, too; pytest-xdist (`-n 1` and more)
counts it as failed, starts another one and goes on.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Iterator, Optional

import nnabla as nn
import pytest
from nnabla.ext_utils import get_extension_context

import nnabla_adaloss  # noqa: F401  it loads the CUDA libraries, before nnabla's extension looks for them

CONTEXT = pytest.StashKey[nn.Context]()

# How nnabla, CUDA and this package say that something is not there.
LACKS = {
    "stores half precision already|but storage keeps gradients in float16": "only a float context emulates",
    r"Any of \[[^]]*\] could not be found": "nnabla has no implementation of a function for this context",
    r"lib\w+\.so[.\d]*: cannot open shared object": "a library is missing",
    r"lib\w+_(infer|train)\b.*not|Could not load library lib\w+": "a library is missing",
    r"CUDNN_STATUS_NOT_SUPPORTED|CUDNN_STATUS_ARCH_MISMATCH": "cuDNN does not support it",
    r"(?i)not implemented": "nnabla has not implemented it",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--context",
        metavar="EXT:TYPE",
        help="build the nets of the tests in this context of nnabla: cpu:half, cudnn:float, cudnn:half, ...",
    )


def pytest_configure(config: pytest.Config) -> None:
    asked = config.getoption("--context")
    if asked is None:
        return
    extension, _, type_config = asked.partition(":")
    try:
        config.stash[CONTEXT] = get_extension_context(extension, type_config=type_config or "float")
    except Exception as error:  # whatever an extension raises for a missing library, driver or device
        raise pytest.UsageError(f"--context={asked} cannot be used here: {error}") from error


def pytest_report_header(config: pytest.Config) -> Optional[str]:
    context = config.stash.get(CONTEXT, None)
    return None if context is None else f"context: {', '.join(context.backend)}"


@pytest.fixture(autouse=True)
def _context(request: pytest.FixtureRequest) -> Iterator[None]:
    """The context that was asked for is the default one, and its device works when the test is over."""
    context = request.config.stash.get(CONTEXT, None)
    if context is None:
        yield
        return
    before = nn.get_current_context()
    nn.set_default_context(context)
    yield
    nn.set_default_context(before)
    error = device_error(context)
    if error is not None:
        _end_worker(request.config, f"{request.node.nodeid} left the device in an error state: {error}")


def device_error(context: nn.Context) -> Optional[Exception]:
    """What the device says when it is waited for; None where it works, and on a CPU."""
    if "Cuda" not in context.array_class:
        return None
    import nnabla_ext.cuda

    try:
        nnabla_ext.cuda.device_synchronize(context.device_id)
    except Exception as error:  # CUDA's errors stay until the process ends
        return error
    return None


def _end_worker(config: pytest.Config, message: str) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(f"{message}; `-n 1` goes on behind it", returncode=3)
    config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
    print(message, file=sys.stderr, flush=True)
    os._exit(3)  # an orderly end would need the device


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except Exception as error:
        lacking = what_lacks(error) if CONTEXT in item.config.stash else None
        if lacking is not None:
            pytest.skip(lacking)
        raise


def what_lacks(error: Optional[BaseException]) -> Optional[str]:
    """What the context does not have, as far as the error or one of its causes tells; else None."""
    while error is not None:
        for pattern, reason in LACKS.items():
            if re.search(pattern, str(error)):
                return reason
        error = error.__cause__ or error.__context__
    return None
