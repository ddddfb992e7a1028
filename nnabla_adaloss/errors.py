# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings of their own."""

from __future__ import annotations


class LossScaleError(RuntimeError):
    """No loss scale can help: the loss itself is not finite, or the scale is at its floor."""


class GraphChangedError(RuntimeError):
    """A graph was rewired between two backward passes of one wrapped loss."""


class LossScaleWarning(UserWarning):
    """Training goes on, but something about the loss scale needs attention."""
