# SPDX-License-Identifier: Apache-2.0
"""Saved states: one file each, written atomically."""

from .state_file import FORMAT_VERSION as FORMAT_VERSION
from .state_file import StateFileError as StateFileError
from .state_file import read_state as read_state
from .state_file import write_state as write_state
