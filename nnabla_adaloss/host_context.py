# SPDX-License-Identifier: Apache-2.0
"""The nnabla context by which the host reaches the memory of any array."""

from __future__ import annotations

import nnabla as nn

# `NdArray.data_ptr(dtype, HOST)` converts as `cast()` does, which looks for nnabla_ext at every call (50 µs).
# It insists on a context that names an array class; the default one names none.
HOST = nn.Context(["cpu:float"], "CpuCachedArray", "0")
