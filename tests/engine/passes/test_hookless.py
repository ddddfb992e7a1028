# SPDX-License-Identifier: Apache-2.0
"""A pass without hooks measures what one with hooks measures, and leaves nothing behind."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence
from unittest import mock

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from nnabla.function import PythonFunction

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.engine import statistics as shares
from nnabla_adaloss.engine.passes.hookless import HooklessPass
from nnabla_adaloss.engine.statistics import Share
from tests.engine.random_graphs import Network, networks

EVERY = 3
METHODS = ("approx_range", "amax_history")


@contextmanager
def small_shares() -> Iterator[None]:
    """Divide what is measured, however little it is."""
    with mock.patch.object(shares, "_LEAST", 1):
        yield


def look(f: Any) -> None:
    """A hook that sees each function: the pass needs hooks then."""


class Way(NamedTuple):
    """How a loss is gone through."""

    method: str
    scale: Optional[float]
    clear_buffer: bool
    accum_grad: int
    storage: Optional[str]


ways = st.builds(
    Way,
    st.sampled_from(METHODS),
    st.sampled_from([None, 256.0]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([None, None, "float16", "fp8_hybrid"]),
)


class Engine:
    """One engine on a network, whose iterations are run one by one."""

    def __init__(self, network: Network, way: Way, hook: Optional[Callable[[Any], None]]) -> None:
        self.network, self.way, self.hook = network, way, hook
        loss = network.loss if way.storage is None else FormatEmulation(network.loss, way.storage)
        config = AdaLossConfig(loss_scale_method=way.method, measure_every=EVERY)
        self.scaling = AdaptiveLossScaling(loss, config)

    def iterate(self, iteration: int) -> Dict[str, Any]:
        """Run one iteration; return all that it leaves behind."""
        for leaf in self.network.leaves.values():
            leaf.grad.zero()
        for _ in range(self.way.accum_grad):
            self.scaling.forward(clear_no_need_grad=self.way.clear_buffer)
            self.scaling.backward(
                self.way.scale,
                clear_buffer=self.way.clear_buffer,
                function_post_hook=self.hook,
                iteration=iteration,
            )
        left = {name: bits(leaf.g) for name, leaf in self.network.leaves.items()}
        for index, v in enumerate(self.scaling.plan.variables):
            if v.persistent or not self.way.clear_buffer:
                left[f"gradient {index}"] = bits(v.g)
        state = self.scaling.state_dict()
        state["cleared"] = [v.grad.clear_called for v in inner(self.scaling)]
        return {**state, **left}


def bits(array: np.ndarray) -> List[int]:
    return np.array(array, np.float32).view(np.uint32).ravel().tolist()


def inner(scaling: AdaptiveLossScaling) -> List[nn.Variable]:
    """All that get a gradient but leaves and the loss, whose gradient nnabla keeps with hooks only."""
    return [v for v in scaling.plan.variables if v.parent is not None and v != scaling.variable]


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks, ways, st.integers(0, 2**31))
def test_it_measures_what_a_pass_with_hooks_measures(network: Network, way: Way, seed: int) -> None:
    hookless, hooked = Engine(network, way, None), Engine(network, way, look)
    # Some gradients are the user's own. Where activations are computed again, nnabla itself loses those.
    rng = np.random.default_rng(seed)
    for v in inner(hookless.scaling):
        v.persistent = bool(rng.random() < 0.2) and not hookless.scaling.plan.recomputes
    variables = hookless.scaling.plan.all_variables
    persistent = [v.persistent for v in variables]
    with small_shares():
        for iteration in range(2 * EVERY + 1):
            expected = hooked.iterate(iteration)
            assert hookless.iterate(iteration) == expected
            assert [v.persistent for v in variables] == persistent


def chain(wrong: Optional[Callable[[nn.Variable], nn.Variable]] = None) -> nn.Variable:
    rng = np.random.RandomState(0)
    h = nn.Variable.from_numpy_array(rng.randn(4, 5).astype(np.float32))
    for index in range(6):
        h = F.tanh(PF.affine(h, 5, name=f"layer{index}", rng=rng))
        if index == 2 and wrong is not None:
            h = wrong(h)
    return F.mean(h**2)


def run(scaling: AdaptiveLossScaling, count: int = 1) -> None:
    for _ in range(count):
        for v in nn.get_parameters().values():
            v.grad.zero()
        scaling.forward(clear_no_need_grad=True)
        scaling.backward(clear_buffer=True)


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
    scaling = AdaptiveLossScaling(chain(), AdaLossConfig(loss_scale_method=method, measure_every=EVERY))
    seen = kept_by_passes(monkeypatch)
    with small_shares():
        run(scaling)
        assert not seen
        for _ in range(2 * EVERY):
            run(scaling)
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
            # Gradients of one size, in EVERY shares.
            assert len(kept) <= -(-len(everything) // EVERY)
        assert sorted(p for _, kept in cycle for p in kept) == everything


@pytest.mark.parametrize("method", METHODS)
def test_one_share_holds_all_where_that_is_little(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = AdaptiveLossScaling(chain(), AdaLossConfig(loss_scale_method=method, measure_every=EVERY))
    seen = kept_by_passes(monkeypatch)
    run(scaling, 1 + 2 * EVERY)
    # Each cycle begins with another share.
    last = [*(EVERY - 1) * [False], True]
    assert [bool(kept) for _, kept in seen] == [*last, *last[-1:], *last[:-1]]


class Wrong(PythonFunction):
    """The identity; its backward raises when it is told to."""

    raises = False

    @property
    def name(self) -> str:
        return "Wrong"

    def min_outputs(self) -> int:
        return 1

    def setup_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].reset_shape(inputs[0].shape, True)

    def forward_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].data.copy_from(inputs[0].data)

    def backward_impl(self, inputs: Any, outputs: Any, propagate_down: Any, accum: Any) -> None:
        if self.raises:
            raise KeyboardInterrupt
        g = outputs[0].g
        inputs[0].g = inputs[0].g + g if accum[0] else g

    def grad_depends_output_data(self, i: int, o: int) -> bool:
        return False

    def grad_depends_input_data(self, i: int, j: int) -> bool:
        return False


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_backward_leaves_everything_as_it_was(method: str) -> None:
    function = Wrong(nn.Context(["cpu:float"], "CpuCachedArray", "0"))
    loss = chain(function) * 2.0**-20
    expected = gradients_of(loss)
    config = AdaLossConfig(loss_scale_method=method, measure_every=1, use_bound=False)
    scaling = AdaptiveLossScaling(loss, config)
    run(scaling, 3)
    assert scaling.result.kind == "hookless"
    mine = inner(scaling)[3]
    mine.persistent = True
    variables = scaling.plan.all_variables
    persistent = [v.persistent for v in variables]
    arrays = {name: (v.data, v.grad) for name, v in nn.get_parameters().items()}
    before = scaling.state_dict()
    function.raises = True
    with pytest.raises(KeyboardInterrupt):
        run(scaling)
    assert [v.persistent for v in variables] == persistent
    assert {name: (v.data, v.grad) for name, v in nn.get_parameters().items()} == arrays
    assert scaling.state_dict()["iteration"] == before["iteration"]
    function.raises = False
    run(scaling)
    assert [v.persistent for v in variables] == persistent
    for name, v in nn.get_parameters().items():
        np.testing.assert_array_equal(v.g, expected[name], err_msg=name)


def gradients_of(loss: nn.Variable) -> Dict[str, np.ndarray]:
    for v in nn.get_parameters().values():
        v.grad.zero()
    loss.forward()
    loss.backward()
    return {name: v.g.copy() for name, v in nn.get_parameters().items()}
