# SPDX-License-Identifier: Apache-2.0
"""What variables hold, kept and put back."""

from __future__ import annotations

import nnabla as nn
import numpy as np

from nnabla_adaloss.engine.kept_data import KeptData
from nnabla_adaloss.kernels import CpuKernels


def test_what_a_variable_holds_is_found_where_it_is_then() -> None:
    v = nn.Variable.from_numpy_array(np.arange(3, dtype=np.float32))
    keeper = KeptData(CpuKernels(), [v])
    keeper.save()
    v.data = nn.NdArray.from_numpy_array(np.full(v.shape, 9.0, np.float32))
    keeper.restore()
    assert v.d.tolist() == [0.0, 1.0, 2.0]
    v.d = 5.0
    keeper.put([np.full(v.shape, 7.0, np.float32)])
    keeper.restore()
    assert v.d.tolist() == [7.0] * 3
