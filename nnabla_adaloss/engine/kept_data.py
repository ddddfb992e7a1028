# SPDX-License-Identifier: Apache-2.0
"""What some variables held at one moment, to be put back."""

from __future__ import annotations

from operator import attrgetter
from typing import List, Sequence

import nnabla as nn

from ..kernels import Kernels
from .kept_arrays import Contents, KeptArrays

_data = attrgetter("data")


class KeptData:
    """Keeps the data of variables; they may have other arrays by the time that it is put back.

    Args:
        kernels: the kernels that copy.
        variables: the variables, each once.

    Attributes:
        variables: the variables.
    """

    def __init__(self, kernels: Kernels, variables: Sequence[nn.Variable]) -> None:
        self.variables = list(variables)
        self._kept = KeptArrays(kernels)

    def save(self) -> None:
        """Keep what they hold now."""
        self._kept.save(self._arrays)

    def put(self, contents: Sequence[Contents]) -> None:
        """Keep this, of each variable, in place of what it holds."""
        self._kept.put(contents)

    def restore(self) -> None:
        """Put back what was kept."""
        self._kept.restore(self._arrays)

    @property
    def _arrays(self) -> List[nn.NdArray]:
        return list(map(_data, self.variables))
