# SPDX-License-Identifier: Apache-2.0
"""Exchange of gradients and decisions between processes."""
