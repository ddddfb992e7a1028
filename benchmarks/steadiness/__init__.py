# SPDX-License-Identifier: Apache-2.0
"""The parts of `benchmarks/steady.py`; what they are trained on is that of the study and the samples."""

import scaling_study  # noqa: F401  # the samples are on the path then
