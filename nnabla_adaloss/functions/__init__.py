# SPDX-License-Identifier: Apache-2.0
"""Functions for writing per-layer loss scales into a graph by hand, and the kernels they are made of."""
