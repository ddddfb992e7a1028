# SPDX-License-Identifier: Apache-2.0
"""Trainings that are killed, and go on from a checkpoint in another process, bit for bit."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater, load_checkpoint, save_checkpoint
from tests.fuzz.budget import FACTOR
from tests.worlds.children import end_of, in_a_child
from tests.worlds.trainings import updater_of
from tests.worlds.values import FLOAT, HALF, data, snapshot, solver_states

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

SAVED, END = 3, 6  # iterations
LATE = 40


class Trunk(nn.Module):  # type: ignore[misc]  # nnabla has no type hints
    """An affine layer and batch normalization."""

    def call(self, x: nn.Variable) -> nn.Variable:
        h = PF.affine(x, 4, name="a", rng=np.random.RandomState(1))
        return F.tanh(PF.batch_normalization(h, batch_stat=self.training, name="norm"))


class Net(nn.Module):  # type: ignore[misc]
    """A trunk and a head."""

    def __init__(self) -> None:
        self.trunk = Trunk()

    def call(self, x: nn.Variable) -> nn.Variable:
        return PF.affine(self.trunk(x), 2, name="head", rng=np.random.RandomState(2))


class Training(NamedTuple):
    """What is saved, and what can be compared."""

    updaters: List[AdaptiveLossScalingUpdater]
    net: Net

    @property
    def parameters(self) -> Dict[str, nn.Variable]:
        return self.net.get_parameters(grad_only=False)  # type: ignore[no-any-return]

    def everything(self) -> List[Any]:
        states = [solver_states(updater.solver) for updater in self.updaters]
        found = [snapshot(self.parameters), states, [updater.state_dict() for updater in self.updaters]]
        self.net.training = False
        y = self.net(data(5, 3, seed=7))
        y.forward()
        return [*found, y.d.copy()]


def of_a_module(folder: Path, storage: Any, *, training: bool, loaded: bool, solvers: int = 1) -> Training:
    net, x = Net(), nn.Variable((8, 3))
    if loaded:
        net.load_parameters(str(folder / "pretrained.h5"))
    net.training = training
    loss = F.mean((net(x) - 1.0) ** 2)
    own = net.get_parameters(grad_only=True)
    updaters: List[AdaptiveLossScalingUpdater] = []

    def feed() -> None:
        x.d = np.random.default_rng(updaters[-1].counters.fed).standard_normal(x.shape)

    for number in range(solvers):
        trained = {name: v for index, (name, v) in enumerate(own.items()) if index % solvers == number}
        updaters.append(updater_of(loss, feed, S.Adam(0.05), trained, storage=storage))
    return Training(updaters, net)


def frozen(folder: Path, storage: Any) -> Training:
    """The trunk was trained before, and only when the training began."""
    made = of_a_module(folder, storage, training=False, loaded=False)
    head = {name: v for name, v in made.parameters.items() if name.startswith("head")}
    made.updaters[0].solver.set_parameters(head, reset=True)
    return made


CASES: Dict[str, Callable[[Path, Any], Training]] = {
    "in training": lambda folder, s: of_a_module(folder, s, training=True, loaded=False),
    "in evaluation": lambda folder, s: of_a_module(folder, s, training=False, loaded=False),
    "loaded": lambda folder, s: of_a_module(folder, s, training=False, loaded=True),
    "two solvers": lambda folder, s: of_a_module(folder, s, training=True, loaded=True, solvers=2),
    "frozen": frozen,
}


def began(case: str, folder: Path, storage: Any) -> Training:
    """A training that begins from nothing; only the first process finds what was trained before."""
    nn.clear_parameters()
    made = CASES[case](folder, storage)
    if case in ("in evaluation", "frozen") and not (folder / "last").exists():
        rng = np.random.RandomState(3)
        for v in made.parameters.values():
            v.d = v.d + rng.rand(*v.shape)
    return made


def run_on(made: Training, folder: Path, die: bool) -> None:
    """Train on to the end, with a checkpoint on the way; or die behind it."""
    while made.updaters[0].iteration < END:
        for updater in made.updaters:
            updater.update()
        if made.updaters[0].iteration == SAVED:
            save_checkpoint(folder / "last", *made.updaters, made.net, extra={"at": SAVED})
        if die and made.updaters[0].iteration == SAVED + 1:
            os.kill(os.getpid(), signal.SIGKILL)
    (folder / "end").write_bytes(pickle.dumps(made.everything()))


@pytest.mark.parametrize(
    ("case", "storage"),
    [
        *(("in training", storage) for storage in ("fp32", "float16", "native")),
        ("in evaluation", "fp32"),
        ("loaded", "native"),
        ("two solvers", "float16"),
        ("frozen", "native"),
    ],
)
def test_a_killed_training_goes_on_bit_for_bit(case: str, storage: str, tmp_path: Path) -> None:
    format = "float16" if storage == "float16" else None
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with nn.context_scope(HALF if storage == "native" else FLOAT):
        for folder in (straight, killed):
            folder.mkdir()
            trained = Net()
            trained(nn.Variable((8, 3)))
            for number, v in enumerate(trained.get_parameters().values()):
                v.d = np.random.RandomState(number).rand(*v.shape)
            trained.save_parameters(str(folder / "pretrained.h5"))

        def resume() -> None:
            made = began(case, killed, format)
            assert load_checkpoint(killed / "last", *made.updaters, made.net) == {"at": SAVED}
            run_on(made, killed, die=False)

        assert end_of(in_a_child(lambda: run_on(began(case, straight, format), straight, die=False))) == 0
        code = end_of(in_a_child(lambda: run_on(began(case, killed, format), killed, die=True)))
        assert code == -signal.SIGKILL
        assert end_of(in_a_child(resume)) == 0
    expected = pickle.loads((straight / "end").read_bytes())
    np.testing.assert_equal(pickle.loads((killed / "end").read_bytes()), expected)


def saved_at(moment: int, made: Training, path: Path) -> threading.Thread:
    """A thread that saves once, at a random moment, in one of the ways in which that can be done."""
    rng = random.Random(moment)

    def save() -> None:
        save_checkpoint(path, *made.updaters, made.net)

    def when_it_can() -> None:
        while True:
            try:
                return save()
            except RuntimeError as error:
                if "updater.when_idle" not in str(error):
                    raise

    def late() -> None:
        time.sleep(rng.random() * 0.1 if moment % 4 else 0.0)
        when_it_can() if moment % 3 == 0 else made.updaters[0].when_idle(save)

    thread = threading.Thread(target=late)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float16", "native"])
@pytest.mark.parametrize("case", ["in training", "two solvers"])
def test_a_checkpoint_saved_by_a_thread_at_any_moment_continues_bit_for_bit(
    case: str, storage: str, tmp_path: Path
) -> None:
    """`ADALOSS_FUZZ=25` saves 200 times in all."""
    format = "float16" if storage == "float16" else None
    trained = Net()
    trained(nn.Variable((8, 3)))
    trained.save_parameters(str(tmp_path / "pretrained.h5"))

    def train(end: str, moment: int, resumed: bool) -> Callable[[], None]:
        path = tmp_path / str(moment)

        def action() -> None:
            made, threads = began(case, tmp_path, format), []
            if resumed:
                load_checkpoint(path, *made.updaters, made.net)
            elif moment >= 0:
                threads.append(saved_at(moment, made, path))
            # The one with fewer updates first: a checkpoint may lie between two of an iteration.
            while made.updaters[-1].iteration < LATE:
                min(made.updaters, key=lambda updater: updater.iteration).update()
            for thread in threads:
                thread.join()
            (tmp_path / end).write_bytes(pickle.dumps(made.everything()))

        return action

    with nn.context_scope(HALF if storage == "native" else FLOAT):
        assert end_of(in_a_child(train("straight", -1, resumed=False))) == 0
        expected = pickle.loads((tmp_path / "straight").read_bytes())
        for moment in range(max(int(2 * FACTOR), 1)):
            for resumed in (False, True):
                assert end_of(in_a_child(train("end", moment, resumed))) == 0, moment
                np.testing.assert_equal(pickle.loads((tmp_path / "end").read_bytes()), expected)
