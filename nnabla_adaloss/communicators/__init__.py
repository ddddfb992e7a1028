# SPDX-License-Identifier: Apache-2.0
"""Exchange of gradients and decisions between processes."""

from .agreement import CollectiveMismatchError as CollectiveMismatchError
from .agreement import RankDisagreementError as RankDisagreementError
from .mpi import MPICommunicator as MPICommunicator
