# SPDX-License-Identifier: Apache-2.0
"""A recorded training as one HTML page, which needs neither network nor scripts."""
