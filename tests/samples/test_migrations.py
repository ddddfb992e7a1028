# SPDX-License-Identifier: Apache-2.0
"""What README and guide change by diff: the new sides train."""

from __future__ import annotations

import re
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.ext_utils import get_extension_context
from numpy.random import RandomState

from nnabla_adaloss import AdaptiveLossScalingUpdater

from .test_documents import ROOT

DIFFS = [
    diff
    for page in ("README.md", "docs/coming_from.md")
    for diff in re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
]
ITERATIONS = 30


class Batches:
    """An nnabla data iterator over random points of three classes."""

    def __init__(self) -> None:
        self._random = RandomState(0)

    def next(self) -> Any:
        x = self._random.standard_normal((16, 8))
        return x, x[:, :3].argmax(1, keepdims=True)


def a_script() -> Dict[str, Any]:
    """The names that the scripts have given to things before their loops."""
    nn.clear_parameters()
    nn.seed(0)
    image, label = nn.Variable((16, 8)), nn.Variable((16, 1))
    pred = PF.affine(F.tanh(PF.affine(image, 32, name="a")), 3, name="b")
    pred.persistent = True
    loss = F.mean(F.softmax_cross_entropy(pred, label)).apply(persistent=True)
    error = F.mean(F.top_n_error(pred, label, axis=1)).apply(persistent=True)
    solver = S.Adam(0.02)
    solver.set_parameters(nn.get_parameters())
    args = SimpleNamespace(batch_size=16, max_iter=ITERATIONS, epochs=1, weight_decay=1e-4)
    batches = Batches()

    def feed() -> None:
        image.d, label.d = batches.next()

    script: Dict[str, Any] = {"np": np, "RandomState": RandomState, "ctx": get_extension_context("cpu")}
    script.update(args=args, start_point=0, solver=solver, image=image, label=label, pred=pred, loss=loss)
    script.update(data_iterator_mnist=lambda *args, **keywords: Batches())
    script.update(image_train=image, label_train=label, loss_error_train=F.sink(loss, error), tdata=Batches())
    script.update(max_iter=ITERATIONS, data_feeder=feed)
    script.update(AdaptiveLossScalingUpdater=AdaptiveLossScalingUpdater)  # the README imports it once
    script.update(comm=None, n_devices=1, iter_per_epoch=ITERATIONS)
    return script


def new_side(diff: str) -> str:
    """The program that a diff leads to, its hunks at the left margin."""
    hunks = re.split(r"^@@\n", diff, flags=re.M)
    kept = (re.sub(r"^-.*\n", "", hunk, flags=re.M) for hunk in hunks)
    return "".join(dedent(re.sub(r"^[ +]", "", hunk, flags=re.M)) for hunk in kept)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("diff", DIFFS, ids=["updater", "loop", "mnist", "cifar"])
def test_a_migrated_loop_trains(diff: str) -> None:
    script = a_script()
    script["image"].d, script["label"].d = Batches().next()
    script["loss"].forward()
    before = float(script["loss"].d)
    exec(compile(new_side(diff), "diff", "exec"), script)
    counters = script["updater"].counters
    assert (counters.updates, counters.lost) == (ITERATIONS, {})
    assert float(script["loss"].d) < 0.6 * before
