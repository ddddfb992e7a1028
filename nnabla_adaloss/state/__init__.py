# SPDX-License-Identifier: Apache-2.0
"""Saved states: one file each, written atomically."""

from .state_file import FORMAT_VERSION, StateFileError, read_state, write_state

__all__ = ["FORMAT_VERSION", "StateFileError", "read_state", "write_state"]
