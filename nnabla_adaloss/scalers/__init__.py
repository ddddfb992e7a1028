# SPDX-License-Identifier: Apache-2.0
"""The global loss scale for training loops of one's own."""

from __future__ import annotations

from .loss_scaler import LossScaler

__all__ = ["LossScaler"]
