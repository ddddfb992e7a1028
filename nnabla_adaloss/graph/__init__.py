# SPDX-License-Identifier: Apache-2.0
"""What is known of an nnabla graph: order, names, matrix products, losses and hooks."""

from __future__ import annotations

from .loss import LossLike, LossWrapper
from .plan import GraphPlan

__all__ = ["GraphPlan", "LossLike", "LossWrapper"]
