# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for custom training loops."""
