# SPDX-License-Identifier: Apache-2.0
"""Every program in nnabla's own half precision as well: as few batches as show its fault."""

from __future__ import annotations

from typing import Any, Callable, Collection, Iterator

import nnabla as nn
import numpy as np
import pytest

from tests.programs import programs, test_gans, test_plain, test_threads
from tests.programs.programs import Outcome, start
from tests.worlds.values import HALF

BATCHES = 24
# Gradients are lost in these, whatever the loss scale, in one of them twice in a row.
OVERFLOW = (4, 5, 11)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = programs.Stream.__init__

    def init(self: Any, batches: int, *, overflow: Collection[int] = (), seed: int = 0) -> None:
        made(self, min(batches, BATCHES), overflow=OVERFLOW if overflow else (), seed=seed)

    monkeypatch.setattr(programs.Stream, "__init__", init)
    yield
    nn.set_default_context(nn.Context())


def parameter_average(kind: str) -> Outcome:
    # Which updates are averaged is decided by the clock.
    return test_threads.parameter_average(kind, examined=False).outcome


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.usefixtures("_short")
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize(
    "program",
    [*test_plain.PROGRAMS, *test_gans.PROGRAMS, parameter_average],
    ids=lambda program: program.__name__,
)
def test_learns_natively_what_it_learns_emulated(program: Callable[[str], Outcome]) -> None:
    start()
    emulated = program("adaptive")
    nn.set_default_context(HALF)
    start()
    native = program("native")
    assert native.learned == emulated.learned
    assert native.learned
    for name, array in native.arrays.items():
        assert np.isfinite(array).all(), name
    # The loss falls by little in so few batches; what native half rounds besides is less than that.
    assert native.loss == pytest.approx(emulated.loss, rel=0.02)
