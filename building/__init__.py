# SPDX-License-Identifier: Apache-2.0
"""How the package is built: Python as it is, and the CPU kernels compiled from C."""
