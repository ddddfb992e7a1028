# SPDX-License-Identifier: Apache-2.0
"""Warnings of a block: collected, or errors."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Iterator, List

from nnabla_adaloss import LossScaleWarning


@contextmanager
def warned() -> Iterator[List[str]]:
    """Show no warning; after the block the list holds the texts of this package's, repeated ones too."""
    texts: List[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in found if issubclass(one.category, LossScaleWarning)]


@contextmanager
def silent() -> Iterator[None]:
    """Any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
