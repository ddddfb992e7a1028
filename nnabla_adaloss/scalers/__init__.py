# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for custom training loops."""

from .grad_scaler import GradScaler as GradScaler
from .loss_scaler import LossScaler as LossScaler
