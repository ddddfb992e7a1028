# SPDX-License-Identifier: Apache-2.0
"""One file holds a training, and nothing of a file that does not belong to it is loaded."""

from __future__ import annotations

import io
import json
import signal
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import nnabla as nn
import nnabla.experimental.mixed_precision_training
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnabla.experimental.parametric_function_class.affine import Affine
from nnabla.experimental.parametric_function_class.batch_normalization import BatchNormalization
from nnabla.experimental.parametric_function_class.module import Module as ClassModule
from nnabla.parameter import get_parameter_or_create

from nnabla_adaloss import (
    AdaptiveLossScalingUpdater,
    GradScaler,
    LossScaleWarning,
    load_checkpoint,
    save_checkpoint,
)
from tests.worlds.tampering import Gate
from tests.worlds.trainings import scaler_step, solver_of, updater_of
from tests.worlds.values import FLOAT, HALF, constant, snapshot, solver_states
from tests.worlds.warned import silent

SOLVERS = {"Sgd": lambda: S.Sgd(0.05), "Adam": lambda: S.Adam(1e-2), "Lars": lambda: S.Lars(0.05)}


def network(x: nn.Variable, width: int = 6) -> nn.Variable:
    rng = np.random.RandomState(0)
    h = PF.batch_normalization(PF.affine(x, width, name="a", rng=rng), name="norm")
    return F.mean(PF.affine(F.tanh(h), 3, name="b", rng=rng) ** 2)


def training(solver: Any = None, width: int = 6, **options: Any) -> AdaptiveLossScalingUpdater:
    """A training that begins, with parameters of its own."""
    nn.clear_parameters()
    x = nn.Variable((8, 5))

    def feed() -> None:
        x.d = np.random.default_rng(updater.iteration).standard_normal(x.shape)

    updater = updater_of(network(x, width), feed, solver=solver or S.Adam(1e-2), **options)
    return updater


def everything(*updaters: AdaptiveLossScalingUpdater) -> Tuple[Any, ...]:
    """What a checkpoint holds, as it is now."""
    solvers = [(solver_states(updater.solver), updater.solver.learning_rate()) for updater in updaters]
    return snapshot(), solvers, [updater.state_dict() for updater in updaters]


@pytest.mark.parametrize("name", SOLVERS)
def test_a_training_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    path = tmp_path / "last.checkpoint"
    first = training(SOLVERS[name]())
    for _ in range(11):
        first.update()
    save_checkpoint(path, first, extra={"epoch": 2, "best": 0.25})
    saved = everything(first)
    for _ in range(11):
        first.update()
    expected = everything(first)

    again = training(SOLVERS[name]())
    again.update()
    assert load_checkpoint(path, again) == {"epoch": 2, "best": 0.25}
    np.testing.assert_equal(everything(again), saved)
    for _ in range(11):
        again.update()
    np.testing.assert_equal(everything(again), expected)


def test_loops_of_ones_own(tmp_path: Path) -> None:
    def trained(resumed: bool) -> Any:
        nn.clear_parameters()
        x = nn.Variable((8, 5))
        loss, solver = network(x), solver_of(S.Momentum(0.05))
        scaler = GradScaler(solver, storage="float16")
        first = load_checkpoint(tmp_path / "c", scaler, solver)["step"] if resumed else 0
        for number in range(first, 10):
            if number == 5 and not resumed:
                save_checkpoint(tmp_path / "c", scaler, solver, extra={"step": number})
            x.d = np.random.default_rng(number).standard_normal(x.shape)
            scaler_step(scaler, solver, loss)
        return first, snapshot(), scaler.state_dict()

    straight, resumed = trained(resumed=False), trained(resumed=True)
    assert (straight[0], resumed[0]) == (0, 5)
    np.testing.assert_equal(resumed[1:], straight[1:])


@contextmanager
def rewritten(path: Path) -> Iterator[Tuple[Any, Dict[str, Any]]]:
    """Head and arrays of a checkpoint, to be changed and written back."""
    with np.load(path) as archive:
        arrays = dict(archive)
    head = json.loads(arrays["head"].tobytes())
    yield head, arrays
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez(file, **arrays)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_learning_rate_that_the_training_has_set_goes_on(name: str, tmp_path: Path) -> None:
    first = training(SOLVERS[name]())
    first.solver.set_learning_rate(0.003)
    save_checkpoint(tmp_path / "c", first)
    again = training(SOLVERS[name]())
    with pytest.warns(LossScaleWarning, match=f"the learning rate of {name} is 0.003 again"):
        load_checkpoint(tmp_path / "c", again)
    with silent():
        load_checkpoint(tmp_path / "c", again)
    assert again.solver.learning_rate() == first.solver.learning_rate()
    for updater in (first, again):
        updater.update()
    np.testing.assert_equal(everything(again), everything(first))


def test_a_checkpoint_of_before_has_no_learning_rate_and_the_solver_keeps_its_own(tmp_path: Path) -> None:
    first = training(S.Sgd(0.1))
    save_checkpoint(tmp_path / "c", first)
    with rewritten(tmp_path / "c") as (head, _):
        del head["parts"][0]["learning_rate"]
    first.solver.set_learning_rate(0.25)
    load_checkpoint(tmp_path / "c", first)
    assert first.solver.learning_rate() == 0.25


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: training(width=7), r"another network.* such as .*\(6,\)"),
        (lambda: training(S.Sgd(0.1)), "holds Adam, a state; given are Sgd, a state: give the same"),
        # Only the updater itself notices, when the parameters and the solver's state are loaded.
        (lambda: training(S.Adam(0.25), accum_grad=2), "accum_grad"),
    ],
    ids=["network", "solver", "settings"],
)
def test_parts_that_do_not_belong_together_are_refused(
    other: Callable[[], AdaptiveLossScalingUpdater], match: str, tmp_path: Path
) -> None:
    updater = training()
    updater.update()
    save_checkpoint(tmp_path / "c", updater)
    updater = other()
    updater.update()
    before = everything(updater)
    with pytest.raises(ValueError, match=match):
        load_checkpoint(tmp_path / "c", updater)
    np.testing.assert_equal(everything(updater), before)


def test_no_part_is_forgotten_or_of_another_kind(tmp_path: Path) -> None:
    updater = training()
    with pytest.raises(TypeError, match="must be a solver, a Module"):
        save_checkpoint(tmp_path / "c", updater, updater.loss)
    theirs = nnabla.experimental.mixed_precision_training.DynamicLossScalingUpdater(
        updater.solver, updater.loss
    )
    with pytest.raises(TypeError, match="give its solver, and its scale as extra="):
        save_checkpoint(tmp_path / "c", theirs)
    scaler = GradScaler(updater.solver)
    for save in (save_checkpoint, load_checkpoint):
        with pytest.raises(ValueError, match=r"the scaler steps a solver \(Adam\) that is not given"):
            save(tmp_path / "c", scaler)
    save_checkpoint(tmp_path / "c", scaler, updater.solver)
    with pytest.raises(ValueError, match="same solvers"):
        load_checkpoint(tmp_path / "c", updater.solver, scaler)


def saved_by_a_handler(save: Callable[[], None]) -> None:
    called: List[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: called.append(number) or save())
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert called


def saved_by_a_thread(save: Callable[[], None]) -> None:
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()


@pytest.mark.parametrize("by", [saved_by_a_handler, saved_by_a_thread, lambda save: save()])
@pytest.mark.parametrize("where", ["data_feeder", "on_gradients", "function_post_hook"])
def test_nothing_is_saved_or_loaded_during_an_update(where: str, by: Any, tmp_path: Path) -> None:
    first = training(S.Adam(0.25))
    first.update()
    save_checkpoint(tmp_path / "c", first)
    before = (tmp_path / "c").read_bytes()
    refused: List[str] = []

    def attempt() -> None:
        for call in (save_checkpoint, load_checkpoint):
            with pytest.raises(RuntimeError, match="while an update, or .* a callback of updater.when_idle$"):
                call(tmp_path / "c", updater)
        refused.append(where)

    x = nn.Variable((8, 5))

    def feed() -> None:
        x.d = np.random.default_rng(updater.counters.fed).standard_normal(x.shape)
        if where == "data_feeder":
            by(attempt)

    hooks: Any = {where: lambda *_: refused or by(attempt)} if where != "data_feeder" else {}
    updater = updater_of(network(x), feed, solver=S.Adam(0.25), **hooks)
    assert updater.update().updated
    assert refused
    assert (tmp_path / "c").read_bytes() == before
    updater.data_feeder = lambda: updater.when_idle(lambda: save_checkpoint(tmp_path / "c", updater))
    updater.update()
    expected = everything(updater)
    updater.data_feeder = lambda: None
    updater.update()
    load_checkpoint(tmp_path / "c", updater)
    np.testing.assert_equal(everything(updater), expected)


def test_a_signal_while_a_checkpoint_is_loaded_saves_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = training()
    updater.update()
    save_checkpoint(tmp_path / "c", updater)
    expected = everything(updater)
    updater.update()
    load_state_dict = updater.load_state_dict

    def interrupted(state: Any) -> None:
        # The parameters are loaded, and the state is not.
        saved_by_a_handler(lambda: updater.when_idle(lambda: save_checkpoint(tmp_path / "d", updater)))
        with pytest.raises(RuntimeError, match="while an update"):
            save_checkpoint(tmp_path / "c", updater)
        load_state_dict(state)

    monkeypatch.setattr(updater, "load_state_dict", interrupted)
    load_checkpoint(tmp_path / "c", updater)
    monkeypatch.undo()
    updater.update()
    load_checkpoint(tmp_path / "d", updater)
    np.testing.assert_equal(everything(updater), expected)


def test_an_iteration_of_a_scaler_that_has_begun_is_not_saved(tmp_path: Path) -> None:
    loss = network(constant(np.ones((8, 5))))
    solver = solver_of(S.Sgd(0.1))
    scaler = GradScaler(solver, storage="float16")
    save_checkpoint(tmp_path / "c", scaler, solver)
    calls = (
        (scaler.forward, loss),
        (scaler.backward, loss),
        (scaler.unscale_, solver),
        (scaler.step, solver),
    )
    for call, argument in calls:
        call(argument)
        with pytest.raises(RuntimeError, match=r"between forward\(\) and update\(\) .*: call it after"):
            save_checkpoint(tmp_path / "c", scaler, solver)
    scaler.update()
    save_checkpoint(tmp_path / "c", scaler, solver)


def test_a_forward_that_writes_no_state_begins_no_iteration(tmp_path: Path) -> None:
    """A loss of validation data, in the storage of the training."""
    x = constant(np.ones((8, 5)))
    losses = [F.mean(PF.affine(PF.batch_normalization(x, batch_stat=train), 3)) for train in (True, False)]
    solver = solver_of(S.Sgd(0.1))
    scaler = GradScaler(solver, storage="float16")
    for loss in reversed(losses):
        scaler.forward(loss)
        if loss is losses[1]:
            save_checkpoint(tmp_path / "c", scaler, solver)
    with pytest.raises(RuntimeError, match=r"between forward\(\) and update\(\)"):
        save_checkpoint(tmp_path / "c", scaler, solver)


def test_a_forward_that_carries_a_state_in_shared_memory_begins_an_iteration(tmp_path: Path) -> None:
    updater = carrying(named=True)
    scaler = GradScaler(updater.solver)
    scaler.forward(updater.loss)
    with pytest.raises(RuntimeError, match=r"between forward\(\) and update\(\)"):
        save_checkpoint(tmp_path / "c", scaler, updater.solver)


@pytest.mark.parametrize(
    ("storage", "other"),
    [
        ("float16", "float8_e4m3"),
        ("float16", "bfloat16"),
        ("bfloat16", "float8_e5m2"),
        ("float32", "float16"),
        ("float16", "float32"),
        ("float8_e5m2", "fp8_hybrid"),
    ],
)
def test_a_training_goes_on_in_another_storage_with_scales_for_it(
    storage: str, other: str, tmp_path: Path
) -> None:
    first = training(storage=storage)
    for _ in range(3):
        first.update()
    save_checkpoint(tmp_path / "c", first)
    saved = everything(first)
    again = training(storage=other)
    load_checkpoint(tmp_path / "c", again)
    np.testing.assert_equal(everything(again)[:2], saved[:2])
    # Nothing is measured again, and scales are those of a training that has always been in it.
    assert again.scaling.components.unit_amaxes() == first.scaling.components.unit_amaxes()
    assert again.update().retries == 0
    always = training(storage=other)
    for _ in range(4):
        always.update()
    for name, scale in always.scaling.layer_scales.items():
        assert 0.25 <= again.scaling.layer_scales[name] / scale <= 4.0


def test_native_half_goes_on_with_the_scales_of_emulated_float16(tmp_path: Path) -> None:
    first = training(storage="float16")
    for _ in range(3):
        first.update()
    save_checkpoint(tmp_path / "c", first)
    with nn.context_scope(HALF):
        again = training(storage=None)
        load_checkpoint(tmp_path / "c", again)
        assert again.state_dict()["scaling"]["schedule"] == first.state_dict()["scaling"]["schedule"]
        assert (again.update().retries, again.scaling.result.kind) == (0, "hookless")


def carrying(*, named: bool) -> AdaptiveLossScalingUpdater:
    """A training whose last state becomes its first one, in the same memory."""
    nn.clear_parameters()
    x, rng = nn.Variable((4, 3)), np.random.RandomState(0)
    before = get_parameter_or_create("h0", (4, 3), need_grad=False) if named else nn.Variable((4, 3))
    before.data.zero()
    now = F.tanh(PF.affine(x, 3, name="x", rng=rng) + PF.affine(before, 3, name="h", rng=rng))
    before.data = now.data

    def feed() -> None:
        x.d = np.random.default_rng(updater.counters.fed).standard_normal(x.shape)

    updater = updater_of(F.mean(PF.affine(now, 2, name="out", rng=rng) ** 2), feed, solver=S.Adam(1e-2))
    return updater


def test_a_state_that_is_carried_in_shared_memory_is_saved_as_a_parameter_or_refused(tmp_path: Path) -> None:
    first = carrying(named=True)
    for _ in range(3):
        first.update()
    save_checkpoint(tmp_path / "c", first)
    for _ in range(3):
        first.update()
    expected = everything(first)
    assert expected[0]["h0"].any()
    again = carrying(named=True)
    load_checkpoint(tmp_path / "c", again)
    for _ in range(3):
        again.update()
    np.testing.assert_equal(everything(again), expected)
    missed = r"^an input of shape \(4, 3\) whose data an output has written, which .* would miss: .*, as get_"
    with pytest.raises(ValueError, match=f"{missed}parameter_or_create does$"):
        save_checkpoint(tmp_path / "c", carrying(named=False))


class Called(Gate):
    """Its name is an ordinary method, as in published code, where nnabla asks for a property."""

    def name(self) -> str:  # type: ignore[override]
        return "TwoWords"


def test_a_network_with_a_function_of_python_whose_name_is_a_method_goes_on(tmp_path: Path) -> None:
    def loss() -> nn.Variable:
        return F.mean(Called(FLOAT)(PF.affine(constant(np.ones((4, 3))), 2, name="a")) ** 2)

    updater = updater_of(loss(), solver=S.Sgd(0.1))
    updater.update()
    assert "TwoWords" in str(updater.scaling.plan)
    save_checkpoint(tmp_path / "c", updater)
    saved = everything(updater)
    # Built again, it is the same network.
    updater.loss = loss()
    updater.update()
    load_checkpoint(tmp_path / "c", updater)
    np.testing.assert_equal(everything(updater), saved)


class Net(nn.Module):  # type: ignore[misc]  # nnabla has no type hints
    """What no scope knows."""

    def call(self, x: nn.Variable) -> nn.Variable:
        return F.mean(PF.affine(PF.batch_normalization(x, batch_stat=self.training), 2) ** 2)


class Parent(nn.Module):  # type: ignore[misc]
    """One within another."""

    def __init__(self) -> None:
        self.below = Net()

    def call(self, x: nn.Variable) -> nn.Variable:
        return self.below(x)


class Layers(ClassModule):  # type: ignore[misc]
    """Of nnabla's other kind of modules."""

    def __init__(self) -> None:
        self.norm, self.last = BatchNormalization(3, 2), Affine(3, 2)

    def __call__(self, x: nn.Variable) -> nn.Variable:
        return F.mean(self.last(self.norm(x)) ** 2)


def of_a_module(net: Any, **options: Any) -> AdaptiveLossScalingUpdater:
    loss = net(constant(np.ones((4, 3))))
    solver = solver_of(S.Sgd(0.1), net.get_parameters(grad_only=True))
    return AdaptiveLossScalingUpdater(solver, loss, storage="float16", **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Net, Parent, Layers])
def test_a_module_that_is_not_given_is_missed(kind: Any, training: bool, tmp_path: Path) -> None:
    net = kind()
    net.training = training
    updater = of_a_module(net)
    missed = "would miss: give its Module, too, as in save_checkpoint.path, updater, net."
    with pytest.raises(ValueError, match=missed):
        save_checkpoint(tmp_path / "c", updater)
    assert not (tmp_path / "c").exists()
    save_checkpoint(tmp_path / "c", updater, net)
    with pytest.raises(ValueError, match=missed):
        load_checkpoint(tmp_path / "c", updater)
    mean = next(v for name, v in net.get_parameters(grad_only=False).items() if name.endswith("mean"))
    mean.d = 5.0
    load_checkpoint(tmp_path / "c", updater, net)
    assert (mean.d == 0.0).all()


class Headed(nn.Module):  # type: ignore[misc]
    """A head of its own on an encoder that others share."""

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder

    def call(self, x: nn.Variable) -> nn.Variable:
        return F.mean(PF.affine(self.encoder(x), 2) ** 2)


class Encoder(nn.Module):  # type: ignore[misc]
    """One layer."""

    def call(self, x: nn.Variable) -> nn.Variable:
        return PF.affine(x, 4)


@pytest.mark.parametrize("kind", ["updater", "scaler"])
def test_a_module_that_shares_parameters_counts_only_where_the_graph_reads_it(
    kind: str, tmp_path: Path
) -> None:
    encoder, x = Encoder(), constant(np.ones((4, 3)))
    before, net = Headed(encoder), Headed(encoder)
    other, loss = before(x), net(x)
    solver = solver_of(S.Sgd(0.1), net.get_parameters())
    parts: List[Any] = [AdaptiveLossScalingUpdater(solver, loss, storage="float16")]
    if kind == "scaler":
        parts = [GradScaler(solver, storage="float16"), solver]
        scaler_step(parts[0], solver, loss)
    # `before` is alive, and has a head that nothing trains.
    save_checkpoint(tmp_path / "c", *parts)
    if kind == "scaler":
        scaler_step(parts[0], solver, other)
    else:
        parts[0].loss = loss + other
    with pytest.raises(ValueError, match="the Module Headed has affine/W, which the checkpoint would miss"):
        save_checkpoint(tmp_path / "c", *parts)
    save_checkpoint(tmp_path / "c", *parts, before)


def test_a_frozen_part_of_a_module_is_missed_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    net = Parent()
    net.training = False
    net(nn.Variable((4, 3)))
    solver = S.Sgd(0.1)
    solver.set_parameters({"b": net.get_parameters()["@below/affine/b"]})
    with pytest.raises(ValueError, match="the Module Parent has @below/bn/beta, which the checkpoint"):
        save_checkpoint(tmp_path / "c", solver)
    save_checkpoint(tmp_path / "c", solver, net)


@pytest.mark.parametrize("storage", ["float32", "float16", None], ids=str)
@pytest.mark.parametrize("case", ["in training", "in evaluation", "frozen", "two solvers"])
def test_a_module_goes_on_bit_for_bit(case: str, storage: Optional[str], tmp_path: Path) -> None:
    """What is trained, and what is not: running statistics, and a part that was trained before."""
    trains = case in ("in training", "two solvers")

    def began(seed: int) -> Tuple[List[AdaptiveLossScalingUpdater], Any]:
        net, x = Parent(), nn.Variable((8, 3))
        net.training = trains
        with nn.context_scope(FLOAT if storage else HALF):
            loss = net(x)
        for number, v in enumerate(net.get_parameters(grad_only=False).values()):
            v.d = np.random.RandomState(seed + number).rand(*v.shape)
        own = list(net.get_parameters(grad_only=True).items())
        shares = [own[::2], own[1::2]] if case == "two solvers" else [own[-1:] if case == "frozen" else own]
        updaters: List[AdaptiveLossScalingUpdater] = []

        def feed() -> None:
            x.d = np.random.default_rng(updaters[0].counters.fed).standard_normal(x.shape)

        updaters += [updater_of(loss, feed, S.Adam(0.05), dict(share), storage=storage) for share in shares]
        return updaters, net

    def end_of(updaters: List[AdaptiveLossScalingUpdater], net: Any) -> Any:
        for _ in range(3):
            for updater in updaters:
                updater.update()
        return everything(*updaters)[1:], snapshot(net.get_parameters(grad_only=False))

    updaters, net = began(seed=0)
    end_of(updaters, net)
    save_checkpoint(tmp_path / "c", *updaters, net)
    expected = end_of(updaters, net)
    updaters, net = began(seed=50)
    load_checkpoint(tmp_path / "c", *updaters, net)
    np.testing.assert_equal(end_of(updaters, net), expected)


def test_running_statistics_that_only_the_graph_of_a_scaler_has_are_missed(tmp_path: Path) -> None:
    net, solver = Net(), S.Sgd(0.1)
    loss = net(constant(np.ones((4, 3))))
    solver.set_parameters(net.get_parameters(grad_only=True))
    scaler = GradScaler(solver, storage="float16")
    scaler_step(scaler, solver, loss)
    with pytest.raises(ValueError, match=r"bn writes a Variable of shape \(1, 3\), which the checkpoint"):
        save_checkpoint(tmp_path / "c", scaler, solver)


def test_running_statistics_of_a_graph_that_is_not_in_use_are_missed(tmp_path: Path) -> None:
    """Also of graphs that are gone, as the training will build them again."""
    net, solver = Net(), S.Sgd(0.1)
    x = constant(np.ones((4, 3)))

    def built(normalized: bool) -> nn.Variable:
        return net(x) if normalized else F.mean(PF.affine(x, 2, name="plain") ** 2)

    losses = [built(normalized=True), built(normalized=False)]
    solver.set_parameters({**net.get_parameters(grad_only=True), **nn.get_parameters()})
    updater = AdaptiveLossScalingUpdater(solver, losses.pop(), storage="float16")
    updater.update()
    save_checkpoint(tmp_path / "c", updater)
    for normalized in (True, False):
        updater.loss = losses.pop() if losses else built(normalized)
        updater.update()
        with pytest.raises(ValueError, match=r"bn writes a Variable of shape \(1, 3\), which the checkpoint"):
            save_checkpoint(tmp_path / "d", updater)
        save_checkpoint(tmp_path / "d", updater, net)
        load_checkpoint(tmp_path / "d", updater, net)


def test_running_statistics_of_another_scope_are_missed(tmp_path: Path) -> None:
    updater = training()
    missed = pytest.raises(ValueError, match="norm/bn writes .* or have nn.get_parameters")
    with nn.parameter_scope("elsewhere"), missed:
        save_checkpoint(tmp_path / "c", updater)
    save_checkpoint(tmp_path / "c", updater)


def test_names_that_would_be_one_in_the_file_are_refused(tmp_path: Path) -> None:
    updater = training()
    one, two = nn.Variable((2,), need_grad=True), nn.Variable((2,), need_grad=True)
    solver = solver_of(S.Sgd(0.1), {"w": one})
    nn.parameter.set_parameter("0:w", two)
    with pytest.raises(ValueError, match="two parameters would be saved as '0:w': rename"):
        save_checkpoint(tmp_path / "c", solver)
    solver.set_parameters({"a\0b": one, "a\0c": two}, reset=True)
    with pytest.raises(ValueError, match=r"'0:a\\x00b' has a name that an archive cuts off"):
        save_checkpoint(tmp_path / "c", solver, updater)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names", [("w", "w.npy"), ("w.npy", "w.npy.npy"), ("a/b", "a/../b"), ("..", "a")])
def test_parameters_of_any_name(names: Tuple[str, str], tmp_path: Path) -> None:
    def made() -> Tuple[Any, Dict[str, nn.Variable]]:
        parameters = {name: nn.Variable((2, 3), need_grad=True) for name in names}
        for number, v in enumerate(parameters.values()):
            v.d = number + 1.0
        solver = solver_of(S.Adam(0.1), parameters)
        return solver, parameters

    solver, parameters = made()
    for v in parameters.values():
        v.grad.fill(0.5)
    solver.update()
    expected = {name: v.d.copy() for name, v in parameters.items()}
    save_checkpoint(tmp_path / "c", solver)
    again, parameters = made()
    load_checkpoint(tmp_path / "c", again)
    np.testing.assert_equal({name: v.d for name, v in parameters.items()}, expected)


def steps_of(head: Any) -> Any:
    return head["parts"][0]["steps"]


CRAFTED: Dict[str, Callable[[Any, Any], Any]] = {
    "no parts": lambda head, _: head.pop("parts"),
    "a number of parts": lambda head, _: head.update(parts=3),
    "parts of another kind": lambda head, _: head.update(parts=[None, []]),
    "extra of another kind": lambda head, _: head.update(extra=[1]),
    "solver of another kind": lambda head, _: head["parts"][0].update(solver=[3]),
    "no steps": lambda head, _: head["parts"][0].pop("steps"),
    "steps of another kind": lambda head, _: head["parts"][0].update(steps="a/affine/W"),
    "more steps than nnabla counts": lambda head, _: steps_of(head).update({"a/affine/W": 2**70}),
    "learning rate of another kind": lambda head, _: head["parts"][0].update(learning_rate="0.1"),
    "no state of the updater": lambda head, _: head["parts"].__setitem__(1, {}),
    "complex": lambda _, arrays: arrays.update({"parameters/b/affine/b": np.ones(3, complex)}),
    "words": lambda _, arrays: arrays.update({"parameters/b/affine/b": np.array(["a", "b", "c"])}),
    "dates": lambda _, arrays: arrays.update({"parameters/b/affine/b": np.zeros(3, "M8[s]")}),
}
STATE = "0/a/affine/W/mean"
OF_A_SOLVER: Dict[str, Callable[[Any, Any], Any]] = {
    "state of another shape": lambda _, arrays: arrays.update({STATE: arrays[STATE][:0]}),
    "no state": lambda _, arrays: arrays.pop(STATE),
    "no step": lambda head, _: steps_of(head).pop("a/affine/W"),
    "a step below 0": lambda head, _: steps_of(head).update({"a/affine/W": -1}),
    "a word for a step": lambda head, _: steps_of(head).update({"a/affine/W": "two"}),
    "a fraction of a step": lambda head, _: steps_of(head).update({"a/affine/W": 1.5}),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((change, r"^(?!.*\n).*(is damaged|holds \[3\])") for change in CRAFTED.values()),
        *((change, "a/affine/W") for change in OF_A_SOLVER.values()),
    ],
    ids=[*CRAFTED, *OF_A_SOLVER],
)
def test_a_crafted_checkpoint_is_refused(
    change: Callable[[Any, Any], Any], message: str, tmp_path: Path
) -> None:
    updater = training()
    updater.update()
    save_checkpoint(tmp_path / "c", updater)
    with rewritten(tmp_path / "c") as (head, arrays):
        change(head, arrays)
    updater.update()
    before = everything(updater)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "c", updater)
    np.testing.assert_equal(everything(updater), before)


def test_arrays_that_claim_to_be_huge_are_refused(tmp_path: Path) -> None:
    updater = training()
    save_checkpoint(tmp_path / "c", updater)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**13,)})
    with zipfile.ZipFile(tmp_path / "c", "a") as archive:
        archive.writestr("parameters/huge.npy", header.getvalue())
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(tmp_path / "c", updater)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "c"
    updater = training()
    updater.update()
    save_checkpoint(path, updater)
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_changes_nothing(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(content) - 1), label="at")
    if data.draw(st.booleans(), label="truncated"):
        damaged = content[:at]
    else:
        damaged = content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    path = tmp_path_factory.mktemp("damaged") / "c"
    path.write_bytes(damaged)
    updater = training()
    before = everything(updater)
    try:
        load_checkpoint(path, updater)
    except ValueError:
        np.testing.assert_equal(everything(updater), before)
    else:  # times, names of the makers and such: what is loaded is whole all the same
        path.write_bytes(content)
        loaded, whole = everything(updater), training()
        load_checkpoint(path, whole)
        np.testing.assert_equal(loaded, everything(whole))


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none", training())
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="text is damaged, or not a checkpoint"):
        load_checkpoint(tmp_path / "text", training())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda updater, path: save_checkpoint(updater, path), "path comes first"),
        (lambda updater, path: save_checkpoint(path), "no updater, scaler or solver"),
        (lambda updater, path: save_checkpoint(path, updater, {"epoch": 1}), "extra="),
        (lambda updater, path: save_checkpoint(path, updater, extra=5), "extra=5"),
        (lambda updater, path: save_checkpoint(path, updater, extra={"rng": object()}), "'rng'"),
    ],
)
def test_parts_that_cannot_be_saved_are_named(
    call: Callable[[AdaptiveLossScalingUpdater, Path], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=message):
        call(training(), tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_saved(tmp_path: Path) -> None:
    updater = training()
    save_checkpoint(tmp_path / "c", updater, extra={"best": np.float32(0.5), "epoch": np.int64(3)})
    assert load_checkpoint(tmp_path / "c", updater) == {"best": 0.5, "epoch": 3}
