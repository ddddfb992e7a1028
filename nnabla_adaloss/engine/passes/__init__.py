# SPDX-License-Identifier: Apache-2.0
"""Backward passes: without hooks where a schedule allows it, with hooks for everything else."""

from .hooked import HookedPass as HookedPass
from .hookless import HooklessPass as HooklessPass
