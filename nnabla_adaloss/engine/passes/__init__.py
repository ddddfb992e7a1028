# SPDX-License-Identifier: Apache-2.0
"""Backward passes: without hooks if the schedule allows it, else with hooks."""

from .backward_pass import run_pass as run_pass
from .hooked import BackwardOptions as BackwardOptions
