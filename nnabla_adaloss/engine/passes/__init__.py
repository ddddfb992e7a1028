# SPDX-License-Identifier: Apache-2.0
"""Backward passes: without hooks where a schedule allows it, with hooks for everything else."""

from .run import AnyPass, run_pass, unscale_visible
from .select import Passes, PassRequest

__all__ = ["AnyPass", "PassRequest", "Passes", "run_pass", "unscale_visible"]
