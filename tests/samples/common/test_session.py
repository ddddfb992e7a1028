# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from common.feeder import Feeder
from common.session import Session

from nnabla_adaloss import AdaptiveLossScalingUpdater, DynamicLossScalingUpdater


def options(checkpoint: Optional[Path], *, resume: bool = False) -> argparse.Namespace:
    return argparse.Namespace(iterations=9, checkpoint=checkpoint, checkpoint_every=2, resume=resume)


def updater(kind: Any, **arguments: Any) -> Any:
    nn.clear_parameters()
    nn.seed(0)
    x = nn.Variable((4, 3))

    def fill(number: int) -> None:
        x.d = np.random.default_rng(number).standard_normal(x.shape)

    loss = F.mean(PF.affine(x, 2, name="a") ** 2)
    solver = S.Momentum(0.01)
    solver.set_parameters(nn.get_parameters())
    made = kind(solver, loss, Feeder(fill), **arguments)
    made.shown = loss
    return made


def train(made: Any, given: argparse.Namespace, interrupt_at: int = -1) -> List[int]:
    done = []
    with Session(given, made) as session:
        for iteration in session:
            made.update()
            if iteration == interrupt_at:
                os.kill(os.getpid(), signal.SIGINT)
            session.show(made.scale, made.shown)
            done.append(iteration)
    return done


def test_ctrl_c_ends_after_the_iteration_and_saves(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    made = updater(AdaptiveLossScalingUpdater, storage="float16")
    with pytest.raises(SystemExit, match="Stopped after 4 of 9 updates: go on with --resume"):
        train(made, options(tmp_path / "c"), interrupt_at=3)
    assert signal.getsignal(signal.SIGINT) is handler
    again = updater(AdaptiveLossScalingUpdater, storage="float16")
    assert train(again, options(tmp_path / "c", resume=True)) == list(range(4, 9))
    assert again.data_feeder.count == 9
    resumed = nn.get_parameters()["a/affine/W"].d.copy()
    train(updater(AdaptiveLossScalingUpdater, storage="float16"), options(None))
    np.testing.assert_array_equal(nn.get_parameters()["a/affine/W"].d, resumed)


def test_the_scale_of_nnablas_updater_is_kept(tmp_path: Path) -> None:
    train(updater(DynamicLossScalingUpdater, scale=4.0, N=3), options(tmp_path / "c"))
    again = updater(DynamicLossScalingUpdater, scale=4.0, N=3)
    assert train(again, options(tmp_path / "c", resume=True)) == []
    assert again.scale == 16.0


def test_there_may_be_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert len(train(updater(DynamicLossScalingUpdater), options(tmp_path / "c", resume=True))) == 9
