# SPDX-License-Identifier: Apache-2.0
"""Gradients of leaves that go as lists are, to the bit, what they are one by one."""

from __future__ import annotations

from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, AdaptiveLossScalingUpdater
from nnabla_adaloss.engine.hookless_steps import HooklessSteps, LeafList
from nnabla_adaloss.engine.passes.hookless import HooklessPass
from tests.worlds.values import FLOAT, HALF, constant, data

CONTEXTS = {"float": FLOAT, "half": HALF}


def network(context: nn.Context) -> nn.Variable:
    """A convolution with normalization, a layer that is used twice, and one that the loss ignores."""
    rng = np.random.RandomState(0)
    with nn.context_scope(context):
        h = PF.convolution(data(4, 2, 5, 5, seed=1), 3, (3, 3), name="conv", rng=rng)
        h = F.relu(PF.batch_normalization(h, name="bn"))
        h = F.tanh(PF.affine(h, 6, name="first", rng=rng))
        for _ in range(2):
            h = F.tanh(PF.affine(h, 6, name="shared", rng=rng))
        PF.affine(h, 2, name="ignored", rng=rng)
        labels = constant(np.arange(4).reshape(4, 1) % 3)
        return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="last", rng=rng), labels))


def train(context: nn.Context) -> Dict[str, bytes]:
    nn.clear_parameters()
    loss, solver = network(context), S.Adam(0.01)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss)
    for _ in range(12):
        updater.update()
    assert updater.scaling.result.kind == "hookless"
    return {name: p.d.tobytes() for name, p in nn.get_parameters(grad_only=False).items()}


@pytest.mark.parametrize("context", CONTEXTS)
def test_lists_change_no_bit(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = train(CONTEXTS[context])
    monkeypatch.setattr(HooklessSteps, "leaf_lists", property(lambda steps: ([], steps.leaves)))
    assert train(CONTEXTS[context]) == listed


def test_all_but_those_with_several_contributions_go_as_lists_in_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists: List[List[str]] = []
    begin = LeafList.begin

    def note(one: LeafList, masters: List[nn.NdArray], pool: Any) -> None:
        names = {hash(v.grad): name for name, v in nn.get_parameters().items()}
        lists.append(sorted(names[hash(master)] for master in masters))
        begin(one, masters, pool)

    monkeypatch.setattr(LeafList, "begin", note)
    train(HALF)
    layers = ("bn/bn", "conv/conv", "first/affine", "last/affine")
    weights = {"bn/bn": ("beta", "gamma")}
    assert lists[-1] == [f"{layer}/{w}" for layer in layers for w in weights.get(layer, ("W", "b"))]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_pass_that_is_given_up_leaves_the_masters_lazily_zero(
    context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = AdaptiveLossScaling(network(CONTEXTS[context]))
    parameters = nn.get_parameters().values()
    for _ in range(3):
        for v in parameters:
            v.grad.zero()
        scaling.forward()
        scaling.backward()
    for v in parameters:
        v.grad.zero()
    masters = [hash(v.grad) for v in parameters]

    def fail(running: HooklessPass) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HooklessPass, "end", fail)
    scaling.forward()
    with pytest.raises(KeyboardInterrupt):
        scaling.backward()
    assert [hash(v.grad) for v in parameters] == masters
    # Contributions to a leaf that is used twice were added to its master one by one.
    assert all(v.grad.zeroing for name, v in nn.get_parameters().items() if "shared" not in name)


def test_parameters_of_another_size_are_followed() -> None:
    """`reset_shape` between two passes: what is kept for a list is made again."""
    x = nn.Variable((2, 3))
    x.d = 1.0
    with nn.context_scope(HALF):
        w = nn.parameter.get_parameter_or_create("w", (3,), np.ones(3, np.float32))
        loss = F.sum(x * F.broadcast(F.reshape(w, (1, 3)), (2, 3)))
    scaling = AdaptiveLossScaling(loss)
    for _ in range(4):
        w.grad.zero()
        scaling.forward()
        scaling.backward()
        np.testing.assert_array_equal(w.g, [2.0, 2.0, 2.0])
    gradients = [nn.NdArray((3,)), nn.NdArray((3,))]
    for gradient in gradients:
        w.grad = gradient
        gradient.zero()
        scaling.forward()
        scaling.backward()
        np.testing.assert_array_equal(gradient.data, [2.0, 2.0, 2.0])


@pytest.mark.parametrize("one_function", [True, False])
def test_a_new_variable_that_shares_a_gradient_array_gets_steps_of_its_own(one_function: bool) -> None:
    w = nn.parameter.get_parameter_or_create("w", (3,), np.ones(3, np.float32))
    scalings: List[AdaptiveLossScaling] = []
    for _ in range(3):
        # As in a loop that builds the graph for each batch.
        other = nn.Variable(w.shape, need_grad=True)
        other.data, other.grad = w.data, w.grad
        with nn.context_scope(HALF):
            loss = F.sum(w * other if one_function else w * 2.0 + F.tanh(other))
        scalings.append(AdaptiveLossScaling(loss))
        for before in scalings[-2:-1]:
            scalings[-1].go_on_from(before)
        w.grad.zero()
        scalings[-1].forward()
        scalings[-1].backward()
        np.testing.assert_allclose(w.g, 2.0 if one_function else 2.42, rtol=1e-3)
    assert [one.result.kind for one in scalings] == ["measuring", "hookless", "hookless"]
