# SPDX-License-Identifier: Apache-2.0
"""Planted faults are what it is measured from, and that nothing is left behind."""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Sequence

import nnabla as nn
import nnabla.experimental.mixed_precision_training
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
    Precision,
    Way,
    diagnose,
)
from nnabla_adaloss.updaters.settings import keep_data
from tests.engine.test_architectures import NETWORKS

from .healthy import HEALTHY, mlp
from .nets import affine, cross_entropy, feeder, inputs, noisy_net, updater_of
from .troubles_of_layers import (
    activation_overflow,
    branches_apart,
    hard_gate,
    mean_of_a_softmax,
    tiny_loss_weight,
)


def test_layers_that_need_scales_apart_are_named() -> None:
    loss, feed = branches_apart.build(False)
    line = diagnose(loss, feeder=feed).verdict.line
    assert re.fullmatch(
        r"Layers quiet_\w+/affine and loud_head/affine need scales 2\^\d\d apart: "
        "use AdaptiveLossScalingUpdater at its defaults.",
        line,
    )


def test_underflow_is_what_the_emulation_loses() -> None:
    loss, feed = tiny_loss_weight.build(False)
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


def state_of_everything(x: Any) -> Dict[str, bytes]:
    found = {f"{name}.data": v.d.tobytes() for name, v in nn.get_parameters(grad_only=False).items()}
    found.update({f"{name}.grad": v.g.tobytes() for name, v in nn.get_parameters().items()})
    found["input"] = x.d.tobytes()
    found["numpy"] = np.random.get_state()[1].tobytes()  # noqa: NPY002
    found["python"] = repr(random.getstate()).encode()
    found["nnabla"] = nnabla.random.prng.get_state()[1].tobytes()
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_it_was(fails: bool) -> None:
    loss, feed = noisy_net()
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

    def fail() -> None:
        feed()
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data") if fails else nullcontext():
        diagnose(loss, feeder=fail if fails else feed)

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
    "made",
    [
        lambda *a: DynamicLossScalingUpdater(*a),
        lambda *a: AdaptiveLossScalingUpdater(*a, storage="float16"),
    ],
)
def test_an_updater_is_taken_with_its_feeder(made: Callable[..., Any]) -> None:
    loss, feed = mlp()
    calls = []
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())

    def counting() -> None:
        calls.append(1)
        feed()

    updater = made(solver, loss, counting)
    updater.update()
    fed = len(calls)
    diagnosis = diagnose(updater, batches=3)
    assert (diagnosis.numbers.batches, len(calls) - fed) == (3, 3)
    assert diagnosis.verdict.needs is Way.NONE
    updater.update()


def test_what_stops_the_gradient_of_one_batch_is_no_cause() -> None:
    (x, t), gate = inputs(), nn.Variable((32, 16))
    dead = F.relu(affine(x, 16, "dead", bias=-100.0))
    loss = cross_entropy(affine(affine(x, 16, "live") * gate + dead, 5, "head"), t)
    gates = iter([1.0, 0.0])

    def set_gate() -> None:
        gate.d = next(gates)

    causes = diagnose(loss, feeder=feeder(x, t, set_gate), batches=2).verdict.causes
    assert [(cause.kind, cause.layer) for cause in causes] == [("dead_relu", "dead/affine")]


def test_a_shared_weight_counts_in_its_first_layer() -> None:
    x, t = inputs()
    h = F.tanh(affine(F.tanh(affine(x, 16, "shared")), 16, "shared"))
    diagnosis = diagnose(cross_entropy(affine(h, 5, "head"), t), feeder=feeder(x, t), batches=1)
    found = {layer.name: layer.nonzero for layer in diagnosis.numbers.layers}
    outputs, weights = 32 * 16, 16 * 16 + 16
    assert sorted([found["shared/affine"], found["shared/affine#2"]]) == [outputs, outputs + weights]


def test_without_a_feeder_the_data_that_is_there_is_one_batch_and_the_first_thing_said() -> None:
    loss, feed = mlp()
    feed()
    diagnosis = diagnose(loss, batches=7)
    assert diagnosis.numbers.batches == 1
    assert diagnosis.as_dict()["note"] == "No feeder was given: this is about what the inputs hold now."
    assert str(diagnosis).index("No feeder was given") < str(diagnosis).index(diagnosis.verdict.line)
    assert str(diagnose(loss, ["float16"])).startswith("No feeder was given")
    assert "No feeder" not in str(diagnose(loss, feeder=feed))
    # The feeder that an updater has when it is given none.
    assert "No feeder was given" in str(diagnose(updater_of(loss, keep_data, S.Sgd(0.1))))
    assert "The feeder changes no input" in str(diagnose(loss, feeder=lambda: None))


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_inputs_that_nobody_has_filled_are_no_advice_about_data(name: str) -> None:
    source, _ = HEALTHY[name]()
    source = source if isinstance(source, nn.Variable) else source.loss
    diagnosis = diagnose(source)
    assert not diagnosis.verdict.causes, diagnosis
    assert "holds only zeros" in str(diagnosis).replace("\n", " ")


def test_data_feeder_is_the_other_name_of_feeder() -> None:
    loss, feed = mlp()
    assert diagnose(loss, data_feeder=feed, batches=2).numbers.batches == 2
    with pytest.raises(TypeError, match="feeder and data_feeder"):
        diagnose(loss, feeder=feed, data_feeder=feed)


@pytest.mark.parametrize("cut", ["need_grad=False", "is unlinked"])
def test_the_place_where_the_gradient_stops_is_named(cut: str) -> None:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "fc1"))
    if cut == "is unlinked":
        h = F.unlink(h)
    else:
        h.need_grad = False
    loss = cross_entropy(affine(h, 5, "head"), t)
    (cause,) = diagnose(updater_of(loss, feeder(x, t), S.Sgd(0.1))).verdict.causes
    assert "the output of fc1/affine/Tanh, which" in cause.what
    assert cut in cause.what


def test_a_gradient_of_rounding_errors_is_no_case_for_more_bits() -> None:
    loss, feed = mean_of_a_softmax.build(False)
    text = str(diagnose(loss, feeder=feed))
    assert "nothing but rounding errors" in text
    assert "more bits" not in text
    # A function that passes on the same whatever arrives is linear in nothing, but no noise.
    x = nn.Variable.from_numpy_array(np.ones((8, 3), np.float32))
    y = F.sink(F.mean(PF.affine(x, 4, name="one") ** 2), PF.affine(x, 4, name="two"))
    assert not diagnose(y).verdict.causes


def test_other_formats() -> None:
    loss, feed = mlp()
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
    loss, _ = mlp()
    with pytest.raises(error, match=message):
        call(loss)


def test_the_first_function_that_computes_in_half_is_named() -> None:
    h = F.tanh(PF.affine(nn.Variable((2, 3)), 4, name="fc1"))
    with nn.context_scope(nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")):
        y = PF.affine(h, 2, name="fc2")
    loss = F.mean(y) * 1e-9
    with pytest.raises(ValueError, match="^fc2/affine is computed in cpu:half, so there is no fp32"):
        diagnose(loss)


class Rebuilding:
    """Builds the graph anew for each batch and assigns it to its updater."""

    def __init__(self, sizes: Sequence[int] = (8,)) -> None:
        self._rng, self._sizes, self.calls = np.random.default_rng(0), sizes, 0
        self.updater: Any = None

    def build(self, weight: float = 1.0) -> nn.Variable:
        x = nn.Variable((self._sizes[self.calls % len(self._sizes)], 4))
        x.d = self._rng.standard_normal(x.shape)
        return F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="fc1")), 2, name="fc2") ** 2) * weight

    def __call__(self) -> None:
        self.updater.loss = self.build(1e-8)
        self.calls += 1


@pytest.mark.parametrize(
    "made",
    [
        lambda *a: nnabla.experimental.mixed_precision_training.DynamicLossScalingUpdater(*a),
        lambda *a: AdaptiveLossScalingUpdater(*a, storage="float16"),
    ],
)
def test_the_graph_that_the_feeder_assigns_is_looked_at(made: Callable[..., Any]) -> None:
    feeder = Rebuilding()
    before = feeder.build()
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    feeder.updater = updater = made(solver, before, feeder)
    diagnosis = diagnose(updater)
    assert (feeder.calls, diagnosis.numbers.batches) == (4, 4)
    assert diagnosis.verdict.needs is Way.ONE, diagnosis
    assert updater.loss is before
    updater.update()


def test_batches_of_graphs_that_are_built_otherwise_are_left_out() -> None:
    feeder = Rebuilding((8, 6))
    loss, solver = feeder.build(), S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    feeder.updater = AdaptiveLossScalingUpdater(solver, loss, feeder, storage="float16")
    assert diagnose(feeder.updater).numbers.batches == 2


def unused_states(x: nn.Variable) -> nn.Variable:
    shape = (1, 1, 4, 5)
    h, c = nn.Variable.from_numpy_array(np.zeros(shape)), nn.Variable.from_numpy_array(np.zeros(shape))
    return PF.lstm(F.reshape(x, (2, 4, 3)), h, c, num_layers=1)[0]


MULTIPLE: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "LSTM": unused_states,
    "Split": lambda x: F.split(PF.affine(x, 4, name="fc1"), axis=1)[1],
    "Max": lambda x: F.max(PF.affine(x, 4, name="fc1"), axis=1, with_index=True)[0],
    "BatchNormalization": lambda x: PF.batch_normalization(PF.affine(x, 3), output_stat=True)[0],
    "Sink": lambda x: F.sink(F.mean(PF.affine(x, 4, name="fc1") ** 2), PF.affine(x, 4, name="fc3")),
}


@pytest.mark.parametrize("name", MULTIPLE)
def test_outputs_that_nobody_reads(name: str) -> None:
    y = MULTIPLE[name](nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((8, 3))))
    loss = y if y.size == 1 else F.mean(y**2)
    assert diagnose(loss).verdict.needs is not None


@pytest.mark.parametrize("weight", [1e6, 1e-13, 1e-30])
def test_the_loss_is_judged_as_the_updater_computes_it(weight: float) -> None:
    """In float: no loss weight is too small or too large for float16."""
    rng = np.random.RandomState(0)
    x = nn.Variable.from_numpy_array(rng.randn(8, 4).astype(np.float32))
    h = F.tanh(PF.affine(x, 6, name="a", rng=rng))
    diagnosis = diagnose(F.mean(PF.affine(h, 2, name="b", rng=rng) ** 2) * weight)
    assert diagnosis.verdict.needs is not None
    assert not any(cause.fatal for cause in diagnosis.verdict.causes)


def test_of_a_mapping_each_layer_is_judged_in_its_own_format() -> None:
    loss, feed = mlp()
    names = [layer.name for layer in diagnose(loss, feeder=feed, batches=1).numbers.layers]
    first, last = names[0], names[-1]
    found = diagnose(loss, {first: "float8_e5m2", "*": "float16"}, feed, 1).numbers.layers
    formats = {layer.name: layer.stored.name for layer in found}
    assert (formats[first], formats[last]) == ("float8_e5m2", "float16")


def test_what_leaves_the_range_of_one_layer_is_told_with_its_format() -> None:
    loss, feed = activation_overflow.build(False)
    for storage, told in (
        ({"huge/affine": "float8_e5m2", "*": "bfloat16"}, "float8_e5m2, which ends at 57344"),
        (Precision("float8_e4m3", "float8_e5m2"), "float8_e4m3, which ends at 448"),
    ):
        assert told in str(diagnose(loss, storage, feed, 1))


@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_any_graph_is_left_as_it_was_and_needs_nothing(network: str) -> None:
    nn.clear_parameters()
    loss = NETWORKS[network]()
    parameters = nn.get_parameters(grad_only=False)
    for v in parameters.values():
        v.grad.zero()
    loss.forward()
    loss.backward()
    before = {name: (v.d.copy(), v.g.copy()) for name, v in parameters.items()}

    diagnosis = diagnose(loss)

    assert diagnosis.verdict.needs in (Way.NONE, Way.START), diagnosis
    assert not any(cause.fatal for cause in diagnosis.verdict.causes), diagnosis
    for name, v in parameters.items():
        np.testing.assert_array_equal(v.d, before[name][0], err_msg=name)
        np.testing.assert_array_equal(v.g, before[name][1], err_msg=name)


def test_a_function_without_a_backward_is_told_by_every_face(tmp_path: Path) -> None:
    loss, feed = hard_gate.build(False)
    diagnosis = diagnose(loss, feeder=feed)
    diagnosis.write_html(tmp_path / "page.html")
    assert "GreaterScalar has no backward" in (tmp_path / "page.html").read_text("utf-8")
    assert "GreaterScalar has no backward" in diagnosis.as_dict()["verdict"]
    assert "underflow" not in str(diagnosis)
    with pytest.raises(ValueError, match="GreaterScalar has no backward"):
        diagnose(loss, ["fp8_hybrid", "float16"], feeder=feed)


@pytest.mark.parametrize(("comm", "calls"), [(None, 3), (object(), 0)])
def test_on_gradients_is_called_where_it_waits_for_nobody(comm: Any, calls: int) -> None:
    loss, feed = mlp()
    solver, called = S.Sgd(0.1), []
    solver.set_parameters(nn.get_parameters())
    updater = SimpleNamespace(
        loss=loss, data_feeder=feed, solver=solver, comm=comm, on_gradients=called.append
    )
    diagnose(updater, batches=3)
    assert called == [solver] * calls
