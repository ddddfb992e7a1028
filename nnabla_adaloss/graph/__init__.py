# SPDX-License-Identifier: Apache-2.0
"""Analysis of an nnabla graph: order, names, matrix products, losses and hooks."""

from .graph import Graph as Graph
from .loss import LossLike as LossLike
from .loss import LossWrapper as LossWrapper
from .plan import GraphPlan as GraphPlan
