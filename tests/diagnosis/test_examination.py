# SPDX-License-Identifier: Apache-2.0
"""Planted faults are what it is measured from, and that nothing is left behind."""

from __future__ import annotations

import itertools
import math
import random
import re
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Sequence, Tuple

import nnabla as nn
import nnabla.experimental.mixed_precision_training
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import nnabla.random
import nnabla.solvers as S
import numpy as np
import pytest

import nnabla_adaloss
from nnabla_adaloss import FormatEmulation, LossScaleError, Precision, Way
from nnabla_adaloss.diagnosis import remedies
from nnabla_adaloss.diagnosis.network import Network
from nnabla_adaloss.diagnosis.operands import Operands, Step
from nnabla_adaloss.diagnosis.target import Subject
from nnabla_adaloss.diagnosis.watching import Sight
from nnabla_adaloss.updaters.settings import keep_data
from tests.worlds.architectures import NETWORKS
from tests.worlds.interruptions import Interrupt, Moments, Training, differences
from tests.worlds.tampering import Interrupted, Noise
from tests.worlds.trainings import solver_of, updater_of
from tests.worlds.values import HALF

from . import nets
from .healthy import mlp
from .nets import affine, classes, cross_entropy, feeder, hidden, inputs, network, noisy_net, tiny_loss_weight
from .troubles import (
    a_weight_behind_the_loss,
    cut_in_the_middle,
    cut_off_altogether,
    gate_behind_a_relu,
    hard_gate,
    nan_in_data,
    never_fed,
    scores_divided_too_late,
)

# Half as many batches as by default.
diagnose = partial(nnabla_adaloss.diagnose, batches=2)


def test_underflow_equals_the_emulations_losses() -> None:
    loss, feed = tiny_loss_weight()
    feed()
    diagnosis = diagnose(loss)
    emulation = FormatEmulation(loss, float_tail=True)
    emulation.forward()
    scale = diagnosis.numbers.scales[Way.ONE]
    emulation.backward(scale)
    (head,) = [layer for layer in diagnosis.numbers.layers if layer.name == "head/affine"]
    W = nn.get_parameters()["head/affine/W"]
    stored = W.g / scale
    W.grad.zero()
    loss.forward()
    loss.backward()
    np.testing.assert_allclose(
        np.linalg.norm(stored - W.g) / np.linalg.norm(W.g), head.effects[Way.ONE].error, rtol=0.7
    )
    assert head.effects[Way.NONE].underflow == 1.0


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
        assert all(kept.error < 0.05 and kept.underflow < 0.05 for kept in layer.effects.values())


def test_a_gradient_that_ends_in_one_batch_is_not_a_cause() -> None:
    (x, t), gate = inputs(), nn.Variable((32, 16))
    dead = F.relu(affine(x, 16, "dead", bias=-100.0))
    loss = cross_entropy(affine(affine(x, 16, "live") * gate + dead, 5, "head"), t)
    gates = iter([1.0, 0.0])

    def set_gate() -> None:
        gate.d = next(gates)

    causes = diagnose(loss, feeder=feeder(x, t, set_gate), batches=2).verdict.causes
    assert [(cause.kind, cause.function) for cause in causes] == [("dead_relu", "dead/affine/ReLU")]


NEEDS: Dict[str, Any] = {
    # needs, and what is said of the network or of a layer
    "tiny_loss_weight": (
        Way.ONE,
        "fc1/affine loses 100% to underflow from head/affine/SoftmaxCrossEntropy on",
    ),
    "branches_apart": (Way.ADAPTIVE, "with one measured scale, quiet_fc/affine loses 96% to underflow"),
    "vanishing_sigmoid": (Way.ADAPTIVE, "Layers fc0/affine and head/affine need scales 2^42 apart"),
    "recurrence_with_a_quiet_beginning": (
        Way.CONSTANT,
        "without it, rnn/affine/Broadcast loses 100% of state to underflow",
    ),
    "two_heads": (
        Way.ONE,
        "from a/affine/SoftmaxCrossEntropy and b/affine/SoftmaxCrossEntropy on (and 2 more layers)",
    ),
    "branches_that_shrink": (
        None,
        "trunk/affine loses 100% to underflow from a1/affine/Gate and b1/affine/Gate",
    ),
    "recurrence_that_explodes": (None, "rnn/affine loses 100% to overflow from rnn/affine/Gate on"),
    "small_residual": (Way.CONSTANT, "inner/affine loses 100% to underflow from out/affine/MulScalar on"),
    "loud_loss": (Way.NONE, "has no room for 65536, which overflows in head/affine"),
    "sum_of_losses": (Way.ONE, "fc1/affine loses 100% to overflow from head/affine/SoftmaxCrossEntropy on"),
    "quiet_before_a_loud_tail": (Way.ONE, "One measured scale works for all layers, 2^49"),
    "overflowing_biases": (Way.ONE, "b/conv loses 100% of b/conv/b to overflow from b/conv on"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_the_layer_that_loses_its_gradient_and_the_scaling_that_trains_it(name: str) -> None:
    loss, feed = getattr(nets, name)()
    diagnosis = diagnose(loss, feeder=feed)
    needs, said = NEEDS[name]
    assert diagnosis.verdict.needs is needs, diagnosis
    assert said in diagnosis.verdict.line


def test_formats_are_told_apart() -> None:
    loss, feed = tiny_loss_weight()
    assert diagnose(loss, feeder=feed).verdict.formats == {
        "float16": Way.ONE,
        "bfloat16": Way.NONE,
        "fp8_hybrid": Way.ONE,
    }
    nn.clear_parameters()
    loss, feed = nets.coarse_format()
    verdict = diagnose(loss, "float8_e5m2", feed).verdict
    assert (verdict.needs, verdict.formats["float16"]) == (None, Way.CONSTANT)
    assert re.match(
        r"No scaling keeps all gradients in float8_e5m2: bn\d+/bn has an error of \d+%.*, as float8_e5m2 is",
        verdict.line,
    )


def test_uses_of_a_weight_are_one_layer() -> None:
    x, t = inputs()
    h = F.tanh(affine(F.tanh(affine(x, 16, "shared")), 16, "shared"))
    diagnosis = diagnose(cross_entropy(affine(h, 5, "head"), t), feeder=feeder(x, t), batches=1)
    found = {layer.name: layer.nonzero for layer in diagnosis.numbers.layers}
    assert found == {"shared/affine": 16 * 16 + 16, "head/affine": 16 * 5 + 5}


def test_the_updater_names_the_same_function() -> None:
    loss, feed = scores_divided_too_late.build(False)
    updater = updater_of(loss, feed, S.Sgd(1e-30), float_tail=False)
    with pytest.raises(LossScaleError) as error:
        updater.update()
    name = diagnose(updater).verdict.causes[0].function
    assert f"{name} (BatchMatmul) computes" in str(error.value)


def test_batches_are_counted_as_the_updater_counts_them() -> None:
    """A feeder may draw by their number, as docs/checkpoints.md recommends."""
    asked: List[int] = []
    updater: Any = None
    loss, feed = network(spoil=lambda x, t: asked.append(updater.counters.fed))
    updater = updater_of(loss, feed, S.Sgd(0.1))
    updater.update()
    diagnosis = diagnose(updater)
    assert asked == [0, 1, 2]
    assert diagnosis.numbers.notes == []
    assert updater.counters.fed == 1


def test_nothing_is_changed_when_it_is_interrupted() -> None:
    training = Training()
    training.train(3)
    updater = training.updater
    moments = Moments(0)
    moments.run(lambda: diagnose(updater, batches=1))
    before = training.everything()
    for stop in range(1, moments.count, moments.count // 15):
        with suppress(Interrupt):
            Moments(stop).run(lambda: diagnose(updater, batches=1))
        assert differences(before, training.everything()) == [], stop
        assert updater.counters.fed == 3


@pytest.mark.parametrize("turn", [1, 2, 3, 5, 9])
def test_an_interruption_in_a_pass_comes_out_as_it_is(turn: int) -> None:
    function, (x, t) = Interrupted(), inputs()
    loss = cross_entropy(affine(function(F.tanh(affine(x, 16, "fc1"))), 5, "head"), t)
    weights = nn.get_parameters()["fc1/affine/W"].d.copy()
    function.left = turn
    with pytest.raises(KeyboardInterrupt):
        diagnose(loss, feeder=feeder(x, t))
    np.testing.assert_array_equal(nn.get_parameters()["fc1/affine/W"].d, weights)


def test_without_a_feeder_the_data_that_is_there_is_one_batch_as_a_note_says_below_the_verdict() -> None:
    loss, feed = mlp()
    feed()
    diagnosis = diagnose(loss, batches=7)
    assert diagnosis.numbers.batches == 1
    assert diagnosis.as_dict()["notes"] == ["No feeder was given: this is about what the inputs hold now."]
    assert str(diagnosis).index("No feeder was given") > str(diagnosis).index(diagnosis.verdict.line)
    assert str(diagnose(loss, ["float16"])).startswith("No feeder was given")
    assert "No feeder" not in str(diagnose(loss, feeder=feed))
    # The feeder that an updater has when it is given none.
    assert "No feeder was given" in str(diagnose(updater_of(loss, keep_data, S.Sgd(0.1))))
    assert "The feeder has changed no input in 4 batches" in str(
        nnabla_adaloss.diagnose(loss, feeder=lambda: None)
    )


def test_inputs_that_nobody_has_filled_end_the_examination() -> None:
    loss, feed = never_fed.build(False)
    for feeder_or_none in (feed, None):
        diagnosis = diagnose(loss, feeder=feeder_or_none)
        assert (diagnosis.verdict.needs, diagnosis.numbers.layers) == (None, [])
        assert diagnosis.verdict.line.startswith(
            "Nothing can be said. fc1/affine: it reads the input of shape"
        )
    with pytest.raises(ValueError, match="nobody has filled the input of shape"):
        diagnose(loss, ["fp8_hybrid", "float16"], feed)


def test_one_of_several_inputs_that_nobody_has_filled_is_a_note() -> None:
    (x, t), state = inputs(), nn.Variable((32, 16))
    loss = cross_entropy(affine(F.tanh(affine(x, 16, "fc1") + affine(state, 16, "again")), 5, "head"), t)
    diagnosis = diagnose(loss, feeder=feeder(x, t))
    (note,) = diagnosis.as_dict()["notes"]
    assert note.startswith("Nobody has filled the input of shape (32, 16), read by again/affine: fill it")
    assert diagnosis.verdict.needs is Way.NONE


@pytest.mark.parametrize("of_the_loss", [False, True])
def test_whether_a_parameter_is_in_no_solver_on_purpose_is_not_judged(of_the_loss: bool) -> None:
    x, t = inputs()
    h = hidden(x)
    early = nn.get_parameters()
    updater = updater_of(classes(h, t), feeder(x, t), S.Sgd(0.1), early)
    diagnosis = diagnose(updater.loss, feeder=updater.data_feeder) if of_the_loss else diagnose(updater)
    (note,) = diagnosis.numbers.notes
    assert note.names == ["head/affine/W", "head/affine/b"]
    assert str(note).startswith(
        "No solver has 2 of the parameters that get a gradient: head/affine/W and head/affine/b. If this"
    )
    assert not diagnosis.verdict.causes


def test_a_learning_rate_that_each_batch_lowers_is_a_note() -> None:
    loss, feed = network()
    solver = S.Sgd(0.1)

    def schedule() -> None:
        feed()
        solver.set_learning_rate(0.5 * solver.learning_rate())

    updater = updater_of(loss, schedule, solver)
    (note,) = diagnose(updater).numbers.notes
    assert str(note).startswith("The feeder lowers the learning rate from 0.05 to 0.025 in 2 batches")


def test_a_warm_up_from_0_is_no_schedule_that_falls() -> None:
    loss, feed = network()
    solver, fed = S.Adam(1e-3), itertools.count()

    def schedule() -> None:
        feed()
        solver.set_learning_rate(1e-6 * next(fed))

    diagnosis = diagnose(updater_of(loss, schedule, solver))
    assert (diagnosis.numbers.notes, diagnosis.verdict.causes) == ([], [])


def test_lambs_epsilon_takes_no_steps_away() -> None:
    """Lamb divides its steps by their norm."""
    loss, feed = network()
    assert not diagnose(updater_of(loss * 1e-9, feed, S.Lamb(1e-3))).verdict.causes


@pytest.mark.parametrize(("least", "most"), [(-1.0, 1.0), (0.0, 255.0)])
def test_targets_beyond_their_range_are_a_note(least: float, most: float) -> None:
    x, t = inputs()
    loss = F.mean(F.sigmoid_cross_entropy(affine(hidden(x), 1, "head"), t))
    feed = feeder(x, t, lambda: setattr(t, "d", np.where(t.d > 2.0, most, least)))
    (note,) = diagnose(loss, feeder=feed).numbers.notes
    assert f"reads targets from {least:g} to {most:g}, where they must be from 0 to 1." in str(note)


def test_an_input_that_the_format_makes_zero_is_a_note() -> None:
    (x, t), tiny = inputs(), nn.Variable((32, 4))
    feed = feeder(x, t, lambda: setattr(tiny, "d", np.full((32, 4), 1e-9)))
    (note,) = diagnose(classes(hidden(x) + affine(tiny, 16, "side"), t), feeder=feed).numbers.notes
    assert str(note).startswith("No layer sees the input of shape (32, 4), which becomes 0 in float16")


def test_parameters_behind_a_comparison_are_a_note() -> None:
    (x, t), steps = inputs(), nn.Variable.from_numpy_array(np.arange(16.0)[None])
    length = F.broadcast(affine(F.tanh(affine(x, 8, "length1")), 1, "length2"), (32, 16))
    mask = F.less_equal(F.broadcast(steps, (32, 16)), length).apply(need_grad=False)
    summed = F.sum(affine(hidden(x), 16, "value") * mask, axis=1, keepdims=True)
    note, units = diagnose(F.mean(F.squared_error(summed, t)), feeder=feeder(x, t)).numbers.notes
    assert str(units).startswith("value/affine learns nothing in ")
    assert [name.partition("/")[0] for name in note.names] == ["length1", "length1", "length2", "length2"]
    assert "stops at length2/affine/LessEqual, whose output has no derivative" in str(note)


@pytest.mark.parametrize("is_label", [False, True])
def test_parameters_behind_a_choice_that_trained_layers_read_are_a_note(is_label: bool) -> None:
    x, t = inputs()
    scores = affine(F.tanh(affine(x, 8, "actor1")), 5, "actor2")
    best = F.max(scores, axis=1, keepdims=True, only_index=True).apply(need_grad=False)
    move = F.one_hot(best, (5,))
    if is_label:  # of a teacher, on purpose
        loss = F.mean(F.squared_error(affine(hidden(x), 5, "student"), move))
    else:
        logits = affine(hidden(x)[:, :5], 16, "critic") + affine(move, 16, "critic")
        loss = F.mean(F.softmax_cross_entropy(logits, t))
    notes = diagnose(loss, feeder=feeder(x, t)).numbers.notes
    told = [
        note for note in notes if "stops at actor2/affine/Max, whose output has no derivative" in str(note)
    ]
    assert [len(note.names) for note in told] == [4] * (not is_label)


@pytest.mark.parametrize(("size", "told"), [(1.0, 0), (2000.0, 1)])
def test_numbers_next_to_the_end_of_the_format_are_a_note(size: float, told: int) -> None:
    loss, feed = network(lambda x: F.tanh(F.sin(affine(x, 16, "fc1")) * (10.0 * size)))
    notes = diagnose(loss, feeder=feed).numbers.notes
    found = [
        note for note in notes if str(note).startswith("Numbers reach 2e+04, where float16 ends at 65504")
    ]
    assert len(found) == told


def test_a_mask_does_not_saturate_a_softmax() -> None:
    """What makes the open places' scores large is told, not the factor of the mask."""
    x, t = inputs()
    closed = nn.Variable.from_numpy_array(np.tril(np.ones((16, 16)))[None].repeat(2, axis=0) - 1.0)
    scores = F.reshape(affine(x, 16, "scores", 300.0), (2, 16, 16)) + closed * 60000.0
    loss = classes(F.reshape(F.softmax(scores, axis=2), (32, 16)) * F.tanh(affine(x, 16, "values")), t)
    (cause,) = diagnose(loss, feeder=feeder(x, t)).verdict.causes
    assert (cause.kind, cause.parameters) == ("saturated", ("scores/affine/W",))


def test_a_critic_with_a_gradient_penalty_does_not_accuse_its_generator() -> None:
    """The masks of a ReLU's gradient are comparisons of what the generator has computed."""
    x, t = inputs()
    fake = F.tanh(affine(x, 16, "generator")).apply(need_grad=False)
    both = F.identity(fake).apply(need_grad=True)
    of_fake, of_real = (affine(F.relu(affine(v, 16, "critic1")), 1, "critic2") for v in (both, x))
    (gradient,) = nn.grad([of_fake], [both])
    loss = F.mean(of_fake - of_real) + F.mean((F.sum(gradient**2, axis=1) + 1e-3) ** 0.5 - 1.0)
    assert not diagnose(loss, feeder=feeder(x, t)).numbers.notes


@pytest.mark.parametrize("trains", [False, True])
def test_parameters_that_are_frozen_after_building_are_a_note(trains: bool) -> None:
    """NNabla goes on computing their gradients, and the solver moves them, if it has them."""
    loss, feed = network()
    parameters = nn.get_parameters()
    parameters["fc1/affine/W"].need_grad = False
    updater = updater_of(loss, feed, S.Sgd(0.1), nn.get_parameters(grad_only=not trains))
    note = str(diagnose(updater).numbers.notes[0])
    assert ("need_grad=False comes too late for fc1/affine/W, which a solver" in note) == trains


def some(last: int, above: bool = True) -> nn.Variable:
    return nn.Variable.from_numpy_array((np.arange(16)[None] > last) == above)


@pytest.mark.parametrize(
    ("changed", "value", "activation", "told"),
    [
        ("b", -60.0, F.relu, "as the parameter fc1/affine/b reaches -60 there"),
        ("b", -0.1, F.relu, ""),
        ("W", 0.0, lambda x: F.relu(x - 0.2), "whose weights are all 0"),
        ("W", 0.0, F.tanh, ""),
        ("W", 1.0, lambda x: F.relu(x) * some(9), "to which no gradient gets"),
        ("W", 1.0, lambda x: F.relu(x) * some(7), ""),
    ],
)
def test_units_without_a_gradient_are_a_note(changed: str, value: float, activation: Any, told: str) -> None:
    loss, feed = network(lambda x: activation(affine(x, 16, "fc1", bias=0.1)))
    parameter = nn.get_parameters()[f"fc1/affine/{changed}"].d
    parameter[..., :8] = value if changed == "b" else value * parameter[..., :8]
    notes = [str(note).partition(". ")[0] for note in diagnose(loss, feeder=feed).numbers.notes]
    count = 10 if "gets" in told else 8
    assert notes == [f"fc1/affine learns nothing in {count} of 16 units, {told}"][: bool(told)]


@pytest.mark.parametrize("trains", [False, True])
def test_a_feeder_that_writes_what_the_solver_trains_is_a_note(trains: bool) -> None:
    loss, feed = network(spoil=lambda x, t: nn.get_parameters()["fc1/affine/b"].d.__setitem__(0, 1.0))
    parameters = {n: v for n, v in nn.get_parameters().items() if trains or n != "fc1/affine/b"}
    told = diagnose(updater_of(loss, feed, S.Sgd(0.1), parameters)).as_dict()["notes"]
    assert ("The feeder writes to fc1/affine/b, which the solver trains: leave" in " ".join(told)) == trains


def test_a_gate_that_a_relu_holds_at_zero_is_neither_data_nor_waited_for() -> None:
    loss, feed = gate_behind_a_relu.build(False)
    numbers = diagnose(loss, feeder=feed).numbers
    assert [layer.waits_for for layer in numbers.layers] == [""] * len(numbers.layers)
    assert not numbers.notes


def test_zeros_of_a_sigmoid_are_not_explained_by_growth() -> None:
    loss, feed = network(loss=lambda h, t: -F.mean(F.log(1.0 - F.sigmoid(affine(h, 1, "head", 300.0)))))
    cause = diagnose(loss, feeder=feed).verdict.causes[0]
    assert (cause.kind, cause.remedy) == ("not_finite", remedies.LOG)
    assert "times" not in cause.what


def test_a_branch_that_a_bias_leaves_out_is_told_with_it() -> None:
    x, t = inputs()
    experts = [affine(x, 1, f"expert{number}", bias=9.0 * number) for number in (0, 1)]
    loss = F.mean(F.squared_error(F.maximum2(*experts), t))
    (note,) = diagnose(loss, feeder=feeder(x, t)).numbers.notes
    assert "none passes expert0/affine/Maximum2; the bias expert1/affine/b reaches 9." in str(note)
    assert str(note).endswith(f"Unless other batches reach them, {remedies.SMALLER_BIAS}.")


def test_a_branch_that_a_function_never_takes_is_a_note() -> None:
    """Twin critics of which one is always the smaller, and a branch that is joined and sliced off again."""
    x, t = inputs()
    q0, q1 = (affine(hidden(x), 1, f"q{number}", bias=-9.0 * number) for number in (0, 1))
    joined = F.concatenate(F.tanh(affine(x, 4, "used")), F.tanh(affine(x, 4, "unused")), axis=1)
    loss = F.mean(F.squared_error(F.minimum2(q0, q1), t)) + classes(joined[:, :4], t)
    (note,) = diagnose(loss, feeder=feeder(x, t)).numbers.notes
    assert note.names == ["q0/affine", "unused/affine"]
    assert "in 2 batches: none passes q0/affine/Minimum2 and used/affine/Slice." in str(note)


def test_units_that_no_function_reads_are_a_note() -> None:
    x, t = inputs()
    gated = affine(x, 12, "gated")
    loss = classes(gated[:, :6] * F.sigmoid(gated[:, :6]), t)
    (note,) = diagnose(loss, feeder=feeder(x, t)).numbers.notes
    assert str(note).startswith("gated/affine learns nothing in 6 of 12 units, which no function reads.")


def test_a_codebook_behind_a_choice_and_a_stop_is_cut_off_at_the_stop() -> None:
    x, t = inputs()
    h, book = hidden(x), nn.parameter.get_parameter_or_create("book", (5, 16))
    index = F.min(F.affine(h, F.transpose(book, (1, 0))), axis=1, only_index=True).apply(need_grad=False)
    entry = F.identity(F.embed(index, book)).apply(need_grad=False)
    loss = classes(h, t) + F.mean(F.squared_error(h, entry))
    (note,) = diagnose(loss, feeder=feeder(x, t)).numbers.notes
    assert "stops at book/Identity, whose output has need_grad=False" in str(note)


@pytest.mark.parametrize("bad", [-1.0, 16.0, math.nan])
def test_an_index_beyond_its_table_is_told_before_anything_runs(bad: float) -> None:
    """nnabla crashes at some of them; the batch that has it need not be the last."""
    x, t, item = *inputs(), nn.Variable((32,))
    batches = itertools.count()

    def fill() -> None:
        item.d = np.arange(32.0) % 16
        item.d[3] = bad if next(batches) == 0 else 0.0

    loss, feed = classes(hidden(x) + PF.embed(item, 16, 16, name="item"), t), feeder(x, t, fill)
    (cause,) = diagnose(loss, feeder=feed).verdict.causes
    assert (cause.kind, cause.function) == ("index_beyond", "item/embed")
    assert f"{min(bad, 0.0):g} to {max(bad, 15.0):g} from" in cause.what
    batches = itertools.count()
    with pytest.raises(ValueError, match="item/embed: it reads indices"):
        diagnose(loss, ["fp8_hybrid", "float16"], feed)


def test_a_function_without_inputs_beyond_the_format() -> None:
    """A loss that divides again by what it has multiplied by."""
    loss, feed = network(lambda x: hidden(x) * F.constant(1e6, (32, 16)) / F.constant(1e6, (32, 16)))
    (cause, *_) = diagnose(loss, feeder=feed).verdict.causes
    assert cause.kind == "overflow"


def test_a_choice_between_two_that_are_nearly_equal_may_change() -> None:
    """A nearest entry is another one in float16: no index is rounded."""
    x, t = inputs()
    near = F.min(1.0 + 0.03 * x, axis=1, only_index=True).apply(need_grad=False)
    loss = classes(hidden(x) + PF.embed(near, 16, 16, name="book"), t)
    assert not diagnose(loss, feeder=feeder(x, t)).verdict.causes


def test_functions_of_frozen_weights_have_their_own_names() -> None:
    x, t = inputs()
    with nn.parameter_scope("critic"):
        frozen = [nn.parameter.get_parameter_or_create("fc/W", (16, 5), need_grad=False)]
    updater = updater_of(cross_entropy(F.affine(hidden(x), frozen[0]), t), feeder(x, t), S.Sgd(0.1))
    with nn.parameter_scope("critic"):
        frozen[0].d = 1e6
    (cause, *_) = diagnose(updater).verdict.causes
    assert cause.function == "critic/fc"


@pytest.mark.parametrize("learns", [False, True])
def test_a_variable_that_no_solver_moves_is_a_note(learns: bool) -> None:
    """Positions in a plain Variable, beside data with a gradient, as an adversary reads it."""
    (x, t), places = inputs(), nn.Variable((1, 16), need_grad=learns)
    x.need_grad = True
    places.d = 0.1
    loss = classes(hidden(x) + F.broadcast(places, (32, 16)), t)
    diagnosis = diagnose(updater_of(loss, feeder(x, t), S.Sgd(0.1), nn.get_parameters()))
    assert [note.names for note in diagnosis.numbers.notes] == [["the input of shape (1, 16)"]] * learns
    assert not diagnosis.verdict.causes


@pytest.mark.parametrize(
    ("bad", "where"), [([2], ", in batch 3 of 4"), ([0, 3], ", in batches 1 and 4 of 4")]
)
def test_the_batches_that_are_not_finite_are_told(bad: List[int], where: str) -> None:
    batches = itertools.count()

    def spoil(x: nn.Variable, t: nn.Variable) -> None:
        x.d[:, 1] = np.where(next(batches) in bad, np.nan, 1.0)

    loss, feed = network(spoil=spoil)
    (cause,) = diagnose(loss, feeder=feed, batches=4).verdict.causes
    assert cause.what.endswith(where)


@pytest.mark.parametrize("cut", ["has need_grad=False", "is unlinked"])
def test_whether_a_loss_leaves_parameters_out_on_purpose_is_not_judged(cut: str) -> None:
    x, t = inputs()
    h = hidden(2.0 * x)
    h.need_grad = cut == "is unlinked"
    diagnosis = diagnose(classes(F.unlink(h) if h.need_grad else h, t), feeder=feeder(x, t))
    (note,) = diagnosis.numbers.notes
    assert note.names == ["fc1/affine/W", "fc1/affine/b"]
    assert f"the gradient stops at fc1/affine/Tanh, whose output {cut}." in str(note)
    assert not diagnosis.verdict.causes


@pytest.mark.parametrize("built", [cut_in_the_middle, cut_off_altogether])
def test_a_cause_of_missing_gradients_is_no_note_as_well(built: nets.Trouble) -> None:
    source, feed = built.build(False)
    diagnosis = diagnose(source, feeder=feed)
    assert [cause.kind for cause in diagnosis.verdict.causes] == ["untrained"]
    assert not [note for note in diagnosis.numbers.notes if "No gradient gets to" in str(note)]


def test_a_teacher_that_is_compared_or_unlinked_is_left_out_on_purpose() -> None:
    x, t = inputs()
    rates, levels = (affine(affine(x, 8, f"{name}1"), 16, f"{name}2") for name in ("rates", "levels"))
    rates.need_grad = levels.need_grad = False
    mask = F.greater_scalar(F.tanh(rates), 0.0).apply(need_grad=False)
    losses = F.softmax_cross_entropy(affine(hidden(x + F.tanh(F.unlink(levels))), 5, "head"), t)
    assert not diagnose(F.mean(losses * mask[:, :1]), feeder=feeder(x, t)).numbers.notes


@pytest.mark.parametrize("learns", [False, True])
def test_a_part_behind_an_output_without_need_grad_is_a_note(learns: bool) -> None:
    """An embedding that is added to data, before the first trained layer."""
    (x, t), level = inputs(), nn.Variable((32, 1))
    time = affine(F.tanh(affine(level, 8, "time1")), 16, "time2")
    time.need_grad = learns

    def levels() -> None:
        level.d = np.linspace(0.0, 1.0, 32)[:, None]

    diagnosis = diagnose(classes(hidden(x + F.tanh(time)), t), feeder=feeder(x, t, levels))
    names = [name for note in diagnosis.numbers.notes for name in note.names]
    assert names == (
        [] if learns else [f"time{index}/affine/{letter}" for index in (1, 2) for letter in "Wb"]
    )
    assert all("stops at time2/affine, whose output has" in str(note) for note in diagnosis.numbers.notes)
    assert (diagnosis.verdict.needs, diagnosis.verdict.causes) == (Way.NONE, [])


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_a_loss_beyond_the_format_is_a_note_as_the_updater_computes_it_in_fp32(size: float) -> None:
    loss, feed = network()
    diagnosis = diagnose(F.log(loss * size + loss * size), feeder=feed)
    beyond = [note.names for note in diagnosis.numbers.notes]
    assert beyond == ([["head/affine/MulScalar"]] if size > 65504.0 else [])
    assert (diagnosis.verdict.needs, diagnosis.verdict.causes) == (Way.NONE, [])


def test_only_a_factor_of_the_loss_is_to_be_left_out() -> None:
    losses = (lambda size: 1e6 * size), (lambda size: 1.0 / (1e6 * size))
    built = [network(loss=lambda h, t, of=of: of(F.mean(affine(h, 5, "head") ** 2))) for of in losses]
    ends = [str(diagnose(loss, feeder=feed).numbers.notes[0]) for loss, feed in built]
    assert [remedies.NO_FACTOR in ends[0], remedies.MEAN_LOSS in ends[1]] == [True, True]


def test_a_state_that_starts_from_0_is_not_accused_beside_saturated_gates() -> None:
    def layers(x: nn.Variable) -> nn.Variable:
        h, c = (F.constant(0.0, (32, 4)) for _ in range(2))
        with nn.parameter_scope("cell"):
            for _ in range(3):
                h, c = PF.lstm_cell(x, h, c, 4)
        return h

    loss, feed = network(layers, spoil=lambda x, t: setattr(x, "d", np.round(x.d + 5.0) * 1e3))
    causes = diagnose(loss, feeder=feed).verdict.causes
    assert {cause.kind for cause in causes} == {"saturated"}
    assert causes[0].remedy == remedies.NORMALISE_DATA


def test_a_state_that_starts_from_0_is_not_accused_where_its_gate_is_saturated_later() -> None:
    """The gate's gradient ends at the state in the first step, and at the gate itself in the second."""

    def layers(x: nn.Variable) -> nn.Variable:
        state = F.constant(0.0, (32, 4))
        for _ in range(2):
            forget, gate = F.sigmoid(affine(x, 4, "forget", bias=1e3)), F.sigmoid(affine(x, 4, "input"))
            state = forget * state + gate * F.tanh(affine(x, 4, "new"))
        return state

    loss, feed = network(layers)
    (cause,) = diagnose(loss, feeder=feed).verdict.causes
    assert (cause.kind, cause.function) == ("saturated", "forget/affine/Sigmoid")


@pytest.mark.parametrize(("base", "told"), [(300.0, 1), (0.0, 0)])
def test_sums_that_leave_a_state_as_it_is_are_a_note_where_gradients_are_fine(base: float, told: int) -> None:
    x, t = inputs()
    h = nn.parameter.get_parameter_or_create("start", (1, 16), I.ConstantInitializer(base))
    for _ in range(12):
        h = F.broadcast(h, x.shape) + 1e-2 * F.tanh(affine(x, 16, "step"))
    loss = F.mean(F.squared_error(F.sum(affine(h * 1e-3, 1, "head"), axis=1, keepdims=True), t))
    notes = map(str, diagnose(loss, feeder=feeder(x, t)).numbers.notes)
    assert sum("others up to 300, which stay as they are in float16" in note for note in notes) == told


def test_a_mask_that_opens_only_places_without_labels_is_named() -> None:
    (x, t), count = inputs(), nn.Variable.from_numpy_array(np.arange(32)[:, None])
    places = F.reshape(affine(x, 5, "tag"), (32, 5))
    label = F.where(F.less_scalar(count, 20), t, F.constant(-1.0, t.shape)).apply(need_grad=False)
    mask = F.greater_equal_scalar(count, 20).apply(need_grad=False)
    loss = classes(hidden(x), t) + F.mean(F.softmax_cross_entropy(places, label) * mask)
    (note,) = diagnose(loss, feeder=feeder(x, t)).numbers.notes
    assert "tag/affine/SoftmaxCrossEntropy, and tag/affine/Mul2 multiplies the others by 0" in str(note)
    assert str(note).endswith(f"{remedies.CHECK_MASK_AND_LABELS}.")


def test_units_of_a_weight_are_counted_over_all_its_uses() -> None:
    """Each use opens other units of the same layer."""

    def layers(x: nn.Variable) -> nn.Variable:
        return sum(F.tanh(affine(x, 16, "fc1")) * some(7, above) for above in (True, False))

    loss, feed = network(layers)
    assert diagnose(loss, feeder=feed).numbers.notes == []


def test_units_of_a_function_that_is_told_are_not_told_again() -> None:
    loss, feed = network(lambda x: F.tanh(affine(x, 16, "fc1")))
    nn.get_parameters()["fc1/affine/b"].d[4:] = 60.0
    saturated = diagnose(loss, feeder=feed)
    assert ([cause.kind for cause in saturated.verdict.causes], saturated.numbers.notes) == (
        ["saturated"],
        [],
    )


@pytest.mark.parametrize(
    ("align_corners", "shift", "told"), [(True, 0.0, 1), (False, 0.0, 1), (True, 0.1, 0)]
)
def test_gradients_of_sampled_places_are_judged_off_the_pixels(
    align_corners: bool, shift: float, told: int
) -> None:
    """Those of the image always are, also where the places depend on the same layer."""

    def layers(x: nn.Variable) -> nn.Variable:
        start = np.array([1.0, 0.0, shift, 0.0, 1.0, shift])
        zeros = I.ConstantInitializer(0.0)
        trunk = F.tanh(affine(x, 16, "trunk"))
        place = PF.affine(F.tanh(affine(trunk, 8, "where1")), 6, name="where2", w_init=zeros, b_init=start)
        grid = F.affine_grid(F.reshape(place, (32, 2, 3)), (4, 4), align_corners=align_corners)
        image = F.reshape(affine(trunk, 16, "image"), (32, 1, 4, 4))
        return F.reshape(F.warp_by_grid(image, grid, align_corners=align_corners), (32, 16))

    loss, feed = network(layers)
    numbers = diagnose(loss, feeder=feed).numbers
    assert sum("Derivatives jump" in str(note) for note in numbers.notes) == told
    floors = {layer.name: layer.floor for layer in numbers.layers}
    assert min(floors["trunk/affine"], floors["image/affine"]) > 0.0
    assert (floors["where2/affine"] == 0.0) == bool(told)


def test_infinities_of_both_signs_are_no_mask() -> None:
    """A ReLU makes NaN of them, which is no softmax of a closed row."""
    rng, x, t = np.random.default_rng(0), nn.Variable((40, 8, 4)), nn.Variable((8, 1))
    turn = nn.parameter.get_parameter_or_create("turn", (16, 16), np.eye(16) * 1.5)
    state = F.constant(0.0, (8, 16))
    for step in F.split(x, axis=0):
        state = F.relu(F.affine(state, turn) + PF.affine(step, 16, name="in"))

    def feed() -> None:
        x.d, t.d = rng.standard_normal(x.shape), rng.integers(0, 4, t.shape)

    nn.seed(0)
    causes = diagnose(
        cross_entropy(PF.affine(state, 4, name="head"), t), feeder=feed, batches=4
    ).verdict.causes
    assert {cause.kind for cause in causes} == {"overflow"}


def test_a_flat_gate_that_storage_makes_0_is_told_once_with_all_that_it_spoils() -> None:
    loss, feed = network(lambda x: F.sigmoid(affine(x, 16, "fc1", bias=-20.0)) * F.tanh(affine(x, 16, "fc2")))
    first, *others = diagnose(loss, feeder=feed).verdict.causes
    assert (first.kind, others) == ("saturated", [])
    assert {"fc1/affine", "fc2/affine"} <= set(first.spoils)


def test_a_state_that_nobody_fills_is_a_note_behind_a_product() -> None:
    (x, t), state = inputs(), nn.Variable((32, 16))
    h = F.tanh(affine(x, 16, "fc1") + affine(state, 16, "again"))
    loss = F.mean(F.squared_error(affine(h, 1, "head"), t))
    assert diagnose(loss, feeder=feeder(x, t)).verdict.causes == []


def test_a_layer_that_an_input_of_zeros_teaches_nothing_is_a_note() -> None:
    (x, t), state = inputs(), nn.Variable((32, 16))
    loss = cross_entropy(affine(F.tanh(affine(x, 16, "fc1") + affine(state, 16, "again")), 5, "head"), t)

    def zeros() -> None:
        state.d = 0.0

    (note,) = diagnose(loss, feeder=feeder(x, t, zeros)).as_dict()["notes"]
    assert note.startswith("again/affine learns nothing from the input of shape (32, 16), which is all 0")


def test_a_layer_waits_only_for_a_zero_that_all_its_ways_are_multiplied_by() -> None:
    """Of two low-rank pairs, the first one's A waits for its own B, and nothing for the second one's."""

    def layers(x: nn.Variable) -> nn.Variable:
        for name in ("l1", "l2"):
            frozen = PF.affine(x, 16, name=name, fix_parameters=True)
            x = F.tanh(frozen + affine(affine(x, 4, f"{name}/A"), 16, f"{name}/B", factor=0.0))
        return x

    loss, feed = network(layers)
    waiting = {layer.name: layer.waits_for for layer in diagnose(loss, feeder=feed).numbers.layers}
    assert waiting == {
        "l1/A/affine": "l1/B/affine/W",
        "l1/B/affine": "",
        "l2/A/affine": "l2/B/affine/W",
        "l2/B/affine": "",
        "head/affine": "",
    }


def test_a_layer_that_a_zero_elsewhere_leaves_without_a_gradient_does_not_wait_for_it() -> None:
    """The gradient of `dead` ends in its rectifier; what is 0 and moves is on one of its ways only."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        dead = F.relu(affine(h, 16, "dead", bias=-100.0))
        return h + dead + affine(F.tanh(dead + h), 16, "zero", factor=0.0)

    loss, feed = network(layers)
    waiting = {layer.name: layer.waits_for for layer in diagnose(loss, feeder=feed).numbers.layers}
    assert waiting["dead/affine"] == ""


def test_layers_that_get_a_gradient_when_a_weight_of_zero_has_moved() -> None:
    def layers(x: nn.Variable) -> nn.Variable:
        h = affine(x, 16, "stem")
        alpha = nn.parameter.get_parameter_or_create("alpha", (1, 1), np.zeros((1, 1)))
        h = h + F.broadcast(alpha, h.shape) * affine(F.tanh(affine(h, 16, "gated1")), 16, "gated2")
        return h + affine(F.tanh(affine(h, 16, "lora_a")), 16, "lora_b", 0.0)

    loss, feed = network(layers)
    diagnosis = diagnose(loss, feeder=feed)
    waiting = {layer.name: layer.waits_for for layer in diagnosis.numbers.layers if layer.waits_for}
    assert waiting == {
        "gated1/affine": "alpha",
        "gated2/affine": "alpha",
        "lora_a/affine": "lora_b/affine/W",
    }
    assert (diagnosis.verdict.needs, diagnosis.verdict.causes) == (Way.NONE, [])


def test_layers_whose_gradients_on_gradients_makes_0_are_a_note() -> None:
    """A prefix that others begin with, too."""
    loss, feed = network(lambda x: affine(hidden(x), 16, "fc10"))

    def freeze(solver: S.Solver) -> None:
        for name, v in solver.get_parameters().items():
            if name.startswith("fc1"):
                v.g = 0

    diagnosis = diagnose(updater_of(loss, feed, S.Adam(1e-3), on_gradients=freeze))
    assert [note.names for note in diagnosis.numbers.notes] == [["fc1/affine", "fc10/affine"]]
    assert not diagnosis.verdict.causes
    frozen = diagnose(updater_of(loss, feed, S.Adam(1e-3), on_gradients=lambda solver: solver.zero_grad()))
    assert not frozen.numbers.notes
    assert [cause.kind for cause in frozen.verdict.causes] == ["on_gradients"]


def test_a_branch_that_zeros_multiply_is_told_with_them() -> None:
    """The rate of weights that are pruned, not kept."""
    loss, feed = network(loss=lambda h, t: cross_entropy(PF.pruned_affine(h, 5, rate_w=1.0, name="head"), t))
    (note,) = diagnose(loss, feeder=feed).numbers.notes
    assert note.names == ["fc1/affine"]
    assert "which multiplies by the output of head/pruned_affine/Prune, all 0" in note.end


def test_a_copy_does_not_hide_a_constant_beside_it() -> None:
    """The copy differs by rounding errors, and only at the start; the mean of a softmax never learns."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        projection, target = affine(h, 8, "projection"), affine(h, 8, "target").apply(need_grad=False)
        for name in ("W", "b"):
            v = nn.get_parameters()[f"projection/affine/{name}"]
            nn.get_parameters()[f"target/affine/{name}"].d = 0.9 * v.d + 0.1 * v.d
        constant = F.mean(F.softmax(affine(h, 5, "constant")))
        return classes(h, t) + constant + F.mean(F.squared_error(projection, target))

    source, feed = network(loss=loss)
    (cause,) = diagnose(source, feeder=feed, batches=2).verdict.causes
    assert (cause.kind, cause.function, cause.spoils) == (
        "rounding_noise",
        "constant/affine",
        ("constant/affine",),
    )


def test_a_batch_without_a_gradient_does_not_hide_steps_that_move_nothing() -> None:
    x, t = inputs()
    weight, fed = nn.Variable((32, 1)), itertools.count()
    loss = F.mean(weight * F.softmax_cross_entropy(affine(hidden(x), 5, "head"), t))
    feed = feeder(x, t, lambda: setattr(weight, "d", float(next(fed) % 2)))
    (cause,) = diagnose(updater_of(loss, feed, S.Adam(1e-12))).verdict.causes
    assert cause.kind == "small_steps"


def test_small_weights_may_grow_fast() -> None:
    loss, feed = network()
    for v in nn.get_parameters().values():
        v.d *= 1e-4
    causes = diagnose(updater_of(loss, feed, S.Adam(1e-2)), batches=2).verdict.causes
    assert "solver" not in {cause.kind for cause in causes}


def test_a_task_of_a_few_columns_needs_a_scale_of_its_own() -> None:
    (x, t), u = inputs(), nn.Variable((32, 1))
    y = affine(hidden(x), 12, "head")
    loud, quiet = y[:, :10], y[:, 10:]
    feed = feeder(x, t, lambda: setattr(u, "d", t.d % 2))
    verdict = diagnose(cross_entropy(loud, t) + 1e-9 * cross_entropy(quiet, u), feeder=feed).verdict
    assert verdict.needs is Way.CONSTANT
    assert "head/affine loses the whole gradient of 17% of its units to underflow" in verdict.line


def test_units_that_no_scale_keeps_are_a_note() -> None:
    (x, t), u = inputs(), nn.Variable((32, 1))
    y = affine(hidden(x), 12, "head")
    loss = cross_entropy(y[:, :6], t) + 1e-20 * cross_entropy(y[:, 6:], u)
    diagnosis = diagnose(loss, feeder=feeder(x, t, lambda: setattr(u, "d", t.d % 2)))
    (note,) = diagnosis.numbers.notes
    assert (note.begin, note.names) == ("Many units lose their gradient in ", ["head/affine"])
    assert not diagnosis.verdict.causes


def test_only_the_value_of_a_loss_beyond_the_format_does_not_end_learning() -> None:
    (x, t), u = inputs(), nn.Variable((32, 4))
    rng = np.random.default_rng(0)
    loss = F.mean(F.sum((affine(hidden(x), 4, "head") - u) ** 2, axis=1)) * 1e-3
    feed = feeder(x, t, lambda: setattr(u, "d", 500.0 * rng.standard_normal(u.shape)))
    diagnosis = diagnose(loss, feeder=feed)
    (cause,) = diagnosis.verdict.causes
    assert (cause.kind, cause.fatal) == ("overflow", False)
    assert diagnosis.verdict.needs is not None


def test_parameters_that_the_loss_reads_as_constants_are_a_note() -> None:
    x, t = inputs()
    with nn.no_grad():
        h = hidden(x)
    loss = classes(h, t)
    (note,) = diagnose(updater_of(loss, feeder(x, t), S.Adam(1e-3))).numbers.notes
    assert (note.begin, note.names) == ("The solver has ", ["fc1/affine/W", "fc1/affine/b"])


def test_labels_below_0_are_left_out_however_large_they_are() -> None:
    x, t = inputs()
    feed = feeder(x, t, lambda: t.d.__setitem__(slice(16), -100.0))
    assert not diagnose(classes(hidden(x), t), feeder=feed).verdict.causes


def test_scores_given_as_labels_are_a_cause() -> None:
    x, t = inputs()
    loss = F.mean(F.sigmoid_cross_entropy(t, affine(hidden(x), 1, "head")))
    (cause,) = diagnose(loss, feeder=feeder(x, t)).verdict.causes
    assert (cause.kind, cause.remedy) == ("no_backward", remedies.SCORES_FIRST)


def test_a_moving_average_that_the_feeder_writes_is_not_missed() -> None:
    (x, t), rate = inputs(), 0.1
    y, target = affine(hidden(x), 8, "online/head"), affine(x, 8, "target/head")
    target.need_grad = False
    own, average = (nn.get_parameters()[f"{name}/head/affine/W"] for name in ("online", "target"))
    average.d = np.ones(average.shape)

    def move() -> None:
        average.d = (1.0 - rate) * average.d + rate * np.resize(own.d, average.shape)

    loss = F.mean(F.squared_error(y, target))
    diagnosis = diagnose(updater_of(loss, feeder(x, t, move), S.Adam(1e-3)))
    assert not diagnosis.verdict.causes
    assert "moving average" in " ".join(diagnosis.as_dict()["notes"])


def test_a_weight_that_reads_next_to_nothing_is_no_matter_of_the_learning_rate() -> None:
    x, t = inputs()
    (cause,) = diagnose(updater_of(classes(x * 1e-7, t), feeder(x, t), S.Adam(1e-3, eps=1e-6))).verdict.causes
    assert (cause.kind, cause.remedy) == ("epsilon", remedies.TOO_SMALL)


def test_numbers_that_shrink_beyond_any_number_are_said_to_shrink() -> None:
    """The steps of a state have many paths: their product may be beyond float64."""
    loss, feed = network(lambda x: hidden(x) * 0.5 * 0.25 * 0.125)
    examined = Subject(loss, feed, 1)
    with examined.preserved():
        own = Network(examined, FormatEmulation(loss, "float16").emulated_storage)
        sight = Sight(own)
        examined.forward(loss, 0, sight.after_forward)
        factors = [f for f in own.graph.functions if f.info.type_name == "MulScalar"]
        steps = [Step(f, 1.0, 1e-30) for f in factors] * 10
        told = Operands(own, sight).growth(steps, "numbers", shrinks=True).clause
    assert told == "; numbers shrink from layer to layer, 1e+30 times from fc1/affine/MulScalar on"


def test_a_gate_that_a_feeder_may_open_later_is_no_cause() -> None:
    (x, t), gate = inputs(), nn.Variable((1, 1))
    h = hidden(x)
    side = affine(x, 16, "side") * F.broadcast(gate, (32, 16))
    diagnosis = diagnose(classes(h + side, t), feeder=feeder(x, t, lambda: setattr(gate, "d", 0.0)))
    assert not diagnosis.verdict.causes


def test_steps_that_hardly_move_the_weights_are_a_note_and_with_a_loss_weight_a_cause() -> None:
    loss, feed = network()
    diagnosis = diagnose(updater_of(loss, feed, S.Momentum(1e-6)), batches=2)
    (note,) = map(str, diagnosis.numbers.notes)
    assert re.match(
        r"Steps of Momentum change \de-0\d of the weights each, at a learning rate of 1e-06: 1,000", note
    )
    assert not diagnosis.verdict.causes
    diagnosis = diagnose(updater_of(loss * 1e-4, feed, S.Momentum(0.01)), batches=2)
    (cause,) = diagnosis.verdict.causes
    assert (cause.kind, cause.function, cause.remedy) == ("small_steps", "Momentum", remedies.LEARNING_RATE)
    assert not diagnosis.numbers.notes


def test_a_first_step_that_multiplies_the_loss_a_few_times_is_a_note() -> None:
    loss, feed = network()
    diagnosis = diagnose(updater_of(loss, feed, S.Adam(1.0)), batches=1)
    (note,) = map(str, diagnosis.numbers.notes)
    assert note.startswith("The first step of Adam changes the loss from 1.")
    assert not diagnosis.verdict.causes


def test_weights_of_one_number_in_one_layer_alone_keep_no_units_alike() -> None:
    loss, feed = network()
    nn.get_parameters()["fc1/affine/W"].d = 0.1
    assert not diagnose(loss, feeder=feed).numbers.notes
    nn.get_parameters()["head/affine/W"].d = 0.1
    causes = diagnose(loss, feeder=feed).verdict.causes
    assert [cause.kind for cause in causes] == ["equal_units"]


def test_units_of_zero_weights_that_a_mask_leaves_out_are_no_note() -> None:
    loss, feed = network(lambda x: affine(x, 16, "fc1") * F.broadcast(some(7), (32, 16)))
    nn.get_parameters()["fc1/affine/W"].d[:, :8] = 0.0
    assert not diagnose(loss, feeder=feed).numbers.notes


def test_a_weight_input_of_which_many_numbers_vanish_is_a_note() -> None:
    (x, t), weight = inputs(), nn.Variable((32, 1))
    loss = F.mean(F.softmax_cross_entropy(affine(hidden(x), 5, "head"), t) * weight)
    feed = feeder(x, t, lambda: setattr(weight, "d", np.where(np.arange(32)[:, None] % 2, 1.0, 1e-10)))
    (note,) = map(str, diagnose(loss, feeder=feed, batches=2).numbers.notes)
    assert note.startswith("Of the numbers of the input of shape (32, 1), 50% become 0 in float16")


def test_the_index_of_a_code_is_the_cut_not_the_target_of_the_codebook() -> None:
    (x, _), codes = inputs(), nn.parameter.get_parameter_or_create("codes", (8, 4))
    z = affine(hidden(x), 4, "encoder")
    distances = F.sum((F.reshape(z, (32, 1, 4)) - F.reshape(codes, (1, 8, 4))) ** 2, axis=2)
    index = F.min(distances, axis=1, only_index=True)
    index.need_grad = False
    q = F.embed(index, codes)
    loss = F.mean(F.squared_error(affine(q, 16, "decoder"), x))
    loss = loss + F.mean(F.squared_error(q, z.get_unlinked_variable(need_grad=False)))
    rng = np.random.default_rng(0)
    updater = updater_of(loss, lambda: setattr(x, "d", rng.standard_normal(x.shape)), S.Adam(1e-3))
    (cause,) = (one for one in diagnose(updater).verdict.causes if one.kind == "untrained")
    assert cause.remedy == remedies.NO_DERIVATIVE


def test_remedies_of_several_ends_are_not_mixed() -> None:
    x, t = inputs()
    y = F.sum(affine(x, 1, "a"), axis=1, keepdims=True)
    loss = F.mean(F.epsilon_insensitive_loss(y, t, 1e3))
    loss = loss + cross_entropy(
        F.maximum2(affine(x, 5, "b"), F.constant(1e3, (32, 5)) + affine(x, 5, "c")), t
    )
    notes = diagnose(loss, feeder=feeder(x, t)).as_dict()["notes"]
    assert [note.endswith(f"{remedies.NOT_CHOSEN}.") for note in notes if "EpsilonInsensitive" in note] == [
        True
    ]


def test_a_fed_input_that_needs_a_gradient_is_not_called_unlinked() -> None:
    x, t = nn.Variable((32, 16), need_grad=True), nn.Variable((32, 1))
    diagnosis = diagnose(classes(hidden(x), t), feeder=feeder(x, t, lambda: setattr(x, "d", 0.0)))
    (cause,) = diagnosis.verdict.causes
    assert (cause.kind, cause.remedy) == ("zero_input", remedies.ZEROS)


def test_of_blank_inputs_the_one_that_a_layer_reads_is_named() -> None:
    image, target = nn.Variable((32, 16)), nn.Variable((32, 1))
    image.name, target.name = "image", "target"
    loss = F.mean(F.squared_error(F.identity(target), affine(image, 1, "head")))

    def feed() -> None:
        image.d, target.d = 0.0, 0.0

    (cause,) = diagnose(loss, feeder=feed).verdict.causes
    assert (cause.function, "the input image" in cause.what) == ("head/affine", True)


def test_gradients_that_on_gradients_makes_far_smaller_are_a_note() -> None:
    updater = updater_of(*network(), S.Sgd(1e3), on_gradients=lambda solver: solver.scale_grad(1.0 / 65536.0))
    (note,) = map(str, diagnose(updater, batches=2).numbers.notes)
    assert re.match("on_gradients leaves .* of unscaled gradients of .*: clip at a larger norm", note)


def test_gradients_that_on_gradients_makes_so_small_that_nothing_moves_are_a_cause() -> None:
    updater = updater_of(*network(), S.Sgd(0.1), on_gradients=lambda solver: solver.clip_grad_by_norm(1e-4))
    (cause,) = diagnose(updater, batches=2).verdict.causes
    assert (cause.kind, cause.remedy, cause.fatal) == ("on_gradients", remedies.CLIP_LESS, True)


def test_gradients_that_on_gradients_makes_too_small_for_the_solver_are_told_once() -> None:
    clipped = updater_of(
        *network(), S.Adam(1e-3), on_gradients=lambda solver: solver.clip_grad_by_norm(1e-11)
    )
    diagnosis = diagnose(clipped, batches=2)
    assert [cause.kind for cause in diagnosis.verdict.causes] == ["on_gradients"]
    assert diagnosis.numbers.notes == []


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax, F.identity])
def test_a_softmax_of_a_softmax_is_a_note(softmax: Any) -> None:
    loss, feed = network(
        lambda x: x, lambda x, t: F.mean(F.softmax_cross_entropy(softmax(affine(x, 5, "h")), t))
    )
    (notes,) = [diagnose(loss, feeder=feed).numbers.notes]
    assert ["give it the scores" in str(note) for note in notes] == [True] * (softmax is not F.identity)


def test_a_gradient_that_is_nonfinite_only_where_it_is_dropped_is_no_cause() -> None:
    """ReLU's backward hands nothing on, not even NaN, where it has output 0."""

    def loss(h: nn.Variable, t: nn.Variable) -> nn.Variable:
        rate = F.relu(affine(h, 5, "rate"))
        is_positive = F.greater_scalar(rate, 0.0)
        is_positive.need_grad = False
        log = F.where(is_positive, F.log(rate), F.constant(0.0, rate.shape))
        return F.mean(rate - F.one_hot(t, (5,)) * log)

    built, feed = network(loss=loss)
    assert not diagnose(built, feeder=feed).verdict.causes


@pytest.mark.parametrize("first", [0, 1])
def test_classes_counted_from_1_are_beyond_the_table(first: int) -> None:
    def count(x: nn.Variable, t: nn.Variable) -> None:
        t.d = np.arange(32)[:, None] % 5 + first

    loss, feed = network(spoil=count)
    diagnosis = diagnose(loss, feeder=feed)
    assert [(one.kind, one.fatal) for one in diagnosis.verdict.causes] == [("index_beyond", False)] * first
    assert all("for indices up to 5, but the last one is 4" in one.what for one in diagnosis.verdict.causes)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 0.75), (0.75, 1.0)])
def test_a_gradient_with_a_part_that_overflows_at_65536_leaves_no_room_for_it(
    shares: Tuple[float, float],
) -> None:
    """The scores of a critic for real and for faked data, whose gradients cancel in the bias."""
    rng = np.random.default_rng(0)
    real, faked = (affine(nn.Variable.from_numpy_array(rng.random((4, 16))), 1, "score") for _ in range(2))
    verdict = diagnose(shares[0] * F.mean(real) - shares[1] * F.mean(faked)).verdict
    assert (verdict.needs, verdict.line.partition("which ")[2]) == (Way.NONE, "overflows in score/affine.")
    assert verdict.trains["float16"] == [Way.NONE, Way.ONE, Way.ADAPTIVE]


@pytest.mark.parametrize("before", [False, True])
def test_layers_that_depend_on_numbers_of_every_pass_are_left_out_of_the_judgement(before: bool) -> None:
    """A function in Python with a generator of its own: no pass can be repeated."""
    noise = Noise(own=True)
    loss, feed = network(lambda x: affine(noise(hidden(x)), 16, "fc2") if before else noise(hidden(x)))
    diagnosis = diagnose(loss, feeder=feed)
    assert not diagnosis.verdict.causes
    assert all(layer.is_random for layer in diagnosis.numbers.layers)
    (note,) = diagnosis.numbers.notes
    assert "fc1/affine/Noise" in note.names
    assert "Nothing can be said" in diagnosis.verdict.line


def test_layers_beside_numbers_of_every_pass_are_judged() -> None:
    noise, (x, t) = Noise(own=True), inputs()
    steady, random = (cross_entropy(affine(v, 5, name), t) for v, name in ((x, "a"), (noise(x), "b")))
    diagnosis = diagnose((steady + random) * 1e-12, feeder=feeder(x, t))
    found = {layer.name: layer.is_random for layer in diagnosis.numbers.layers}
    assert found == {"a/affine": False, "b/affine": True}
    assert diagnosis.verdict.needs is Way.ONE


CONSTANTS: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "Randn": lambda h: h + 1e-9 * F.randn(shape=h.shape, seed=3),
    "Rand": lambda h: h * F.rand(shape=h.shape, seed=3),
    "Constant": lambda h: h * F.constant(1e-9, h.shape),
    "Arange": lambda h: h * F.broadcast(F.reshape(F.arange(1, 17, 1), (1, 16)), h.shape) * 1e-9,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_functions_without_inputs(name: str) -> None:
    loss, feed = network(lambda x: CONSTANTS[name](hidden(x)))
    assert all(cause.kind == "underflow" for cause in diagnose(loss, feeder=feed).verdict.causes)


def test_other_formats_and_a_loss_of_zero() -> None:
    loss, feed = mlp()
    assert diagnose(loss, "bfloat16", data_feeder=feed).verdict.line == "bfloat16 needs no scaling here."
    assert diagnose(loss * 1e-6, "fp8_hybrid", feed).verdict.needs is Way.CONSTANT
    (x, t) = inputs()
    verdict = diagnose(F.mean(F.relu(affine(x, 1, "score", bias=-100.0))), feeder=feeder(x, t)).verdict
    assert (verdict.needs, verdict.scaling) == (None, "Nothing can be said.")
    assert [(cause.kind, cause.remedy) for cause in verdict.causes] == [("zero_loss", remedies.MARGIN)]


def test_a_feeder_that_ends() -> None:
    loss, feed = mlp()

    def batches(count: int) -> Callable[[], None]:
        left = iter(range(count))

        def next_batch() -> None:
            next(left)
            feed()

        return next_batch

    assert diagnose(loss, feeder=batches(2)).numbers.batches == 2
    with pytest.raises(ValueError, match="the feeder ends before its first batch"):
        diagnose(loss, feeder=batches(0))


def test_numpy_raises_nothing_that_is_told_as_a_cause() -> None:
    with np.errstate(all="raise"):
        loss, feed = nan_in_data.build(False)
        assert diagnose(loss, feeder=feed).verdict.causes[0].kind == "data_not_finite"
        nn.clear_parameters()
        loss, feed = tiny_loss_weight()
        assert diagnose(loss, feeder=feed).verdict.needs is Way.ONE


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda loss: diagnose(3), TypeError, "loss_or_updater must be a loss Variable.*got int"),
        (lambda loss: diagnose(3), TypeError, "with a GradScaler, give an AdaptiveLossScalingUpdater"),
        (lambda loss: diagnose(loss, data_feeder=3), TypeError, "feeder must be callable"),
        (lambda loss: diagnose(loss, feeder=print, data_feeder=print), TypeError, "feeder and data_feeder"),
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
    with nn.context_scope(HALF):
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


DYNAMIC = nnabla.experimental.mixed_precision_training.DynamicLossScalingUpdater


@pytest.mark.parametrize(("made", "sizes", "batches"), [(DYNAMIC, (8,), 4), (updater_of, (8, 6), 2)])
def test_the_graph_that_the_feeder_assigns_is_looked_at_and_those_built_alike(
    made: Callable[..., Any], sizes: Sequence[int], batches: int
) -> None:
    feeder = Rebuilding(sizes)
    before = feeder.build()
    solver = solver_of()
    updater = made(solver, before, feeder) if made is DYNAMIC else made(before, feeder, solver)
    feeder.updater = updater
    diagnosis = diagnose(updater, batches=4)
    assert (feeder.calls, diagnosis.numbers.batches) == (4, batches)
    assert 0.0 < diagnosis.numbers.loss < 1e-6, diagnosis
    assert updater.loss is before
    updater.update()


def test_an_index_beyond_the_table_of_a_later_graph_is_told() -> None:
    numbers = itertools.count()

    def build() -> nn.Variable:
        item = nn.Variable.from_numpy_array(np.full(8, 16.0 * (next(numbers) > 1)))
        return F.mean(PF.embed(item, 16, 4, name="item") ** 2)

    updater = updater_of(build(), lambda: setattr(updater, "loss", build()), S.Sgd(0.1))
    (cause,) = diagnose(updater).verdict.causes
    assert (cause.kind, cause.function) == ("index_beyond", "item/embed")
    with pytest.raises(ValueError, match="item/embed: it reads indices"):
        diagnose(updater, ["float16"])


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
    loss = y if y.size == 1 else F.mean(F.exp(y))
    verdict = diagnose(loss).verdict
    assert (verdict.needs, verdict.causes) == (Way.NONE, [])


def test_steps_inside_a_fused_recurrence_are_not_judged() -> None:
    x = nn.Variable.from_numpy_array(np.ones((8, 3)))
    (note,) = diagnose(F.mean(F.exp(unused_states(x)))).numbers.notes[1:]
    assert str(note) == "Numbers between the steps of lstm stay in fp32 here: they are not judged."


@pytest.mark.parametrize("weight", [1e6, 1e-13, 1e-30])
def test_the_loss_is_judged_as_the_updater_computes_it(weight: float) -> None:
    """In float: no loss weight is too small or too large for float16."""
    rng = np.random.RandomState(0)
    x = nn.Variable.from_numpy_array(rng.randn(8, 4).astype(np.float32))
    h = F.tanh(PF.affine(x, 6, name="a", rng=rng))
    diagnosis = diagnose(F.mean(PF.affine(h, 2, name="b", rng=rng) ** 2) * weight)
    assert diagnosis.verdict.needs is not None
    assert not any(cause.fatal for cause in diagnosis.verdict.causes)


def test_each_layer_of_a_mapping_is_judged_in_its_own_format() -> None:
    loss, feed = mlp()
    names = [layer.name for layer in diagnose(loss, feeder=feed, batches=1).numbers.layers]
    first, last = names[0], names[-1]
    found = diagnose(loss, {first: "float8_e5m2", "*": "float16"}, feed, batches=1).numbers.layers
    formats = {layer.name: layer.stored.name for layer in found}
    assert (formats[first], formats[last]) == ("float8_e5m2", "float16")


def test_gradients_beyond_a_layers_range_are_reported_with_its_format() -> None:
    loss, feed = a_weight_behind_the_loss.build(False)
    for storage, told in (
        ({"fc3/affine": "float8_e5m2", "*": "bfloat16"}, "float8_e5m2, which ends at 57344"),
        (Precision("float8_e4m3", "float8_e5m2"), "float8_e4m3, which ends at 448"),
    ):
        assert told in diagnose(loss, storage, feed, batches=1).verdict.line


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

    assert diagnosis.verdict.needs is Way.NONE, diagnosis
    known = {"squeeze_and_excite": ["dead_relu"], "weight_times_itself": ["saturated"]}
    assert [cause.kind for cause in diagnosis.verdict.causes] == known.get(network, []), diagnosis
    assert not any(cause.fatal for cause in diagnosis.verdict.causes), diagnosis
    for name, v in parameters.items():
        np.testing.assert_array_equal(v.d, before[name][0], err_msg=name)
        np.testing.assert_array_equal(v.g, before[name][1], err_msg=name)


def test_a_function_without_a_backward_is_told_by_every_face(tmp_path: Path) -> None:
    loss, feed = hard_gate.build(False)
    diagnosis = diagnose(loss, feeder=feed)
    diagnosis.write_html(tmp_path / "page.html")
    assert "GreaterScalar: it has no backward" in (tmp_path / "page.html").read_text("utf-8")
    assert "GreaterScalar: it has no backward" in diagnosis.as_dict()["verdict"]
    assert "65536" not in str(diagnosis)
    with pytest.raises(ValueError, match="GreaterScalar has no backward"):
        diagnose(loss, ["fp8_hybrid", "float16"], feeder=feed)


@pytest.mark.parametrize(("comm", "calls"), [(None, 3), (object(), 0)])
def test_on_gradients_is_called_where_it_waits_for_nobody(comm: Any, calls: int) -> None:
    loss, feed = mlp()
    solver, called = solver_of(), []
    updater = SimpleNamespace(
        loss=loss, data_feeder=feed, solver=solver, comm=comm, on_gradients=called.append
    )
    diagnose(updater, batches=3)
    assert called == [solver] * calls


def test_an_unlinked_copy_of_an_output_is_filled_by_forward() -> None:
    x, t = inputs()
    h = F.tanh(affine(x, 16, "fc1"))
    reversed_gradient = -1.0 * h + 2.0 * h.get_unlinked_variable(need_grad=False)
    loss = cross_entropy(affine(reversed_gradient, 5, "head"), t)
    assert not diagnose(loss, feeder=feeder(x, t)).as_dict()["notes"]


def test_an_expert_that_no_sample_has_chosen_is_noted() -> None:
    (x, t), domain = inputs(), nn.Variable((32, 1))
    h, routes = hidden(x), F.split(F.one_hot(domain, (3,)), axis=1)
    for number, route in enumerate(routes):
        h = h + affine(h, 16, f"expert{number}") * F.broadcast(F.reshape(route, (32, 1)), h.shape)
    fed = feeder(x, t, lambda: setattr(domain, "d", np.arange(32)[:, None] % 2))
    diagnosis = diagnose(classes(h, t), feeder=fed)
    assert not diagnosis.verdict.causes
    (note,) = diagnosis.numbers.notes
    assert str(note).startswith("No gradient gets to expert2/affine in 2 batches: none passes")


def test_a_function_that_makes_gradients_coarse_is_noted() -> None:
    """Their error is no fault yet; the carrier of a synthesizer is a sine of large phases."""
    x, t = inputs()
    y = affine(hidden(x), 16, "head") * F.sin(500.0 * x)
    diagnosis = diagnose(F.mean((y - F.sin(x)) ** 2), feeder=feeder(x, t))
    assert not diagnosis.verdict.causes
    assert "Errors of gradients reach" in diagnosis.verdict.line
    (note,) = diagnosis.numbers.notes
    assert "Sin: it computes numbers that come out with an error of" in str(note)


def test_a_slope_for_numbers_below_0_behind_a_relu_is_noted() -> None:
    x, t = inputs()
    loss = classes(PF.prelu(F.relu(affine(x, 16, "fc1")), name="slope"), t)
    (note,) = diagnose(loss, feeder=feeder(x, t)).numbers.notes
    assert str(note).startswith("slope/prelu reads no numbers below 0")


def test_a_format_in_which_nnabla_raises_is_left_out_with_a_note() -> None:
    """The last of 300 places is 300 in bfloat16."""
    (x, t), to = inputs(), nn.Variable((32, 1))
    y = affine(hidden(x), 4, "head")
    received = F.scatter_add(F.constant(0.0, (300, 4)), F.broadcast(to, y.shape), y, axis=0)
    fed = feeder(x, t, lambda: setattr(to, "d", np.arange(268, 300)[:, None]))
    diagnosis = diagnose(F.mean((received - 0.5) ** 2), feeder=fed)
    assert "bfloat16" not in diagnosis.verdict.formats
    assert any("rounded to bfloat16" in str(note) for note in diagnosis.numbers.notes)


@pytest.mark.parametrize("unlinked", [True, False])
def test_a_straight_through_estimator_stops_the_gradient_on_purpose(unlinked: bool) -> None:
    """What its codes lack is a loss of their own."""
    x, t = inputs()
    h, book = hidden(x), nn.parameter.get_parameter_or_create("book", (5, 16), I.NormalInitializer(0.5))
    index = F.min(F.affine(h, F.transpose(book, (1, 0))), axis=1, only_index=True).apply(need_grad=False)
    codes = F.embed(index, book)
    difference = codes - h
    stopped = F.unlink(difference) if unlinked else F.identity(difference).apply(need_grad=False)
    loss = classes(h + stopped, t) + F.mean(F.squared_error(h, F.unlink(codes)))
    (cause,) = diagnose(updater_of(loss, feeder(x, t), S.Adam()), batches=2).verdict.causes
    assert (cause.parameters, cause.remedy) == (("book",), remedies.STRAIGHT)
