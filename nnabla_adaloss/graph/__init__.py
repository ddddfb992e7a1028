# SPDX-License-Identifier: Apache-2.0
"""Analysis of an nnabla graph: order, names, matrix products, losses and hooks."""
