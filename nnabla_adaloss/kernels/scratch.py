# SPDX-License-Identifier: Apache-2.0
"""Arrays that are used during one function's backward and then reused."""

from __future__ import annotations

from typing import Dict, Tuple

import nnabla as nn

_Key = Tuple[Tuple[int, ...], str, int]


class ScratchPool:
    """Pool of arrays by shape and purpose, as long as graphs need them; the next `get` may overwrite."""

    def __init__(self) -> None:
        self._arrays: Dict[_Key, nn.NdArray] = {}
        # Arrays of the previous graph that this one has not used yet.
        self._before: Dict[_Key, nn.NdArray] = {}

    def __len__(self) -> int:
        return len(self._arrays) + len(self._before)

    def get(self, shape: Tuple[int, ...], purpose: str, index: int = 0) -> nn.NdArray:
        """Return the array of `shape` for `purpose`; `index` distinguishes several of one function."""
        key = (shape, purpose, index)
        array = self._arrays.get(key)
        if array is None:
            array = self._arrays[key] = self._before.pop(key, None) or nn.NdArray(shape)
        return array

    def end_graph(self) -> None:
        """Drop arrays that this graph has not used; a graph of other shapes may follow."""
        # Scaled weights are the same for sentences of all lengths; scaled activations would grow in number.
        self._before, self._arrays = self._arrays, {}
