# SPDX-License-Identifier: Apache-2.0
"""What methods are asked, and what becomes of their answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Callable, List, Optional, Tuple

import nnabla as nn
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, Method, Needs
from nnabla_adaloss.core.layer_record import Reason
from nnabla_adaloss.core.methods import Range
from nnabla_adaloss.core.statistics import statistics_of
from nnabla_adaloss.engine.method_alphas import MethodAlphas
from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.plan import GraphPlan

pytestmark = pytest.mark.any_context

G, W = np.array([1.0, -4.0, 0.5]), np.array([0.25, -2.0])


@dataclass(frozen=True)
class Listener(Method):
    """Writes down what it is asked, and says what it is told to."""

    says: float = 3.0
    needs: Needs = Needs.STATISTICS
    window: Optional[int] = None
    heard: List[Any] = field(default_factory=list, compare=False)

    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        self.heard.append((g, W, range, fan_in))
        return self.says


class Layers:
    """Two layers, and what is known of their arrays: everything has the same numbers."""

    def __init__(self, method: Any, **config: Any) -> None:
        x = nn.Variable((2, 3), need_grad=True)
        self.loss = PF.affine(PF.affine(x, 4, name="a"), 5, name="b")
        self.graph = Graph(self.loss)
        self.plan = GraphPlan(self.graph)
        made = AdaLossConfig(loss_scale_method=method, **{"use_bound": False, **config})
        self.heard: List[Any] = getattr(made.method, "heard", [])
        self.config, self.method_alphas = made, MethodAlphas(made)
        self.know(G)

    def know(self, g: Optional[np.ndarray], w: Optional[np.ndarray] = W) -> None:
        """Have all gradients and weights be these."""
        known = [None if one is None else statistics_of(one) for one in (g, w)]
        self.statistics: Any = SimpleNamespace(gradient=lambda p: known[0], data=lambda p: known[1])

    def ask(
        self,
        scale: float,
        base: Optional[float] = None,
        *,
        iteration: int = 0,
        layer: str = "b/affine",
        weight: float = 1.0,
        fixed: bool = False,
        range_of: Optional[Callable[[int], Any]] = None,
    ) -> Tuple[float, Reason]:
        structure = self.plan
        asked = structure.layer_inputs[layer][0].outputs[0]
        prepared: Any = SimpleNamespace(
            plan=structure,
            statistics=self.statistics,
            range_of=range_of or (lambda position: self.config.range),
            components=SimpleNamespace(of={asked: 0}),
        )
        method_alpha = self.method_alphas.alpha_function(prepared, iteration, [weight], s0_measured=not fixed)
        assert method_alpha is not None
        return method_alpha(layer, scale, scale if base is None else base)


def test_a_method_that_looks_at_statistics_is_given_those_at_the_scale_that_arrives() -> None:
    n = Layers(Listener(), u_min=1e-3, u_max=1e3)
    assert n.ask(8.0) == (3.0, Reason.METHOD)
    (heard,) = n.heard
    # Each element of the input gradient is a sum over the 5 columns of the output.
    assert heard == (statistics_of(G).scaled(8.0), statistics_of(W), Range(1e-3, 1e3), 5.0)
    n.ask(2.0, layer="a/affine")
    assert n.heard[1][0] == statistics_of(G).scaled(2.0)
    assert n.heard[1][3] == 4.0
    assert n.method_alphas.copier is None
    # As it is in this batch: what is known of gradients is without their loss weight.
    n.ask(2.0, weight=2.0**-20)
    assert n.heard[2][:2] == (statistics_of(G).scaled(2.0**-19), statistics_of(W))


def test_a_method_that_looks_at_nothing_is_asked_where_nothing_is_known() -> None:
    n = Layers(Listener(needs=Needs.NOTHING))
    n.know(None, None)
    assert n.ask(8.0) == (3.0, Reason.METHOD)
    assert n.heard[0][:2] == (None, None)
    assert Layers("fixed", fixed_loss_scale=4.0).ask(8.0) == (4.0, Reason.METHOD)


@pytest.mark.parametrize(("g", "w"), [(None, W), (G, None), (np.zeros(0), W)])
@pytest.mark.parametrize("needs", [Needs.STATISTICS, Needs.HISTORY])
def test_a_layer_with_something_unmeasured_passes_its_scale_on(
    needs: Needs, g: Optional[np.ndarray], w: Optional[np.ndarray]
) -> None:
    n = Layers(Listener(needs=needs))
    n.know(g, w)
    assert n.ask(8.0) == (1.0, Reason.UNKNOWN)
    assert n.heard == []
    assert n.method_alphas.unbounded_alphas == {}


# Methods that look back.


def seen_by(n: Layers) -> List[float]:
    """The largest magnitudes of the history that was given last."""
    return [one.abs_max for one in n.heard[-1][0]]


def test_a_method_that_looks_back_is_given_the_last_iterations_at_the_scale_of_now() -> None:
    n = Layers(Listener(needs=Needs.HISTORY, window=2))
    n.ask(8.0)
    assert seen_by(n) == [32.0]
    n.know(2.0 * G)
    n.ask(2.0, iteration=1)
    assert seen_by(n) == [8.0, 16.0]
    # Once more in the same iteration: its gradient is replaced, and none forgotten for it.
    n.know(3.0 * G)
    n.ask(1.0, iteration=1)
    assert seen_by(n) == [4.0, 12.0]
    n.know(5.0 * G)
    n.ask(1.0, iteration=2)
    assert seen_by(n) == [12.0, 20.0]
    # Each layer has a history of its own.
    n.ask(1.0, iteration=2, layer="a/affine")
    assert seen_by(n) == [20.0]
    # All are shown as they would be with the loss weight of this batch.
    n.ask(1.0, iteration=3, weight=2.0**-2)
    assert seen_by(n) == [5.0, 5.0]
    n.method_alphas.load({})
    n.ask(1.0, iteration=3)
    assert seen_by(n) == [20.0]


# Methods that look at arrays.


def measured(n: Layers, scale: float, g: float, w: float = 0.5) -> None:
    """A pass in which arrays hold these numbers where its method looks."""
    for node in n.plan.nodes:
        for output in node.outputs:
            n.graph.variables[output].g = g
        for slot in node.layer_inputs:
            n.graph.variables[slot.weight].d = w
        n.method_alphas.copy_arrays(n.graph, node, scale)


def test_a_method_that_looks_at_arrays_is_asked_about_those_of_the_pass_that_measured() -> None:
    n = Layers(Listener(4.0, Needs.ARRAYS))
    assert n.method_alphas.copier is not None
    assert n.ask(8.0) == (1.0, Reason.UNKNOWN)
    measured(n, 8.0, 2.0)
    # It is asked about the gradient as it would be with the scale that it is going to carry.
    for scale in (8.0, 2.0, 128.0):
        n.heard.clear()
        assert n.ask(scale, fixed=True)[0] == 4.0
        g, w, _, fan_in = n.heard[0]
        assert (g == 2.0 * scale / 8.0).all()
        assert (w == 0.5).all()
        assert fan_in == 5.0
    n.method_alphas.load({})
    assert n.ask(8.0) == (1.0, Reason.UNKNOWN)


@pytest.mark.parametrize(("g", "w"), [(math.inf, 0.5), (2.0, math.nan)])
def test_arrays_that_are_not_finite_tell_nothing(g: float, w: float) -> None:
    n = Layers(Listener(4.0, Needs.ARRAYS))
    measured(n, 8.0, 2.0)
    measured(n, 16.0, g, w)
    assert n.ask(8.0) == (4.0, Reason.METHOD)
    assert all((heard == value).all() for heard, value in zip(n.heard[0][:2], (2.0, 0.5)))


# What becomes of an answer.


@pytest.mark.parametrize(("fixed", "alpha"), [(False, 1.0), (True, 0.125)])
def test_a_measured_s0_leaves_room_for_all_layers_so_that_no_method_lowers_it(
    fixed: bool, alpha: float
) -> None:
    n = Layers(Listener(says=0.125))
    assert n.ask(8.0, fixed=fixed) == (alpha, Reason.METHOD)
    # Reported is what was said.
    assert n.method_alphas.unbounded_alphas == {"b/affine": 0.125}


def test_bounds_apply_to_the_scale_without_the_compensation_of_a_small_loss() -> None:
    n = Layers(Listener(says=20.0), use_bound=True)
    assert n.ask(2.0**30, 128.0, fixed=True) == (8.0, Reason.ACCUMULATED_BOUND)
    assert n.ask(2.0**30, 8.0, fixed=True) == (16.0, Reason.SCALE_BOUND)
    assert n.method_alphas.unbounded_alphas == {"b/affine": 20.0}


@pytest.mark.parametrize(("narrow", "u_max"), [("a/*", 57344.0), ("b/*", 65504.0)])
def test_the_range_is_that_of_the_gradient_between_layers_stored_differently(
    narrow: str, u_max: float
) -> None:
    n = Layers(Listener())
    emulation = FormatEmulation(n.loss, {narrow: "float8_e5m2", "*": "float16"})
    n.ask(8.0, range_of=AdaptiveLossScaling(emulation)._graph.current().range_of)
    # It is the output gradient of the layer before.
    assert n.heard[0][2].u_max == u_max
