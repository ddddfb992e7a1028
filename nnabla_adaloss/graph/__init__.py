# SPDX-License-Identifier: Apache-2.0
"""What is known of an nnabla graph before and while backward runs through it."""
