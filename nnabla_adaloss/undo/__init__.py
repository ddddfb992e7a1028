# SPDX-License-Identifier: Apache-2.0
"""Snapshots for undoing a batch."""

from .batch_guard import BatchGuard as BatchGuard
from .batch_guard import ForwardState as ForwardState
from .snapshot import ArraySnapshot as ArraySnapshot
from .snapshot import savepoint as savepoint
