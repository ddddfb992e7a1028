# SPDX-License-Identifier: Apache-2.0
"""Batches and sentences of changing size train as with nnabla alone, bit for bit, in any graph."""

from __future__ import annotations

from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from nnabla_adaloss.core.layer_record import LayerRecord, Reason
from tests.worlds.trainings import METHODS, solver_of

WIDTH = 5
ITERATIONS = 12


def attention(x: nn.Variable) -> nn.Variable:
    h = PF.affine(x, 8, base_axis=2, name="in")
    q, k, v = (PF.affine(h, 8, base_axis=2, name=name) for name in "qkv")
    h = h + F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v)
    h = PF.layer_normalization(h, batch_axis=(0, 1), name="norm")
    return F.mean(PF.affine(F.relu(h), 3, base_axis=2, name="out") ** 2)


class Sentences:
    """A network with random sentences of random lengths in batches of random size."""

    def __init__(self, *, rebuilt: bool, input_gradient: bool) -> None:
        nn.clear_parameters()
        nn.random.set_parameter_seed(0)
        self._rng, self._rebuilt, self._input_gradient = np.random.default_rng(1), rebuilt, input_gradient
        self.x = nn.Variable((2, 6, WIDTH), need_grad=input_gradient)
        self.loss = attention(self.x)
        self.solver = solver_of(S.Momentum(0.05))

    def feed(self) -> None:
        shape = int(self._rng.integers(1, 6)), int(self._rng.integers(2, 9)), WIDTH
        if self._rebuilt:
            self.x = nn.Variable(shape, need_grad=self._input_gradient)
            self.loss = attention(self.x)
        else:
            self.x.reset_shape(shape, True)
        self.x.d = self._rng.standard_normal(shape)
        self.x.grad.zero()

    def trained(self) -> Dict[str, bytes]:
        found = {name: v.d.tobytes() for name, v in nn.get_parameters(grad_only=False).items()}
        return {**found, "gradient of x": self.x.g.tobytes()}


def by_nnabla(sentences: Sentences, accum_grad: int) -> Dict[str, bytes]:
    for _ in range(ITERATIONS):
        sentences.solver.zero_grad()
        for _ in range(accum_grad):
            sentences.feed()
            sentences.loss.forward(clear_no_need_grad=True)
            sentences.loss.backward(clear_buffer=True)
        sentences.solver.update()
    return sentences.trained()


def by_updater(sentences: Sentences, accum_grad: int, **options: Any) -> Dict[str, bytes]:
    def feed() -> None:
        sentences.feed()
        updater.loss = sentences.loss

    updater = AdaptiveLossScalingUpdater(
        sentences.solver, sentences.loss, feed, accum_grad=accum_grad, config=AdaLossConfig(**options)
    )
    for _ in range(ITERATIONS):
        assert updater.update().updated
    return sentences.trained()


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_a_shape_that_changes_before_the_first_update_is_noticed() -> None:
    sentences = Sentences(rebuilt=False, input_gradient=False)
    updater = AdaptiveLossScalingUpdater(sentences.solver, sentences.loss)
    for length in (9, 4):
        sentences.x.reset_shape((2, length, WIDTH), True)
        sentences.x.d = 1.0
        updater.update()
        nodes = updater.scaling.plan.nodes.values()
        fan_in = {s.slot.fan_in for n in nodes if n.type_name == "BatchMatmul" for s in n.scalings}
        assert fan_in == {float(length), 8.0}


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_records_of_held_scales_are_of_the_shapes_of_their_batch() -> None:
    sentences = Sentences(rebuilt=True, input_gradient=False)
    records: List[LayerRecord] = []
    lengths: List[int] = []

    def feed() -> None:
        sentences.feed()
        lengths.append(sentences.x.shape[1])
        updater.loss = sentences.loss

    config = AdaLossConfig(recorder=records.append)
    updater = AdaptiveLossScalingUpdater(sentences.solver, sentences.loss, feed, config=config)
    for _ in range(12):
        updater.update()
    held = [r for r in records if r.reason is Reason.HELD and r.layer == "v/affine/BatchMatmul:1"]
    assert len(held) > 8
    # The values' gradient sums over the queries: as many as the sentence is long.
    first = records[0].iteration
    assert [r.fan_in for r in held] == [float(lengths[r.iteration - first]) for r in held]


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize(
    "options",
    [
        *({"loss_scale_method": method, "delay": delay} for method in METHODS for delay in (0, 1)),
        {"loss_scale_method": "fixed", "fixed_loss_scale": 2.0, "use_bound": False},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize(
    ("rebuilt", "input_gradient", "accum_grad"), [(False, False, 2), (False, True, 1), (True, True, 2)]
)
def test_no_bit_is_another(
    rebuilt: bool, input_gradient: bool, accum_grad: int, options: Dict[str, Any]
) -> None:
    expected = by_nnabla(Sentences(rebuilt=rebuilt, input_gradient=input_gradient), accum_grad)
    again = Sentences(rebuilt=rebuilt, input_gradient=input_gradient)
    assert by_updater(again, accum_grad, **options) == expected
