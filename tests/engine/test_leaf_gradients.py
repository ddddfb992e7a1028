# SPDX-License-Identifier: Apache-2.0
"""Parameter gradients get into their fp32 masters unscaled; what one batch has spoilt stays its own."""

from __future__ import annotations

import math
from typing import Any, Dict, FrozenSet, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation
from nnabla_adaloss.core.components import component_of_contribution
from nnabla_adaloss.engine.leaf_gradients import Contribution, WrittenLeaves
from nnabla_adaloss.engine.passes import hookless
from tests.worlds.networks import layers, mlp
from tests.worlds.passes import look, run, settle
from tests.worlds.tampering import Interrupted, Sometimes
from tests.worlds.values import Values, assert_equal, bits, data, gradients, zero_grads


@pytest.mark.parametrize("hook", [None, look])
def test_earlier_contents_of_a_gradient_are_not_rounded_by_odd_scales(hook: Any) -> None:
    scaling = AdaptiveLossScaling(mlp(0.0), AdaLossConfig("fixed", power_of_two=False))
    held = np.linspace(0.1, 0.9, 64, dtype=np.float32)
    for _ in range(2):
        for v in nn.get_parameters().values():
            v.g = held[: v.size].reshape(v.shape)
        scaling.forward()
        scaling.backward(1000.0, function_post_hook=hook)
    for v in nn.get_parameters().values():
        np.testing.assert_array_equal(v.g, held[: v.size].reshape(v.shape))


class FineTuning:
    """A head that is trained on layers that no solver has, and on an input whose gradient somebody wants."""

    def __init__(self) -> None:
        rng = np.random.RandomState(0)
        self.x, self.weight = nn.Variable((4, 3), need_grad=True), nn.Variable((1,))
        h = F.tanh(PF.affine(F.tanh(PF.affine(self.x, 5, name="one", rng=rng)), 5, name="two", rng=rng))
        self.loss = F.mean(
            PF.affine(h, 2, name="head", rng=rng) ** 2 * F.broadcast(F.reshape(self.weight, (1, 1)), (4, 2))
        )
        self.parameters = nn.get_parameters()
        self.solver = S.Sgd(0.01)
        self.solver.set_parameters({n: v for n, v in self.parameters.items() if n.startswith("head")})
        self.x.grad.zero()

    def feed(self, weight: float) -> None:
        self.x.d = np.random.default_rng(1).standard_normal(self.x.shape)
        self.weight.d = weight


@pytest.mark.parametrize("options", [{}, {"on_overflow": "next"}, {"accum_grad": 2}])
@pytest.mark.parametrize("storage", [None, "float16"])
def test_a_skipped_batch_is_not_told_of_the_next_ones(storage: Optional[str], options: Any) -> None:
    n, size = FineTuning(), options.get("accum_grad", 1)
    weights = iter(np.repeat([1.0, 1.0, np.nan, 1.0, 1.0, np.nan, 1.0], size))
    updater = AdaptiveLossScalingUpdater(
        n.solver, n.loss, lambda: n.feed(next(weights)), storage=storage, on_nonfinite_loss="skip", **options
    )
    results = [updater.update() for _ in range(7)]
    assert [r.updated for r in results] == [True, True, False, True, True, False, True]
    assert [bool(r.nonfinite_layers) for r in results] == [not r.updated for r in results]
    assert results[2].nonfinite_layers == results[5].nonfinite_layers
    assert updater.scaling.found_inf == []
    assert np.isnan(n.parameters["one/affine/W"].g).all()


# Leaves that several functions write in a pass without hooks.


class Unrolled:
    """One layer three times, and something between the first two that may be interrupted."""

    def __init__(self, storage: Optional[str], held: Optional[float], **hooks: Any) -> None:
        h, self.interrupted = layers(5), Interrupted()
        rng = np.random.RandomState(0)
        for step in range(3):
            h = F.tanh(PF.affine(h, 5, name="again", rng=rng))
            h = self.interrupted(h) if step == 0 else h
        loss = F.mean(PF.affine(h, 2, name="last", rng=rng) ** 2)
        wrapped = loss if storage is None else FormatEmulation(loss, storage)
        self.scaling = AdaptiveLossScaling(wrapped, AdaLossConfig(measure_every=2))
        self.held, self.hooks = held, hooks

    def run(self) -> Values:
        """The gradients of a pass, in which they were zero, or held something."""
        zero_grads()
        for v in nn.get_parameters().values() if self.held is not None else ():
            v.grad.fill(self.held)
        self.scaling.forward(clear_no_need_grad=True)
        self.scaling.backward(clear_buffer=True, **self.hooks)
        return {name: bits(gradient) for name, gradient in gradients().items()}

    def arrays(self) -> Any:
        parameters = {name: (v.data, v.grad) for name, v in nn.get_parameters().items()}
        return parameters, [v.persistent for v in self.scaling.graph.variables]


HELD = [None, 0.25]
HOOKS: List[Any] = [{}, {"function_post_hook": look}]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("storage", [None, "float16", "bfloat16", "float8_e5m2"])
def test_three_contributions_to_a_leaf_are_rounded_one_by_one(
    storage: Optional[str], held: Optional[float]
) -> None:
    found = []
    for hooks in HOOKS:
        n = Unrolled(storage, held, **hooks)
        found.append([n.run() for _ in range(3)][-1])
        assert (n.scaling.result.kind == "hookless") == (not hooks)
    assert_equal(*found)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("storage", [None, "float16"])
def test_an_interruption_between_two_functions_that_write_a_leaf(
    storage: Optional[str], held: Optional[float]
) -> None:
    after = []
    for hooks in HOOKS:
        n = Unrolled(storage, held, **hooks)
        for _ in range(3):
            expected = n.run()
        own = n.scaling.graph.variables[n.scaling.plan.gradients[3]]
        own.persistent = True
        arrays = n.arrays()
        n.interrupted.left = 1
        with pytest.raises(KeyboardInterrupt):
            n.run()
        assert n.arrays() == arrays
        after.append(gradients())
        # Nor is anything left to be done: the next pass is as if there had been none.
        assert_equal(n.run(), expected)
        assert n.arrays() == arrays
    before = 0.0 if held is None else held
    hookless, hooked = after
    if storage is None and held is None:
        # There nnabla writes to what was zero, and it is zero again.
        assert not any(gradient.any() for gradient in hookless.values())
        return
    # What was held is there, with what the functions have added that ran: all of a contribution, or nothing.
    assert all((hookless[name] == hooked[name]).all() for name in hooked if name.startswith("again"))
    for name, gradient in hookless.items():
        assert (gradient == before).all() or (gradient == hooked[name]).all()
    assert (hookless["again/affine/W"] != before).any()
    assert (hookless["layer0/affine/W"] == before).all()


@pytest.mark.parametrize("storage", [None, "float16"])
@pytest.mark.parametrize("writing", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_some_functions_that_share_a_leaf_may_write_nothing(writing: Any, storage: Optional[str]) -> None:
    found = []
    for hooks in HOOKS:
        nn.clear_parameters()
        rng = np.random.RandomState(0)
        w, h = PF.get_parameter_or_create("w", (4, 5), rng.randn(4, 5)), data(4, 5)
        for index in range(3):
            function = Sometimes()
            function.writes = index in writing
            h = F.tanh(PF.affine(h, 5, name=f"a{index}", rng=rng) + function(w))
        loss = F.mean(h**2)
        scaling = AdaptiveLossScaling(loss if storage is None else FormatEmulation(loss, storage))
        for _ in range(3):
            zero_grads()
            for _ in range(2):
                scaling.forward()
                scaling.backward(**hooks)
                assert w.grad.zeroing == (not writing)
        assert (scaling.result.kind == "hookless") == (not hooks)
        found.append({"w": bits(w.g.copy())})
    assert_equal(*found)


# What is asked of the gradients of parameters as they are.


def entry(leaf: int, node: Any, scale: float = 2.0, *, in_sum: bool = False) -> Contribution:
    return Contribution(leaf, node, (nn.Variable((2,), need_grad=True),), scale, exact=True, in_sum=in_sum)


def test_contributions_to_a_leaf_are_reported_singly_or_as_a_sum_for_the_first() -> None:
    def told(*written: Contribution) -> List[Any]:
        components = AdaptiveLossScaling(F.mean(layers(2))).plan.components(by_layer=True)
        return [(one.leaf, one.node, place) for one, place in WrittenLeaves(written, components).measured]

    first = entry(0, 7), entry(1, 6)
    assert told(*first, entry(0, 5, 8.0)) == [(0, 7, 0), (1, 6, 1), (0, 5, 2)]
    # With another scale a sum counts for who has added: the first component's scale says nothing about it.
    assert told(*first, entry(0, 5, 8.0, in_sum=True)) == [(0, 7, 0), (1, 6, 1), (0, 5, 2)]
    assert told(*first, entry(0, 5, in_sum=True)) == [(0, 7, 2), (1, 6, 1)]
    # What an earlier batch has left in a gradient is not told apart either, and is no matter of this one.
    assert told(*[entry(0, 7, in_sum=True)] * 2) == []


def written_by(scaling: AdaptiveLossScaling, leaves: FrozenSet[int]) -> WrittenLeaves:
    """A contribution to each of some leaves."""
    plan = scaling.plan
    return WrittenLeaves(
        [entry(leaf, node) for node in plan.nodes for leaf in node.leaves if leaf in leaves],
        plan.components(by_layer=True),
    )


def test_a_component_has_the_largest_finite_magnitude_of_the_leaves_that_count() -> None:
    scaling = AdaptiveLossScaling(F.mean(layers(2, 3, 4) ** 2))
    everything = frozenset(scaling.plan.leaves)
    written = written_by(scaling, everything)
    component_of = written.components.of
    of = [component_of_contribution(one.node, one.leaf, component_of) for one in written.contributions]
    assert sorted(of) == sorted([*set(of)] * 2)
    random = np.random.default_rng(0)
    for leaves in (everything, frozenset(sorted(everything)[::2]), everything, frozenset()):
        for _ in range(5):
            largest = random.random(6).tolist()
            largest[random.integers(6)] = math.inf
            expected: Dict[int, float] = {}
            for one, component, amax in zip(written.contributions, of, largest):
                if one.leaf in leaves and amax < math.inf:
                    expected[component] = max(amax, expected.get(component, 0.0))
            assert written.amax_of_components(largest, leaves) == expected


def test_passes_that_write_the_same_leaves_share_them_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: List[WrittenLeaves] = []
    end = hookless.HooklessPass.end
    monkeypatch.setattr(hookless.HooklessPass, "end", lambda self: taken.append(end(self)) or taken[-1])
    function = Sometimes()
    function.writes = True
    h = F.mean(layers(5, 2) ** 2)
    scaling = AdaptiveLossScaling(h + F.mean(function(PF.get_parameter_or_create("w", (3,)))))
    settle(scaling)
    for _ in range(3):
        run(scaling)
    first, *others = taken[-3:]
    assert all(one is first for one in others)
    function.writes = False
    run(scaling)
    assert taken[-1] is not first
    assert len(taken[-1].contributions) == len(first.contributions) - 1 == 4
