# SPDX-License-Identifier: Apache-2.0
"""Planted faults are named, sound networks are left in peace, and nothing is left behind."""

from __future__ import annotations

import random
from typing import Any, Callable, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.random
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FormatEmulation,
    Way,
    diagnose,
)

from .nets import PLANTED, SOUND, Built


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named_with_its_remedy(name: str) -> None:
    planted = PLANTED[name]
    loss, feed = planted.build()
    diagnosis = diagnose(loss, feeder=feed)
    assert diagnosis.verdict.needs is planted.needs, diagnosis
    first = diagnosis.verdict.causes[0]
    assert (first.layer, first.kind.value) == (planted.layer, planted.kind), diagnosis
    assert planted.remedy in str(diagnosis), diagnosis
    (line,) = [layer.line for layer in diagnosis.verdict.layers if layer.name == planted.layer]
    assert first.what in line
    if first.fatal:
        assert str(first) in diagnosis.verdict.line


def test_layers_that_need_scales_apart_are_named() -> None:
    loss, feed = PLANTED["branches apart"].build()
    line = diagnose(loss, feeder=feed).verdict.line
    assert line.startswith("Layers quiet_fc/affine and loud_head/affine need scales 2^35 apart: use adaptive")


@pytest.mark.parametrize("name", SOUND)
def test_where_fp16_and_fp32_agree_nothing_is_needed(name: str) -> None:
    loss, feed = SOUND[name]()
    diagnosis = diagnose(loss, feeder=feed)
    assert diagnosis.verdict.line == "float16 needs no scaling here."
    assert diagnosis.verdict.needs is Way.NONE
    assert not diagnosis.verdict.causes


def test_underflow_is_what_the_emulation_loses() -> None:
    loss, feed = PLANTED["tiny loss weight"].build()
    assert feed is not None
    feed()
    diagnosis = diagnose(loss)
    emulation = FormatEmulation(loss)
    emulation.forward()
    emulation.backward(diagnosis.numbers.scales[Way.ONE])
    assert diagnosis.numbers.scales[Way.ONE] == 2.0**37
    (head,) = [layer for layer in diagnosis.numbers.layers if layer.name == "head/affine"]
    W = nn.get_parameters()["head/affine/W"]
    stored = W.g / 2.0**37
    W.grad.zero()
    loss.forward()
    loss.backward()
    np.testing.assert_allclose(
        np.linalg.norm(stored - W.g) / np.linalg.norm(W.g), head.kept[Way.ONE].error, rtol=0.5
    )
    assert head.kept[Way.NONE].underflow == 1.0


def noisy_net() -> Built:
    """Everything that passes could leave a trace in."""
    x, t = nn.Variable((8, 6)), nn.Variable((8, 1))
    h = PF.batch_normalization(PF.affine(x, 6, name="fc1"), name="bn")
    h = F.dropout(F.relu(h) + F.randn(shape=h.shape) * 0.1, 0.5)
    loss = F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="fc2"), t))

    def feed() -> None:
        x.d, t.d = np.random.randn(*x.shape), np.random.randint(0, 3, t.shape)  # noqa: NPY002
        x.d += random.random()

    return loss, feed


def state_of_everything(x: Any) -> Dict[str, bytes]:
    found = {f"{name}.data": v.d.tobytes() for name, v in nn.get_parameters(grad_only=False).items()}
    found.update({f"{name}.grad": v.g.tobytes() for name, v in nn.get_parameters().items()})
    found["input"] = x.d.tobytes()
    found["numpy"] = np.random.get_state()[1].tobytes()  # noqa: NPY002
    found["python"] = repr(random.getstate()).encode()
    found["nnabla"] = nnabla.random.prng.get_state()[1].tobytes()
    return found


def test_everything_is_left_as_it_was() -> None:
    loss, feed = noisy_net()
    assert feed is not None
    parameters = nn.get_parameters()
    feed()
    loss.forward()
    for v in parameters.values():
        v.grad.zero()
    loss.backward()
    x = loss.parent.inputs[0]
    while x.parent is not None:
        x = x.parent.inputs[0]
    drawn = F.randn(shape=(5,))
    nn.seed(3)
    drawn.forward()
    expected = drawn.d.copy()
    nn.seed(3)
    before = state_of_everything(x)
    parameters["fc2/affine/b"].grad.zero()

    diagnose(loss, feeder=feed)

    # Lazily zero, as it was: a solver would pass over it.
    assert parameters["fc2/affine/b"].grad.zeroing
    after = state_of_everything(x)
    assert {name for name in before if after[name] != before[name]} == {"fc2/affine/b.grad"}
    drawn.forward()
    np.testing.assert_array_equal(drawn.d, expected)


def test_all_passes_draw_the_same_dropout() -> None:
    # Else errors would be of the order of one.
    loss, feed = noisy_net()
    diagnosis = diagnose(loss, feeder=feed)
    for layer in diagnosis.numbers.layers:
        assert layer.floor < 0.05
        assert all(kept.error < 0.05 and kept.underflow < 0.05 for kept in layer.kept.values())


@pytest.mark.parametrize(
    "updater_of",
    [
        lambda *a: DynamicLossScalingUpdater(*a),
        lambda *a: AdaptiveLossScalingUpdater(*a, storage="float16"),
    ],
)
def test_an_updater_is_taken_with_its_feeder(updater_of: Callable[..., Any]) -> None:
    loss, feed = SOUND["MLP"]()
    calls = []
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())

    def counting() -> None:
        calls.append(1)
        assert feed is not None
        feed()

    updater = updater_of(solver, loss, counting)
    updater.update()
    fed = len(calls)
    diagnosis = diagnose(updater, batches=3)
    assert (diagnosis.numbers.batches, len(calls) - fed) == (3, 3)
    assert diagnosis.verdict.needs is Way.NONE
    updater.update()


def test_without_a_feeder_the_data_that_is_there_is_one_batch() -> None:
    loss, feed = SOUND["MLP"]()
    assert feed is not None
    feed()
    assert diagnose(loss, batches=7).numbers.batches == 1


def test_other_formats() -> None:
    loss, feed = SOUND["MLP"]()
    assert diagnose(loss, "bfloat16", feed).verdict.line == "bfloat16 needs no scaling here."
    assert diagnose(loss * 1e-9, "bfloat16", feed).verdict.needs is Way.NONE
    assert diagnose(loss * 1e-6, "fp8_hybrid", feed).verdict.needs is Way.ONE


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda loss: diagnose(3), TypeError, "loss_or_updater must be a loss Variable.*got int"),
        (lambda loss: diagnose(loss, feeder=3), TypeError, "feeder must be callable"),
        (lambda loss: diagnose(loss, batches=0), ValueError, "batches=0 must be 1 or more"),
        (lambda loss: diagnose(loss, "float17"), ValueError, "storage='float17' is unknown"),
        (lambda loss: diagnose(loss.parent.inputs[0]), ValueError, r"shape \(32, 1\), not one element"),
        (lambda loss: diagnose(nn.Variable((1,))), ValueError, "loss needs no gradient"),
    ],
)
def test_refused(call: Callable[[nn.Variable], Any], error: Any, message: str) -> None:
    loss, _ = SOUND["MLP"]()
    with pytest.raises(error, match=message):
        call(loss)


def test_a_half_context_is_refused() -> None:
    with nn.context_scope(nn.Context(["cpu:half"], "CpuCachedArray", "0")):
        loss = F.mean(PF.affine(nn.Variable((2, 3)), 2))
    with pytest.raises(ValueError, match="there is no fp32 to compare with"):
        diagnose(loss)


def test_a_feeder_that_fails_leaves_everything_as_it_was() -> None:
    loss, _ = SOUND["MLP"]()
    before = {name: v.d.copy() for name, v in nn.get_parameters().items()}

    def fail() -> None:
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"):
        diagnose(loss, feeder=fail)
    for name, v in nn.get_parameters().items():
        np.testing.assert_array_equal(v.d, before[name])
