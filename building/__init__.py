# SPDX-License-Identifier: Apache-2.0
"""Build of the package: Python files as they are, CPU kernels compiled from C."""
