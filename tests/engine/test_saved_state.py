# SPDX-License-Identifier: Apache-2.0
"""A state knows its network, and comes back in another process."""

from __future__ import annotations

import json
import math
import re
from typing import Any, List, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation, Precision
from tests.worlds.methods import LooksBack
from tests.worlds.networks import layers
from tests.worlds.passes import run, settle
from tests.worlds.tampering import Gate
from tests.worlds.values import assert_equal, data, gradients
from tests.worlds.warned import warned


def loss() -> nn.Variable:
    x = nn.Variable((2, 3))
    x.d = 0.5
    return F.mean(PF.affine(F.tanh(PF.affine(x, 3, name="a")), 2, name="b") ** 2)


def trained(iterations: int, method: Any) -> AdaptiveLossScaling:
    scaling = AdaptiveLossScaling(loss(), AdaLossConfig(loss_scale_method=method, measure_every=3))
    for _ in range(iterations):
        run(scaling)
        scaling.after_update()
    return scaling


METHODS = pytest.mark.parametrize("method", ["approx_range", "amax_history", LooksBack()], ids=str)


@METHODS
@pytest.mark.parametrize("iterations", [0, 1, 3, 5])
def test_an_engine_goes_on_in_another_process_as_it_would_have(iterations: int, method: Any) -> None:
    scaling = trained(iterations, method)
    saved = json.loads(json.dumps(scaling.state_dict()))
    other = trained(0, method)
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    # Only methods that look at statistics keep any.
    assert bool(saved["statistics"]) == (iterations > 0 and method != "amax_history")
    for _ in range(5):
        for one in (scaling, other):
            run(one)
            one.after_update()
        assert other.layer_scales == scaling.layer_scales
        assert other.loss_scale == scaling.loss_scale
        assert other.state_dict() == scaling.state_dict()


@pytest.mark.parametrize("schema", [1, 2])
@pytest.mark.filterwarnings("ignore:the state was saved by an earlier version")
def test_random_numbers_go_on_where_they_were_saved(schema: int) -> None:
    storage = Precision("float8_e5m2", stochastic_seed=0)
    scaling, other = (AdaptiveLossScaling(FormatEmulation(loss(), storage)) for _ in range(2))
    run(scaling)
    saved = scaling.state_dict()
    other.load_state_dict({**saved, "schema": schema})
    assert other.state_dict()["draws"] == saved["draws"] > 0


def test_components_that_a_state_lacks_are_measured_first() -> None:
    """Of weights, whose scaled copies are stored as they are, and must not leave the range."""
    scaling, other = (AdaptiveLossScaling(FormatEmulation(loss(), "float16")) for _ in range(2))
    for iteration in range(2):
        settle(scaling, iteration)
    saved = scaling.state_dict()
    dropped = {"schedule": {**saved["schedule"], "chosen": []}}
    for statistics, kind in ((saved["statistics"], "hookless"), ([], "measuring")):
        other.load_state_dict({**saved, **dropped, "statistics": statistics})
        run(other)
        assert other.result.kind == kind


def test_the_first_function_that_differs_in_another_network_is_named() -> None:
    scaling = trained(1, "amax_history")
    before = scaling.state_dict()
    mean, square, last, *more = before["network"]
    assert last == "Affine b/affine 3x2 2"
    for theirs, said in (
        (["Affine other 3x2", mean], f"Affine other 3x2 where this one has {re.escape(mean)}"),
        ([mean], f"nothing where this one has {re.escape(square)}"),
        ([mean, square, "Affine b/affine 3x5 5", *more], f"Affine b/affine 3x5 5 where this one has {last}"),
    ):
        with pytest.raises(ValueError, match=f"^state is of another network: it has {said}$"):
            scaling.load_state_dict({**before, "network": theirs})
        assert scaling.state_dict() == before


def test_states_without_gradients_are_of_no_other_network() -> None:
    x = nn.Variable((2, 3)).apply(need_grad=True)
    scaling, other = AdaptiveLossScaling(F.mean(x**2)), AdaptiveLossScaling(F.mean(x * x))
    trainable = other.state_dict()
    x.need_grad = False
    for frozen in scaling, other:
        frozen.forward()
        with pytest.raises(ValueError, match="loss needs no gradient"):
            frozen.backward()
    other.load_state_dict(scaling.state_dict())
    with pytest.raises(ValueError, match="it has Mean Mean where this one has nothing"):
        other.load_state_dict(trainable)


def unrolled(length: int, unlike: bool = False) -> nn.Variable:
    """A recurrent net of so many steps; `unlike`: wired otherwise, with the same names."""
    xs = [nn.Variable((2, 3)) for _ in range(length)]
    h = nn.Variable((2, 3))
    for t, x in enumerate([h, *xs]):
        x.d = np.random.RandomState(t).randn(2, 3)
    for x in xs:
        h = F.tanh(PF.affine(x, 3, name="x") + PF.affine(h, 3, name="h"))
    return F.mean(PF.affine((h + xs[0]) + h if unlike else (h + h) + xs[0], 2, name="b") ** 2)


def in_turn(losses: Sequence[nn.Variable], before: Any, passes: int, method: Any) -> List[Any]:
    """Scales of passes through graphs that take turns, and the last engine."""
    config, found = AdaLossConfig(loss_scale_method=method, measure_every=3), []
    for index in range(passes):
        scaling = AdaptiveLossScaling(losses[index % len(losses)], config)
        if before is not None:
            scaling.go_on_from(before)
        run(scaling)
        scaling.after_update()
        found.append((scaling.result.kind, scaling.accumulated_scales, scaling.loss_scale))
        before = scaling
    return [found, before]


def test_weights_that_another_topology_has_measured_are_saved_by_name() -> None:
    """A state is loaded where the graph is another one than the last that was trained on."""
    losses = [FormatEmulation(unrolled(2), "float16"), FormatEmulation(unrolled(3), "float16")]
    _, scaling = in_turn(losses, None, 8, "amax_history")
    saved = scaling.state_dict()
    weights = {name: scaling._graph.current().statistics.weights[name] for name in saved["weights"]}
    assert weights.keys() == {"h/affine/W", "b/affine/W"}
    other = engine_with(saved, losses[0], "amax_history")
    assert other._graph.current().statistics.weights == weights
    other.load_state_dict({name: part for name, part in saved.items() if name != "weights"})
    assert other._graph.current().statistics.weights.keys() == weights.keys()


def test_weights_measured_since_loading_count_in_topologies_that_waited() -> None:
    losses = [FormatEmulation(unrolled(2), "float16"), FormatEmulation(unrolled(3), "float16")]
    _, scaling = in_turn(losses, None, 8, "amax_history")
    scaling = engine_with(scaling.state_dict(), losses[1], "amax_history")
    before = scaling._graph.current().statistics.weights
    for parameter in nn.get_parameters().values():
        parameter.d = 4.0 * parameter.d
    _, scaling = in_turn(losses[1:], scaling, 4, "amax_history")
    newest = scaling._graph.current().statistics.weights
    assert all(one.abs_max == 4.0 * before[name].abs_max for name, one in newest.items())
    other = AdaptiveLossScaling(losses[0], scaling.config)
    other.go_on_from(scaling)
    assert other._graph.current().statistics.weights == newest


def engine_with(state: Any, loss: nn.Variable, method: Any) -> AdaptiveLossScaling:
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(loss_scale_method=method, measure_every=3))
    scaling.load_state_dict(json.loads(json.dumps(state)))
    return scaling


@METHODS
@pytest.mark.parametrize(("others", "built"), [((2, True), 0), ((4, False), 1), ((2, True), 2)])
def test_topologies_that_are_not_built_yet_wait(others: Any, built: int, method: Any) -> None:
    losses = [unrolled(2), unrolled(3), unrolled(*others)]
    _, scaling = in_turn(losses, None, 12, method)
    saved = scaling.state_dict()
    assert len(saved["topologies"]) == 2
    expected, last = in_turn(losses, scaling, 12, method)
    # Built once more: no graph of before is known.
    again = [unrolled(2), unrolled(3), unrolled(*others)]
    scaling = engine_with(saved, again[built], method)
    found, other = in_turn(again, scaling, 12, method)
    assert found == expected
    assert other.state_dict() == last.state_dict()


def test_a_state_of_other_topologies_loads_by_name_and_is_saved_again() -> None:
    losses = [unrolled(2), unrolled(3)]
    _, scaling = in_turn(losses, None, 8, "approx_range")
    saved = scaling.state_dict()
    other = engine_with(saved, unrolled(4), "approx_range")
    assert other.components.unit_amaxes() == scaling.components.unit_amaxes()
    again = other.state_dict()
    assert [one["network"] for one in again["topologies"]] == [
        saved["topologies"][0]["network"],
        saved["network"],
    ]
    found, _ = in_turn(losses, engine_with(again, unrolled(4), "approx_range"), 4, "approx_range")
    assert found == in_turn(losses, scaling, 4, "approx_range")[0]
    # An overflow has scales of all of them chosen again; forgetting leaves nothing.
    other.after_overflow()
    assert not any(one["schedule"]["chosen"] for one in other.state_dict()["topologies"])
    other.forget()
    assert other.state_dict()["topologies"] == []


def test_scales_of_all_topologies_are_chosen_again_in_another_format() -> None:
    losses = [unrolled(2), unrolled(3), unrolled(4)]
    _, scaling = in_turn([FormatEmulation(loss, "float16") for loss in losses], None, 9, "amax_history")
    saved = scaling.state_dict()
    assert all(one["schedule"]["chosen"] for one in saved["topologies"])
    other = engine_with(saved, FormatEmulation(losses[0], "bfloat16"), "amax_history").state_dict()
    assert not any(one["schedule"]["chosen"] for one in (*other["topologies"], other))
    assert other["components"] == saved["components"]


def test_topologies_that_wait_are_forgotten_before_those_in_use() -> None:
    losses = [unrolled(length, unlike) for unlike in (False, True) for length in range(2, 12)]
    _, scaling = in_turn(losses[:10], None, 10, "amax_history")
    scaling = engine_with(scaling.state_dict(), losses[10], "amax_history")
    assert len(scaling.state_dict()["topologies"]) == 10
    _, scaling = in_turn(losses[10:], scaling, 10, "amax_history")
    kept = [one["wiring"] for one in scaling.state_dict()["topologies"]]
    assert len(kept) == 15
    _, before = in_turn(losses[:10], None, 10, "amax_history")
    waited = [one["wiring"] for one in (*before.state_dict()["topologies"], before.state_dict())]
    assert [wiring for wiring in kept if wiring in waited] == waited[-6:]


def test_a_damaged_state_of_a_topology_is_as_none_when_its_graph_comes() -> None:
    losses = [unrolled(2), unrolled(3)]
    _, scaling = in_turn(losses, None, 8, "approx_range")
    saved = scaling.state_dict()
    saved["topologies"][0]["statistics"] = [[99, None, None]]
    saved["topologies"][0]["schedule"]["since"] = "x"
    other = engine_with(saved, losses[1], "approx_range")
    found, last = in_turn(losses, other, 2, "approx_range")
    assert last.state_dict()["topologies"]
    assert found[0][0] == "measuring"


@pytest.mark.parametrize("damage", [{"topologies": 3}, {"topologies": [{}]}, {"topologies": [[]]}], ids=str)
def test_damaged_topologies_are_refused(damage: Any) -> None:
    scaling = trained(2, "amax_history")
    before = scaling.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        scaling.load_state_dict({**before, **damage})
    assert scaling.state_dict() == before


OPTIONAL = [
    "dtype",
    "topologies",
    "wiring",
    "weights",
]  # versions before this one did not save them
PARTS = ["schema", "network", "statistics", "components", "schedule", "layers", "draws", "iteration"]


@pytest.mark.parametrize("part", PARTS)
def test_a_state_without_a_part_is_damaged(part: str) -> None:
    scaling = trained(2, "approx_range")
    before = scaling.state_dict()
    assert sorted(before) == sorted([*PARTS, *OPTIONAL])
    saved = {key: value for key, value in before.items() if key != part}
    with pytest.raises(ValueError, match=f"damaged, or not of an AdaptiveLossScaling: KeyError.'{part}'"):
        scaling.load_state_dict(saved)
    assert scaling.state_dict() == before


CHOSEN = {"iteration": 5, "weights": [1.0, 1.0, 1.0], "scales": [2.0, 8.0, 32.0], "fixed_scale": None}
MEASURED = {"windows": {}, "partial": {}}


def schedule(*more: Any, since: Any = 5, **damaged: Any) -> Any:
    return {"schedule": {"since": since, "chosen": [CHOSEN, *more, {**CHOSEN, **damaged}]}}


@pytest.mark.parametrize(
    "damage",
    [
        {"schema": 0},
        {"schema": 3},
        {"statistics": [[0, ["x"] * 7, None]]},
        {"statistics": [[99, None, [0] * 7]]},
        {"statistics": [[0, [6, 1.0, -2.0, 1.0, 1.0, 0, 0], None]]},
        {"statistics": [[0, [6, math.nan, 2.0, 1.0, 1.0, 0, 0], None]]},
        {"schedule": {"since": 5, "scales": [2.0, 8.0, 32.0], "fixed_scale": None}},
        schedule(weights=[1.0, 1.0], scales=[2.0, 8.0]),
        schedule(weights=[1.0, 1.0]),
        schedule(scales=[2.0, 0.0, 8.0]),
        schedule(scales=[2.0, 3.0, 8.0]),
        schedule(scales=[3.0, 8.0, 32.0]),
        schedule(scales=[2.0, 8.0, 8.0, 8.0]),
        schedule(fixed_scale=0.0),
        schedule(iteration="x"),
        schedule(None),
        schedule(since="x"),
        {"layers": {"b/affine": [["x", [1] * 7]]}},
        {"components": {**MEASURED, "windows": []}},
        {"components": {**MEASURED, "partial": {"a": -1.0}}},
        {"draws": "x"},
        {"iteration": None},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: Any) -> None:
    scaling = trained(2, LooksBack())
    before = scaling.state_dict()
    weight = nn.get_parameters()["b/affine/W"]
    weight.d = 2.0 * weight.d
    others = trained(5, LooksBack()).state_dict()
    assert all(before[part] != others[part] for part in ("statistics", "components", "layers", "iteration"))
    with pytest.raises(
        ValueError,
        match=r"damaged|version|positive|must|components|divide by|(power of two|those of an array)",
    ):
        scaling.load_state_dict({**others, **damage})
    assert scaling.state_dict() == before


# Saved by a version that remembered magnitudes.


def of_schema_1(saved: Any) -> Any:
    """A state as it was before loss weights were told apart."""
    (chosen,) = saved["schedule"]["chosen"]
    schedule = {name: chosen[name] for name in ("scales", "fixed_scale")}
    return {
        **saved,
        "schema": 1,
        "schedule": {"since": saved["schedule"]["since"], **schedule},
        "components": {**saved["components"], "searches": [0, 0, 0, -1]},
    }


@METHODS
def test_a_state_of_schema_1_keeps_its_place_and_everything_is_measured_anew(method: Any) -> None:
    fresh = trained(0, method).state_dict()
    saved = of_schema_1(json.loads(json.dumps(trained(3, method).state_dict())))
    scaling = trained(2, method)
    with warned() as texts:
        scaling.load_state_dict(saved)
    assert ["scales are measured again" in text for text in texts] == [True]
    now = scaling.state_dict()
    assert {**now, "schedule": now["schedule"]["chosen"]} == {**fresh, "iteration": 3, "schedule": []}
    run(scaling)
    assert scaling.result.kind == "measuring"
    assert scaling.state_dict()["schema"] == 2


@pytest.mark.parametrize("damage", [{"network": ["other"]}, {"iteration": None}, {"draws": "x"}], ids=str)
def test_a_damaged_state_of_schema_1_is_refused_without_a_warning(
    damage: Any, recwarn: pytest.WarningsRecorder
) -> None:
    scaling = trained(2, LooksBack())
    before = scaling.state_dict()
    with pytest.raises(ValueError, match=r"damaged|another network|must"):
        scaling.load_state_dict({**of_schema_1(before), **damage})
    assert scaling.state_dict() == before
    assert not recwarn.list


def test_a_resumed_pass_with_a_given_s0_knows_the_merged_components() -> None:
    def engine() -> AdaptiveLossScaling:
        h = layers(5)
        for _ in range(3):
            h = F.tanh(PF.affine(h, 5, name="again", rng=np.random.RandomState(1)))
        return AdaptiveLossScaling(FormatEmulation(F.mean(h**2) * 1.0, "float16"))

    scaling = engine()
    for iteration in range(3):
        settle(scaling, iteration, 8.0, clear=False)
    state = scaling.state_dict()
    run(scaling, 8.0)
    expected, schedule = gradients(), scaling.result.schedule
    assert schedule.is_merged
    resumed = engine()
    resumed.load_state_dict(state)
    run(resumed, 8.0)
    assert resumed.found_inf == []
    assert resumed.result.schedule.component_scales == schedule.component_scales
    assert_equal(gradients(), expected)


def test_functions_of_any_name_are_recognized() -> None:
    class Spaced(Gate):
        @property
        def name(self) -> str:
            return "a gate of mine"

    def built() -> AdaptiveLossScaling:
        h = Spaced()(F.tanh(PF.affine(data(4, 3), 3, name="a", rng=np.random.RandomState(0))))
        return AdaptiveLossScaling(F.mean(PF.affine(h, 2, name="b", rng=np.random.RandomState(1)) ** 2))

    scaling, other = built(), built()
    settle(scaling)
    saved = scaling.state_dict()
    assert "a gate of mine a/affine/a gate of mine" in saved["network"]
    other.load_state_dict(saved)
    assert other.state_dict() == saved


def test_what_is_named_after_an_input_goes_on() -> None:
    def built() -> AdaptiveLossScaling:
        x, rng = data(2, 4, 3).apply(need_grad=True), np.random.RandomState(0)
        queries, keys = (PF.affine(x, 3, base_axis=2, name=name, rng=rng) for name in "qk")
        loss = F.mean(F.batch_matmul(queries, keys, transpose_b=True) ** 2)
        config = AdaLossConfig(loss_scale_method=LooksBack(), measure_every=1)
        return AdaptiveLossScaling(FormatEmulation(loss, "float16"), config)

    scaling, other = built(), built()
    for iteration in range(3):
        settle(scaling, iteration)
        scaling.after_update()
    saved = scaling.state_dict()
    for by_name in (saved["layers"], saved["components"]["windows"]):
        assert any(":" in name for name in by_name)
    other.load_state_dict(saved)
    assert other.state_dict() == saved


@pytest.mark.parametrize("kind", ["scalar", "output"])
def test_graphs_of_the_same_functions_differ_by_scalars_and_by_outputs_in_use(kind: str) -> None:
    def per_example(batch: int) -> nn.Variable:
        # Of a single example, the sum is a scalar.
        return F.mean(F.sum(PF.affine(data(batch, 3), 2, name="a") ** 2, axis=1) ** 2)

    def half(number: int) -> nn.Variable:
        return F.mean(F.split(PF.affine(data(4, 3), 2, name="a"), axis=1)[number])

    losses = map(half, (0, 1)) if kind == "output" else map(per_example, (1, 4))
    one, other = (AdaptiveLossScaling(loss).state_dict() for loss in losses)
    assert one["network"] == other["network"]
    assert one["wiring"] != other["wiring"]
