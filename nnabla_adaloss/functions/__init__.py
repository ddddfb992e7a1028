# SPDX-License-Identifier: Apache-2.0
"""Loss scaling by hand: functions in a graph, and the scale of a single layer, as in the paper."""
