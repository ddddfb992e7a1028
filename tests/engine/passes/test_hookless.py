# SPDX-License-Identifier: Apache-2.0
"""A pass without hooks: which schedules it can apply, and that it measures what one with hooks measures."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple
from unittest import mock

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, GraphPlan, Method, Needs
from nnabla_adaloss.core.methods import Range
from nnabla_adaloss.core.schedule import ScaleSchedule
from nnabla_adaloss.engine import statistics as shares
from nnabla_adaloss.engine.hookless_steps import HooklessSteps, plan_steps
from nnabla_adaloss.engine.passes.hookless import HooklessPass
from nnabla_adaloss.engine.statistics import Share
from nnabla_adaloss.graph.node import Scaling
from tests.worlds.architectures import (
    embedding_with_tied_output,
    transformer_block,
    unrolled_lstm,
    weight_normalization,
)
from tests.worlds.networks import layers
from tests.worlds.passes import run, settle
from tests.worlds.tampering import Interrupted
from tests.worlds.values import FLOAT, HALF, Values, assert_equal, gradients, zero_grads

EVERY = 3
METHODS = ("approx_range", "amax_history")


@contextmanager
def small_shares() -> Iterator[None]:
    """Divide what is measured, however little it is."""
    with mock.patch.object(shares, "_LEAST", 1):
        yield


def inner(scaling: AdaptiveLossScaling) -> List[nn.Variable]:
    """All that get a gradient but leaves and the loss, whose gradient nnabla keeps with hooks only."""
    return [v for v in scaling.plan.variables if v.parent is not None and v != scaling.variable]


class Seen(NamedTuple):
    """What a pass has kept when nnabla's backward had run."""

    share: Optional[Share]
    kept: List[int]


def kept_by_passes(monkeypatch: pytest.MonkeyPatch) -> List[Seen]:
    seen: List[Seen] = []
    end = HooklessPass.end

    def looked_at(running: HooklessPass) -> None:
        structure, variables = running.plan.structure, running.plan.all_variables
        kept = [p for p in structure.gradients if not variables[p].grad.clear_called]
        seen.append(Seen(running._share, [p for p in kept if p not in structure.roots]))
        end(running)

    monkeypatch.setattr(HooklessPass, "end", looked_at)
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_no_more_than_a_share_is_kept_and_only_until_the_pass_ends(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = AdaptiveLossScaling(
        F.mean(layers(*[5] * 6) ** 2), AdaLossConfig(loss_scale_method=method, measure_every=EVERY)
    )
    seen = kept_by_passes(monkeypatch)
    with small_shares():
        run(scaling, clear=True)
        assert not seen
        for _ in range(2 * EVERY):
            run(scaling, clear=True)
            assert scaling.result.kind == "hookless"
            assert all(v.grad.clear_called for v in inner(scaling))
    assert len(seen) == 2 * EVERY
    structure, asked = scaling.plan.structure, scaling._graph.prepared().statistics.wanted.gradients
    assert bool(asked) == (method == "approx_range")
    everything: Sequence[int] = sorted({*asked, *structure.largest_gradients} - set(structure.roots))
    for cycle in (seen[:EVERY], seen[EVERY:]):
        for share, kept in cycle:
            assert share is not None
            assert set(kept) == set(share.gradients)
            # Values of one size, in EVERY shares.
            assert len(kept) <= -(-len(everything) // EVERY)
        assert sorted(p for _, kept in cycle for p in kept) == everything


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_backward_leaves_everything_as_it_was(method: str) -> None:
    function = Interrupted()
    h = function(layers(5, 5, 5))
    for index in range(3):
        h = F.tanh(PF.affine(h, 5, name=f"behind{index}"))
    loss = F.mean(h**2) * 2.0**-20
    expected = run(loss)
    config = AdaLossConfig(loss_scale_method=method, measure_every=1, use_bound=False)
    scaling = AdaptiveLossScaling(loss, config)
    for _ in range(3):
        run(scaling, clear=True)
    assert scaling.result.kind == "hookless"
    mine = inner(scaling)[3]
    mine.persistent = True
    variables = scaling.plan.all_variables
    persistent = [v.persistent for v in variables]
    arrays = {name: (v.data, v.grad) for name, v in nn.get_parameters().items()}
    before = scaling.state_dict()
    function.left = 1
    with pytest.raises(KeyboardInterrupt):
        run(scaling, clear=True)
    assert [v.persistent for v in variables] == persistent
    assert {name: (v.data, v.grad) for name, v in nn.get_parameters().items()} == arrays
    assert scaling.state_dict()["iteration"] == before["iteration"]
    run(scaling, clear=True)
    assert [v.persistent for v in variables] == persistent
    assert_equal(gradients(), expected)


@dataclass(frozen=True)
class Alternating(Method):
    """Some scale other than 1, not the same for all layers."""

    needs = Needs.STATISTICS

    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        return 4.0 if fan_in % 2 else 0.5


def batch(*shape: int) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def chain(weight: float = 1.0) -> nn.Variable:
    h = batch(4, 3)
    for width in (5, 6, 7):
        h = F.tanh(PF.affine(h, width, name=f"a{width}"))
    return F.mean(h**2) * weight


def residual() -> nn.Variable:
    h = PF.affine(batch(4, 5), 5, name="first")
    return F.mean((h + PF.affine(F.tanh(PF.affine(h, 5, name="inner")), 5, name="branch")) ** 2)


def clipped() -> nn.Variable:
    h = F.clip_grad_by_norm(F.tanh(PF.affine(batch(4, 5), 5, name="first")), 1e-3)
    return F.mean(PF.affine(h, 3, name="last") ** 2)


def unrolled() -> nn.Variable:
    h = PF.affine(batch(4, 5), 5, name="in")
    for _ in range(3):
        h = F.tanh(PF.affine(h, 5, name="again"))
    return F.mean(h**2)


def two_products() -> nn.Variable:
    h = PF.affine(batch(2, 3, 4), 4, base_axis=2, name="q")
    return F.mean(F.batch_matmul(F.tanh(h), F.tanh(h), transpose_b=True) ** 2)


def penalized() -> nn.Variable:
    loss = chain()
    return loss + F.sum(nn.get_parameters()["a6/affine/W"] ** 2)


def recomputed() -> nn.Variable:
    h = F.tanh(PF.affine(batch(4, 5), 5, name="first"))
    h.parent.inputs[0].recompute = True
    h.recompute = True
    return F.mean(PF.affine(h, 3, name="last") ** 2)


class Chosen(NamedTuple):
    plan: GraphPlan
    schedule: ScaleSchedule


def chosen(loss: Any, method: Any = Alternating(), scale: Optional[float] = 8.0, **options: Any) -> Chosen:
    config = AdaLossConfig(loss_scale_method=method, measure_every=EVERY, use_bound=False, **options)
    scaling = AdaptiveLossScaling(loss, config)
    for iteration in range(2):
        settle(scaling, iteration, scale)
    prepared = scaling._graph.prepared()
    found = prepared.schedules.current(2, scale, prepared.loss_weights())
    assert found is not None
    return Chosen(scaling.plan, found)


def planned(found: Chosen, max_bytes: Optional[int] = None) -> Any:
    return plan_steps(found.plan, found.schedule, rounded=False, max_bytes=max_bytes)


def swapped(plan: GraphPlan, steps: HooklessSteps) -> List[Scaling]:
    """The layers whose weights are swapped, in backward order."""
    return [s for node in plan.nodes.values() for s in node.scalings if s.factor_key in steps.factors.keys]


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (two_products, "others read what"),
        (penalized, "others read what"),
        (recomputed, "computed again"),
    ],
)
def test_what_stands_in_the_way_is_said(network: Callable[[], nn.Variable], said: str) -> None:
    steps = planned(chosen(network()))
    assert isinstance(steps, str)
    assert said in steps


def test_what_is_added_at_another_scale_is_unscaled_one_by_one() -> None:
    found = chosen(unrolled())
    steps = planned(found)
    assert isinstance(steps, HooklessSteps)
    assert len({step.scale for step in found.schedule.steps.values()}) > 1
    # After each function but the last one, as the next one adds to weight and bias.
    again = [node.number for node in found.plan.structure.nodes if node.leaves][:3]
    following = steps.leaves.following
    assert [(number, leaf.function) for number in following for leaf in following[number]] == [
        pair for pair in zip(again, again[1:]) for _ in range(2)
    ]


def test_what_clips_is_followed_by_a_call() -> None:
    found = chosen(clipped())
    steps = planned(found)
    assert isinstance(steps, HooklessSteps)
    (clip,) = (node for node in found.plan.structure.nodes if node.non_homogeneous)
    own = found.schedule.steps[clip.number]
    # Before the clipping, that is after the function before it; and after it.
    assert own.before
    assert own.after
    assert steps.between[clip.number] == own.after
    assert sorted(rescale for many in steps.between.values() for rescale in many) == sorted(
        own.before + own.after
    )


@pytest.mark.parametrize("method", ["amax_history", "fixed"])
def test_branches_need_no_call(method: str) -> None:
    loss = residual()
    branch = nn.get_parameters()["branch/affine/W"]
    branch.d = branch.d * 2.0**-12
    steps = planned(chosen(loss, method, None, fixed_loss_scale=4.0))
    assert isinstance(steps, HooklessSteps)
    assert not steps.between
    assert steps.factors.keys


def test_scaled_weights_may_take_no_more_memory_than_they_may() -> None:
    found = chosen(chain())
    # 7x6 and 6x5 numbers of 4 bytes.
    assert isinstance(planned(found, max_bytes=288), HooklessSteps)
    assert isinstance(planned(found, max_bytes=287), str)
    # Weights that no scale changes are not copied.
    assert isinstance(planned(chosen(chain(), "fixed"), max_bytes=0), HooklessSteps)


def test_a_small_loss_weight_is_in_the_seed_where_nothing_is_rounded() -> None:
    loss = chain(2.0**-20)
    emulated = [FormatEmulation(loss, "float16", float_tail=in_float) for in_float in (False, True)]
    rounded, in_float, exact = map(chosen, (*emulated, loss))
    for found in (in_float, exact):
        assert not planned(found).between
        assert found.schedule.seed > 2.0**16
    # Stored in 16 bits, a number on the way might not be what it was.
    assert planned(rounded).between
    assert rounded.schedule.seed < 2.0**16


def seen_scales(loss: Any, scale: Optional[float], hook: Optional[Callable[[Any], None]]) -> List[Any]:
    config = AdaLossConfig(loss_scale_method="amax_history", measure_every=EVERY)
    scaling, found = AdaptiveLossScaling(loss, config), []
    for iteration in range(3 * EVERY):
        run(scaling, scale, iteration=iteration, function_post_hook=hook)
        inner = [v.g.copy() for v in scaling.plan.variables if v.size > 1]
        found.append([*inner, *(v.g.copy() for v in nn.get_parameters().values())])
    return found


@pytest.mark.parametrize("storage", [None, "float16"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_gradients_that_stay_readable_are_the_same(storage: Optional[str], scale: Optional[float]) -> None:
    loss = chain(2.0**-20)
    wrapped = loss if storage is None else FormatEmulation(loss, storage)
    planned_, hooked = seen_scales(wrapped, scale, None), seen_scales(wrapped, scale, lambda f: None)
    for a, b in zip(planned_, hooked):
        for x, y in zip(a, b):
            np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


def test_with_those_of_the_same_iteration_the_first_of_so_many_measures() -> None:
    config = AdaLossConfig("approx_range", measure_every=EVERY, use_bound=False, delay=0)
    scaling = AdaptiveLossScaling(chain(), config)
    seen = [settle(scaling, iteration, 8.0) for iteration in range(2 * EVERY + 1)]
    # It runs twice: to measure the batch, and with the scales that follow.
    assert seen[0] == seen[EVERY] == seen[2 * EVERY] == 2 * ["measuring"]
    assert [kinds for i, kinds in enumerate(seen) if i % EVERY] == 2 * (EVERY - 1) * [["hookless"]]


def test_activations_that_are_computed_again_from_some_iteration_on() -> None:
    loss = recomputed()
    hidden = loss.parent.inputs[0]
    chain = []
    while hidden.parent is not None:
        chain.append(hidden)
        hidden = hidden.parent.inputs[0]
    marked = [v for v in chain if v.recompute]
    assert marked
    for v in marked:
        v.recompute = False
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(loss_scale_method="approx_range"))
    for iteration in range(3):
        if iteration == 2:
            assert scaling.result.kind == "hookless"
            for v in marked:
                v.recompute = True
        scaling.forward(clear_no_need_grad=True)
        scaling.backward(8.0, clear_buffer=True)
    assert scaling.result.kind != "hookless"


def test_gradients_that_all_but_vanish_are_planned_with_a_large_seed() -> None:
    loss = chain() * 2.0**-80
    scaling = AdaptiveLossScaling(loss)
    expected = run(loss)
    for iteration in range(2):
        settle(scaling, iteration)
    assert scaling.result.kind == "hookless"
    assert scaling.loss_scale > 2.0**60
    assert_equal(gradients(), expected)


# Networks that share weights, or multiply activations: no hook either, and not a bit is another one.

RNG = np.random.RandomState


def rows(seed: int, width: int = 3) -> nn.Variable:
    return nn.Variable.from_numpy_array(RNG(seed).randn(4, width).astype(np.float32))


def recurrent() -> nn.Variable:
    h = F.tanh(PF.affine(rows(9), 5, name="start", rng=RNG(0)))
    for step in range(5):
        x = PF.affine(rows(step), 5, name="in", with_bias=False, rng=RNG(2))
        h = F.tanh(PF.affine(h, 5, name="cell", rng=RNG(1)) + x)
    return F.mean(PF.affine(h, 2, name="last", rng=RNG(3)) ** 2)


def siamese() -> nn.Variable:
    twins = []
    for seed in (5, 6):
        h = F.tanh(PF.affine(rows(seed), 6, name="first", rng=RNG(1)))
        twins.append(PF.affine(h, 4, name="second", rng=RNG(2)))
    return F.mean((twins[0] - twins[1]) ** 2) + F.mean(F.sigmoid(twins[0])) * 1e-3


def tied_autoencoder() -> nn.Variable:
    w = PF.get_parameter_or_create("w", (6, 3), RNG(0).randn(6, 3).astype(np.float32))
    x = F.tanh(PF.affine(rows(4, 5), 6, name="stem", rng=RNG(1)))
    out = F.affine(F.tanh(F.affine(x, w)), F.transpose(w, (1, 0)))
    return F.mean((out - x) ** 2)


def three_that_write() -> nn.Variable:
    """One leaf is a bias, a factor, and what is added; and it is written in three components."""
    leaf = PF.get_parameter_or_create("leaf", (5,), RNG(0).randn(5).astype(np.float32))
    spread = F.broadcast(F.reshape(leaf, (1, 5)), (4, 5))
    weights = [
        PF.get_parameter_or_create(f"w{i}", (5, 5), RNG(i + 1).randn(5, 5).astype(np.float32))
        for i in range(3)
    ]
    h = F.tanh(F.affine(rows(4, 5), weights[0], leaf))
    h = F.tanh(F.affine(h, weights[1]) * spread)
    return F.mean(F.affine(F.sigmoid(h + spread), weights[2], leaf) ** 2)


def lstm_twice() -> nn.Variable:
    """Functions that keep references of their own to the arrays of what they share."""
    w = PF.get_parameter_or_create("w", (1, 4, 5, 10), RNG(0).randn(1, 4, 5, 10) * 0.4)
    state = PF.get_parameter_or_create("state", (1, 1, 2, 5), RNG(1).randn(1, 1, 2, 5) * 0.4)
    x = PF.affine(nn.Variable.from_numpy_array(RNG(3).randn(6, 3)), 5, name="in", rng=RNG(2))
    y, h, c = F.lstm(F.reshape(x, (3, 2, 5), inplace=False), state, state, w)
    y = PF.affine(F.reshape(y, (6, 5)), 5, name="between", rng=RNG(4))
    y, _, _ = F.lstm(F.reshape(y, (3, 2, 5)), h, c, w)
    return F.mean(PF.affine(F.reshape(y, (6, 5)), 2, name="last", rng=RNG(3)) ** 2)


def leaf(name: str, *shape: int, need_grad: bool = True) -> nn.Variable:
    initial = RNG(len(shape)).randn(*shape).astype(np.float32) * 0.4
    return PF.get_parameter_or_create(name, shape, initial, need_grad=need_grad)


def normalized_and_plain() -> nn.Variable:
    """Functions with references of their own add to a gradient after others that have none."""
    w, u = leaf("w", 5, 5), leaf("u", 5, need_grad=False)
    h = PF.affine(batch(6, 3), 5, name="in", rng=RNG(2))
    for _ in range(3):
        h = F.tanh(F.affine(h, F.spectral_norm(w, u, itr=1)))
    return F.mean(h**2) + F.mean(F.sigmoid(F.affine(h, w)))


def penalized_lstm() -> nn.Variable:
    w = leaf("w", 1, 4, 5, 10)
    y = F.lstm(batch(3, 2, 5), leaf("h", 1, 1, 2, 5), leaf("c", 1, 1, 2, 5), w)[0]
    return 1e-4 * F.sum(w**2) + F.mean(PF.affine(F.reshape(y, (6, 5)), 2, name="out", rng=RNG(3)) ** 2)


SHARING: Dict[str, Callable[[], nn.Variable]] = {
    f.__name__: f
    for f in (
        transformer_block,
        unrolled_lstm,
        embedding_with_tied_output,
        weight_normalization,
        recurrent,
        siamese,
        tied_autoencoder,
        three_that_write,
        lstm_twice,
        penalized_lstm,
    )
}
# Forward goes on in its parameters.
ALL_SHARING = {**SHARING, "normalized_and_plain": normalized_and_plain}
NO_HOOK: Dict[str, Any] = {}
HOOK: Dict[str, Any] = {"function_post_hook": lambda f: None}


def engine(network: Callable[[], nn.Variable], storage: str) -> AdaptiveLossScaling:
    nn.clear_parameters()
    nn.random.set_parameter_seed(313)
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        loss = network()
        return AdaptiveLossScaling(FormatEmulation(loss, "float16") if storage == "emulated" else loss)


def trained(
    network: Callable[[], nn.Variable], storage: str, hooks: Dict[str, Any], batches: int
) -> Tuple[List[str], List[Values], Any]:
    """The kinds of all passes, the gradients of each iteration, and the last scales."""
    scaling = engine(network, storage)
    kinds, found = [], []
    for iteration in range(4):
        zero_grads()
        for _ in range(batches):
            scaling.forward(clear_no_need_grad=True)
            scaling.backward(None, clear_buffer=True, iteration=iteration, **hooks)
            kinds.append(scaling.result.kind)
        found.append(gradients())
        for v in nn.get_parameters().values():
            v.d = v.d - 0.01 * np.clip(v.g, -1.0, 1.0)
    return kinds, found, scaling.result.schedule.components


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("storage", ["float", "emulated", "native"])
@pytest.mark.parametrize("network", sorted(ALL_SHARING))
def test_what_shares_a_scale_is_as_with_hooks(network: str, storage: str, batches: int) -> None:
    kinds, found, scales = trained(ALL_SHARING[network], storage, NO_HOOK, batches)
    watched, expected, same = trained(ALL_SHARING[network], storage, HOOK, batches)
    assert set(kinds[:batches]) <= {"measuring", "hookless"}
    assert set(kinds[batches:]) == {"hookless"}
    assert "hookless" not in watched
    assert scales == same
    for one, other in zip(found, expected):
        for name, gradient in other.items():
            np.testing.assert_array_equal(one[name].view(np.uint32), gradient.view(np.uint32), err_msg=name)


@pytest.mark.parametrize("network", sorted(SHARING))
def test_what_shares_a_scale_has_the_gradients_that_nnabla_computes(network: str) -> None:
    expected = run(engine(SHARING[network], "float").variable)
    for storage in ("float", "emulated"):
        scaling = engine(SHARING[network], storage)
        for iteration in range(3):
            settle(scaling, iteration, clear=False)
        assert scaling.result.kind == "hookless"
        if storage == "float":
            assert_equal(gradients(), expected)
        # Some cancel out but for what is rounded.
        found, exact = (
            np.concatenate([one[name].ravel() for name in expected]) for one in (gradients(), expected)
        )
        assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)
