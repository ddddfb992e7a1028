# SPDX-License-Identifier: Apache-2.0
"""A loop of one's own that is interrupted: nothing stays swapped, and the step was made or was not."""

from __future__ import annotations

from typing import Dict, Optional

import numpy as np
import pytest

from nnabla_adaloss import GradScaler
from tests.worlds.interruptions import Interrupt, Moments, Training


class Loop(Training):
    """One iteration after the other with a `GradScaler`."""

    def __init__(self, storage: Optional[str]) -> None:
        super().__init__(storage=storage, trains_all=True)
        self.scaler = GradScaler(self.solver, storage=storage)

    def iterate(self) -> None:
        self.solver.zero_grad()
        self.feed()
        self.scaler.forward(self.loss)
        self.scaler.backward(self.loss)
        self.scaler.step(self.solver)
        self.scaler.update()

    def weights(self) -> Dict[str, bytes]:
        return {name: v.data.data.tobytes() for name, v in self.solver.get_parameters().items()}


@pytest.mark.parametrize("storage", [None, "float16"])
def test_an_interrupt_leaves_nothing_swapped(storage: Optional[str]) -> None:
    reference, moments = Loop(storage), Moments(0)
    for _ in range(3):
        reference.iterate()
    before = reference.weights()
    moments.run(reference.iterate)
    after = reference.weights()
    for stop in np.linspace(1, moments.count, 12).astype(int):
        loop, now = Loop(storage), Moments(int(stop))
        for _ in range(3):
            loop.iterate()
        arrays = [(v.data, v.grad) for v in loop.parameters.values()]
        with pytest.raises(Interrupt):
            now.run(loop.iterate)
        assert loop.weights() in (before, after), now.place
        assert arrays == [(v.data, v.grad) for v in loop.parameters.values()], now.place
