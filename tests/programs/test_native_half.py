# SPDX-License-Identifier: Apache-2.0
"""Every program in nnabla's own half precision as well: as few batches as show its fault."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Collection, Iterator

import nnabla as nn
import numpy as np
import pytest

from tests.programs import programs
from tests.programs.programs import Outcome

HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
PROGRAMS = sorted(
    path.stem for path in Path(__file__).parent.glob("test_*.py") if path.stem != Path(__file__).stem
)
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


def outcome_of(module: ModuleType, kind: str, folder: Path) -> Outcome:
    """What a program of so few batches leads to."""
    arguments = {"kind": kind, "path": folder / "parameters.h5", "folder": folder}
    names = inspect.signature(module.train).parameters
    trained = module.train(**{name: arguments[name] for name in names})
    return trained if isinstance(trained, Outcome) else trained.outcome


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_learns_natively_what_it_learns_emulated(
    program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = import_module(f"tests.programs.{program}")
    monkeypatch.setattr(module, "BATCHES", BATCHES, raising=False)
    emulated = outcome_of(module, "adaptive", tmp_path)
    nn.set_default_context(HALF)
    native = outcome_of(module, "native", tmp_path)
    assert native.learned == emulated.learned
    assert native.learned
    for name, array in native.arrays.items():
        assert np.isfinite(array).all(), name
    # The loss falls by little in so few batches; what native half rounds besides is less than that.
    assert native.loss == pytest.approx(emulated.loss, rel=0.02)
