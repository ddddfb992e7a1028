# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for custom training loops."""

from __future__ import annotations

from .grad_scaler import GradScaler
from .loss_scaler import LossScaler

__all__ = ["GradScaler", "LossScaler"]
