# SPDX-License-Identifier: Apache-2.0
"""The programs in the documentation run, one after another, as a reader would try them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater

from .test_imports import ROOT, programs_in


def a_reader() -> Dict[str, Any]:
    """What a page takes for granted: a network, its solver, data, an updater."""
    nn.clear_parameters()
    nn.seed(0)
    x, t = nn.Variable((8, 4)), nn.Variable((8, 1))
    loss = F.mean(F.softmax_cross_entropy(PF.affine(F.tanh(PF.affine(x, 16, name="a")), 3, name="b"), t))
    solver = S.Momentum(0.01)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        x.d, t.d = np.ones((8, 4)), np.arange(8).reshape(8, 1) % 3

    found: Dict[str, Any] = {"nn": nn, "F": F, "PF": PF, "S": S, "np": np, "signal": signal}
    found.update(x=x, t=t, loss=loss, solver=solver, feed=feed, data_feeder=feed, max_iter=3)
    found.update(updater=AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16"))
    found.update(schedule=lambda step: 0.01 / (1 + step))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/diagnosing.md",
        "docs/how_it_works.md",
        "docs/monitoring.md",
        "docs/state_and_overflow.md",
    ],
)
def test_programs_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    reader = a_reader()
    try:
        for number, program in enumerate(programs_in((ROOT / name).read_text("utf-8"))):
            if "set_parameters" in program:  # it has a network of its own
                nn.clear_parameters()
            exec(compile(program, f"{name}, program {number}", "exec"), reader)
    finally:
        signal.signal(signal.SIGTERM, handler)
