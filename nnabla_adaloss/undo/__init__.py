# SPDX-License-Identifier: Apache-2.0
"""Snapshots of what a batch changes, so that it can be undone, and the search for faults in forward."""

from __future__ import annotations

from .batch_guard import BatchGuard
from .forward_fault import ForwardFault, find_fault
from .forward_state import ForwardState
from .preserved import Preserved
from .snapshot import ArraySnapshot, DataSnapshot, Savepoint, Undoable

__all__ = [
    "ArraySnapshot",
    "BatchGuard",
    "DataSnapshot",
    "ForwardFault",
    "ForwardState",
    "Preserved",
    "Savepoint",
    "Undoable",
    "find_fault",
]
