# SPDX-License-Identifier: Apache-2.0
"""A recorded training as one HTML page, which needs neither network nor scripts."""

from __future__ import annotations

from .command import add_command

__all__ = ["add_command"]
