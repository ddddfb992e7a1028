# SPDX-License-Identifier: Apache-2.0
"""Arrays that are used during one function's backward and then used again."""

from __future__ import annotations

from typing import Dict, Tuple

import nnabla as nn


class ScratchPool:
    """One array per shape and purpose, kept from iteration to iteration.

    What an array holds is valid until the next call of `get` with the same arguments.
    """

    def __init__(self) -> None:
        self._arrays: Dict[Tuple[Tuple[int, ...], str, int], nn.NdArray] = {}

    def get(self, shape: Tuple[int, ...], purpose: str, index: int = 0) -> nn.NdArray:
        """The array of `shape` for `purpose`; `index` tells several of one function apart."""
        key = (shape, purpose, index)
        array = self._arrays.get(key)
        if array is None:
            array = self._arrays[key] = nn.NdArray(shape)
        return array
