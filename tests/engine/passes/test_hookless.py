# SPDX-License-Identifier: Apache-2.0
"""A pass without hooks: which schedules it can apply, and that it measures what one with hooks measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, Method, Needs
from nnabla_adaloss.core.methods import Range
from nnabla_adaloss.engine import slices
from nnabla_adaloss.engine.passes.hookless import HooklessPass
from nnabla_adaloss.engine.prepared_graph import PreparedGraph
from nnabla_adaloss.engine.slices import Slice
from tests.worlds.architectures import NETWORKS
from tests.worlds.networks import layers
from tests.worlds.passes import Noting, any_scales, look, run, settle
from tests.worlds.values import FLOAT, HALF, Values, assert_equal, bits, data, gradients, zero_grads

EVERY = 3
HOOK: Dict[str, Any] = {"function_post_hook": look}


class Observations(NamedTuple):
    """What a pass has kept when nnabla's backward had run."""

    measured: Optional[Slice]
    kept: List[int]


@pytest.mark.parametrize("method", ["approx_range", "amax_history"])
def test_no_more_than_a_slice_is_kept_and_only_until_the_pass_ends(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: List[Observations] = []
    end = HooklessPass.end

    def looked_at(running: HooklessPass) -> Any:
        variables = running._prepared.graph.variables
        kept = [p for p in structure.gradients if not variables[p].grad.clear_called]
        seen.append(Observations(running._decision.slice, [p for p in kept if p not in structure.roots]))
        return end(running)

    monkeypatch.setattr(HooklessPass, "end", looked_at)
    # Divide what is measured, however little it is.
    monkeypatch.setattr(slices, "_LEAST", 1)
    loss = F.mean(layers(*[5] * 6) ** 2)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(method, measure_every=EVERY))
    structure = scaling.plan
    for iteration in range(2 * EVERY + 1):
        run(scaling, clear=True)
        assert scaling.result.kind == ("hookless" if iteration else "measuring")
        # nnabla keeps the gradient of the loss with hooks only.
        inner = [v for v in map(scaling.graph.variables.__getitem__, scaling.plan.gradients) if v != loss]
        assert all(v.grad.clear_called for v in inner) or not iteration
    outputs = {node.outputs[0] for node, _ in structure.layer_inputs.values()}
    asked = outputs if method == "approx_range" else set()
    everything: Sequence[int] = sorted({*asked, *structure.largest_gradients} - set(structure.roots))
    for cycle in (seen[:EVERY], seen[EVERY:]):
        for measured, kept in cycle:
            assert measured is not None
            assert set(kept) == set(measured.gradients)
            # Gradients of one size, in EVERY slices.
            assert len(kept) <= -(-len(everything) // EVERY)
        assert sorted(p for _, kept in cycle for p in kept) == everything


def test_activations_that_a_layer_multiplies_are_measured_again() -> None:
    x, first, second = (nn.Variable(shape, need_grad=True) for shape in ((2, 4, 4), (1, 1, 1), (1, 1, 1)))
    x.d, first.d, second.d = np.linspace(-1.0, 1.0, 32).reshape(x.shape), 1.0, 1.0
    a, b = (x * F.broadcast(factor, x.shape) for factor in (first, second))
    loss = F.mean(F.batch_matmul(a, b) ** 2)
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"), AdaLossConfig(measure_every=EVERY))
    position = scaling.graph.positions[hash(b)]
    amaxes = []
    for iteration in range(3 * EVERY + 1):
        second.d = 1.0 if iteration <= EVERY else 16.0
        run(scaling, clear=True)
        assert scaling.result.kind == ("hookless" if iteration else "measuring")
        seen = scaling._graph.current().statistics.data(position)
        amaxes.append(None if seen is None else seen.abs_max)
    assert (amaxes[EVERY], amaxes[-1]) == (1.0, 16.0)


@dataclass(frozen=True)
class Alternating(Method):
    """Some scale other than 1, not the same for all layers."""

    needs = Needs.STATISTICS

    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        return 4.0 if fan_in % 2 else 0.5


def trained(
    loss: Any, method: Any = Alternating(), scale: Optional[float] = 8.0, **options: Any
) -> AdaptiveLossScaling:
    """An engine whose last pass had the scales of the one before."""
    config = AdaLossConfig(method, measure_every=EVERY, use_bound=False, **options)
    scaling = AdaptiveLossScaling(loss, config)
    for iteration in range(3):
        settle(scaling, iteration, scale)
    return scaling


def chain(weight: float = 1.0) -> nn.Variable:
    h = data(4, 3)
    for width in (5, 6, 7):
        h = F.tanh(PF.affine(h, width, name=f"a{width}"))
    return F.mean(h**2) * weight


def residual() -> nn.Variable:
    h = PF.affine(data(4, 5), 5, name="first")
    branch = PF.affine(F.tanh(PF.affine(h, 5, name="inner")), 5, name="branch")
    weight = nn.get_parameters()["branch/affine/W"]
    weight.d = weight.d * 2.0**-12
    return F.mean((h + branch) ** 2)


def large() -> nn.Variable:
    h = data(1, 1024)
    for index in range(3):
        h = PF.affine(h, 1024, name=f"large{index}")
    return F.mean(h**2)


def clipped() -> nn.Variable:
    h = F.clip_grad_by_norm(F.tanh(PF.affine(data(4, 5), 5, name="first")), 1e-3)
    return F.mean(PF.affine(h, 3, name="last") ** 2)


def unrolled() -> nn.Variable:
    h = PF.affine(data(4, 5), 5, name="in")
    for _ in range(3):
        h = F.tanh(PF.affine(h, 5, name="again"))
    return F.mean(h**2)


def two_products() -> nn.Variable:
    h = PF.affine(data(2, 3, 4), 4, base_axis=2, name="q")
    return F.mean(F.batch_matmul(F.tanh(h), F.tanh(h), transpose_b=True) ** 2)


def penalized() -> nn.Variable:
    loss = chain()
    return loss + F.sum(nn.get_parameters()["a6/affine/W"] ** 2)


def recomputed() -> nn.Variable:
    with nn.recompute():
        h = F.tanh(PF.affine(data(4, 5), 5, name="first"))
    return F.mean(PF.affine(h, 3, name="last") ** 2)


@pytest.mark.parametrize(
    ("network", "kind"),
    [
        (chain, "hookless"),
        (large, "hookless"),
        (clipped, "hookless"),
        (unrolled, "hookless"),
        (two_products, "others read the weight of q/affine/BatchMatmul"),
        (penalized, "others read the weight of a6/affine"),
        (recomputed, "activations are computed again in backward"),
    ],
)
def test_obstacles_are_named(network: Callable[[], nn.Variable], kind: str) -> None:
    loss = network()
    assert trained(loss).result.kind.startswith(kind)
    # Whatever way they came, they are those of nnabla's loop.
    found = gradients()
    assert_equal(found, run(loss))


@pytest.mark.parametrize("method", ["amax_history", "fixed"])
def test_branches_need_no_call_and_clipping_functions_are_followed_by_one(method: str) -> None:
    for network, called in ((residual, False), (clipped, True)):
        loss = Noting(network())
        scaling = trained(loss, method, None, fixed_loss_scale=4.0)
        assert (scaling.result.kind, loss.hooked) == ("hookless", called)
        assert network is clipped or {*scaling.layer_scales.values()} != {1.0}


def test_a_small_loss_weight_is_in_the_seed_where_nothing_is_rounded() -> None:
    loss = chain(2.0**-20)
    emulated = [FormatEmulation(loss, "float16", float_tail=in_float) for in_float in (False, True)]
    # Stored in 16 bits, a number on the way might not be what it was.
    rounded, *exact = (trained(one).result.schedule.seed_scale for one in (*emulated, loss))
    assert rounded < 2.0**16 < min(exact)


def test_the_first_of_several_iterations_measures_with_delay_0() -> None:
    config = AdaLossConfig("approx_range", measure_every=EVERY, use_bound=False, delay=0)
    scaling = AdaptiveLossScaling(chain(), config)
    seen = [settle(scaling, iteration, 8.0) for iteration in range(2 * EVERY + 1)]
    # It runs twice: to measure the batch, and with the scales that follow.
    assert seen[0] == seen[EVERY] == seen[2 * EVERY] == 2 * ["measuring"]
    assert [kinds for i, kinds in enumerate(seen) if i % EVERY] == 2 * (EVERY - 1) * [["hookless"]]


def test_activations_that_are_computed_again_from_some_iteration_on() -> None:
    loss = chain()
    hidden = loss.parent.inputs[0].parent.inputs[0].parent.inputs[0]
    scaling = AdaptiveLossScaling(loss, AdaLossConfig("approx_range"))
    for again in (False, False, True):
        hidden.recompute = again
        settle(scaling, scaling.iteration, 8.0)
        kind = scaling.result.kind
        assert again == kind.startswith("activations are computed again") or kind == "measuring"


# Networks that share weights, or multiply activations: no hook either, and not a bit is another one.

SHARING = [
    "transformer_block",
    "unrolled_lstm",
    "embedding_with_tied_output",
    "weight_normalization",
    "three_that_write",
    "lstm_twice",
    "normalized_and_plain",
]


def batches_of(network: str, storage: str, batches: int, **hooks: Any) -> Tuple[List[str], List[Values], Any]:
    """The kinds of all passes, the gradients of each iteration, and the last scales."""
    nn.clear_parameters()
    nn.random.set_parameter_seed(313)
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        loss = NETWORKS[network]()
        scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16") if storage == "emulated" else loss)
    kinds, found = [], []
    for iteration in range(4):
        zero_grads()
        for _ in range(batches):
            scaling.forward(clear_no_need_grad=True)
            scaling.backward(None, clear_buffer=True, iteration=iteration, **hooks)
            kinds.append(scaling.result.kind)
        found.append({name: bits(g) for name, g in gradients().items()})
        for v in nn.get_parameters().values():
            v.d = v.d - 0.01 * np.clip(v.g, -1.0, 1.0)
    return kinds, found, scaling.result.schedule.component_scales


@pytest.mark.parametrize(("storage", "batches"), [("float", 1), ("emulated", 2), ("native", 1)])
@pytest.mark.parametrize("network", SHARING)
def test_gradients_that_share_a_scale_are_as_with_hooks(network: str, storage: str, batches: int) -> None:
    kinds, found, scales = batches_of(network, storage, batches)
    watched, expected, same = batches_of(network, storage, batches, **HOOK)
    assert set(kinds[:batches]) <= {"measuring", "hookless"}
    assert set(kinds[batches:]) == {"hookless"}
    assert "hookless" not in watched
    assert scales == same
    for one, other in zip(found, expected):
        assert_equal(one, other)


@pytest.mark.parametrize("storage", [None, "float16"])
def test_an_error_between_functions_leaves_the_weights_as_they_were(
    storage: Optional[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    h = F.clip_grad_by_norm(F.tanh(PF.affine(data(4, 3), 5, name="a")), 1.0)
    loss = F.mean(PF.affine(h, 2, name="b") ** 2)
    scaling = AdaptiveLossScaling(loss if storage is None else FormatEmulation(loss, storage))
    with any_scales(1, (-6, 7)):
        settle(scaling)
        run(scaling, clear=True)
    assert scaling.result.kind == "hookless"
    assert scaling.layer_scales["b/affine"] != 1.0
    weights = {name: (hash(v.data), v.d.tobytes()) for name, v in nn.get_parameters().items()}

    def fail(*_: Any) -> None:
        raise KeyError

    monkeypatch.setattr(PreparedGraph, "rescale", fail)
    scaling.forward(clear_no_need_grad=True)
    with any_scales(1, (-6, 7)), pytest.raises(KeyError):
        scaling.backward(clear_buffer=True)
    assert {name: (hash(v.data), v.d.tobytes()) for name, v in nn.get_parameters().items()} == weights
