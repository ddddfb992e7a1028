# SPDX-License-Identifier: Apache-2.0
"""A call that ends in every way, in a module that imports little: each process of it starts at once."""

from __future__ import annotations

import os
import time


def behave(what: str) -> str:
    """Name this process, or crash, hang or raise."""
    if what == "crash":
        os.abort()
    if what == "hang":
        time.sleep(60)
    if what == "raise":
        raise KeyError(what)
    return str(os.getpid())
