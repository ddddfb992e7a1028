# SPDX-License-Identifier: Apache-2.0
"""How often a batch runs, what it begins with, and what its gradients are then."""

from __future__ import annotations

from typing import List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.core.verdict import Facts, PassVerdict, Rules
from nnabla_adaloss.engine import BatchLoop, Outcome
from tests.worlds.networks import mlp
from tests.worlds.tampering import Gate
from tests.worlds.values import assert_close, constant, data, gradients, zero_grads


def test_a_batch_whose_gradients_were_not_saved_runs_once_however_low_its_scales_were() -> None:
    """What it has added to the gradients of the batch before cannot be taken away again."""
    own, weight = mlp(), constant([0.0])
    other = F.mean(PF.affine(data(4, 3), 2, name="other", rng=np.random.RandomState(2)) ** 2)
    loss = F.reshape(own, (1,)) * weight + F.reshape(other, (1,))

    zero_grads()
    for present in (0.0, 1.0):
        weight.d = present
        loss.forward()
        loss.backward()
    expected = gradients()

    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float32"))

    def run_pass(rerun: bool) -> None:
        scaling.forward()
        scaling.backward(iteration=0, rerun=rerun)

    loop = BatchLoop(scaling, run_pass, nn.get_parameters().values, 2.0**-24)
    zero_grads()
    for present in (0.0, 1.0):
        weight.d = present
        scaling.guard.begin_batch(first=not present, repeat=False)
        assert loop.run(Rules(repeat=False, max_repeats=9)).verdict is PassVerdict.GOOD
    # The second batch is the first with gradients of these layers, and would have run again.
    assert not scaling.calibrated
    assert_close(gradients(), expected, rtol=1e-5)


def test_a_lost_batch_is_measured_on_the_state_that_it_began_with() -> None:
    x, rng = constant(data(8, 5).d + 1.0), np.random.RandomState(0)
    h = F.tanh(PF.affine(PF.batch_normalization(x, name="in"), 5, name="a", rng=rng))
    scaling = AdaptiveLossScaling(FormatEmulation(F.mean(PF.affine(h, 5, name="b", rng=rng))))
    mean = nn.get_parameters(grad_only=False)["in/bn/mean"]
    began_with: List[float] = []

    def run_pass(rerun: bool) -> None:
        began_with.append(float(mean.d.flat[0]))
        zero_grads()
        scaling.forward()
        scaling.backward(iteration=2 if rerun else None, rerun=rerun)

    loop = BatchLoop(scaling, run_pass, nn.get_parameters().values, 2.0**-24)
    verdicts = []
    for _ in range(3):
        scaling.guard.begin()
        scaling.guard.begin_batch(first=True, repeat=False)
        verdicts.append(loop.run(Rules(repeat=False, max_repeats=0)).verdict)
        scaling.after_update()
        # Only what comes back through it grows, by more than the margin.
        nn.get_parameters()["b/affine/W"].d *= 1.0 if len(verdicts) < 2 else 2.0**9
    assert verdicts == [PassVerdict.GOOD, PassVerdict.GOOD, PassVerdict.OVERFLOW]
    assert len(began_with) == 4
    assert began_with[0] < began_with[1] < began_with[2] == began_with[3]


def test_a_batch_that_no_scale_helps_leaves_scales_as_they_were() -> None:
    gate, h = Gate(), data(4, 5)
    loss = F.mean(gate(PF.affine(h, 5, name="a", rng=np.random.RandomState(0))) ** 2)
    scaling = AdaptiveLossScaling(FormatEmulation(loss))

    def run_pass(rerun: bool) -> None:
        zero_grads()
        scaling.forward()
        scaling.backward(rerun=rerun)

    loop = BatchLoop(scaling, run_pass, nn.get_parameters().values, 2.0**-24)
    for factor, verdict in ((1.0, PassVerdict.GOOD), (np.inf, PassVerdict.HOPELESS)):
        gate.factor = factor
        scaling.guard.begin()
        scaling.guard.begin_batch(first=True, repeat=True)
        assert loop.run(Rules(repeat=True, max_repeats=9)).verdict is verdict
        assert scaling.components.provisional == {}
        scaling.after_update()


def test_a_lost_batch_without_a_bad_layer_was_on_another_rank_or_had_only_a_nan_loss() -> None:
    noise = constant(0.0)
    scaling = AdaptiveLossScaling(mlp() + F.reshape(noise, ()))
    noises = [0.0, 0.0, np.nan, 0.0]  # the last: the lost batch is measured, and forward draws another one

    def run_pass(rerun: bool) -> None:
        noise.d = noises.pop(0)
        zero_grads()
        scaling.forward()
        scaling.backward(rerun=rerun)

    loop = BatchLoop(scaling, run_pass, nn.get_parameters().values, 2.0**-24)
    for _ in range(3):
        scaling.guard.begin()
        scaling.guard.begin_batch(first=True, repeat=False)
        outcome = loop.run(Rules(repeat=False, max_repeats=0))
        scaling.after_update()
    assert outcome.verdict is PassVerdict.OVERFLOW
    assert not noises
    assert outcome.where == "none, only the loss was NaN"
    assert Outcome(PassVerdict.OVERFLOW, Facts(overflowed=False)).where == "on another rank"
