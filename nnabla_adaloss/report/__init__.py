# SPDX-License-Identifier: Apache-2.0
"""A recorded training as one HTML page, which needs neither network nor scripts."""

from __future__ import annotations

from .command import DESCRIPTION, EPILOG, add_arguments, run

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]
