# SPDX-License-Identifier: Apache-2.0
"""Exchange of gradients and decisions between processes."""

from __future__ import annotations

from .agreement import CollectiveMismatchError, RankDisagreementError
from .mpi import MPICommunicator

__all__ = ["CollectiveMismatchError", "MPICommunicator", "RankDisagreementError"]
