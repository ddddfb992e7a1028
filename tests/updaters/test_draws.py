# SPDX-License-Identifier: Apache-2.0
"""Rounding at random goes on where it was: over graphs, losses, saved states and checks."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.solvers as S
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, FormatEmulation, GradScaler, Precision
from nnabla_adaloss.diagnosis import SanityChecker, diagnose
from tests.worlds.networks import two_layers
from tests.worlds.trainings import scaler_step, solver_of
from tests.worlds.values import data, gradients, snapshot

AT_RANDOM = Precision(
    "float8_e4m3", "float8_e5m2", operands_only=True, otherwise="float16", stochastic_seed=3
)
Make = Callable[[Any, nn.Variable, Callable[[], None]], Any]


def emulated(x: nn.Variable) -> FormatEmulation:
    return FormatEmulation(two_layers(x), AT_RANDOM)


def as_bytes() -> bytes:
    return b"".join(g.tobytes() for _, g in sorted(gradients().items()))


class Run:
    """A training on one batch, of which only the random numbers differ from iteration to iteration."""

    def __init__(self, make: Make, *, rebuilt: bool, build: Any = two_layers, rate: float = 0.0) -> None:
        nn.clear_parameters()
        x = data(6, 4)

        def feed() -> None:
            if rebuilt:
                loss = build(x)
                if isinstance(loss, FormatEmulation):
                    loss.go_on_from(self.updater.loss)
                self.updater.loss = loss

        loss = build(x)
        self.solver = solver_of(S.Sgd(rate))
        self.updater = make(self.solver, loss, feed)

    def gradients(self, updates: int) -> List[bytes]:
        found = []
        for _ in range(updates):
            self.updater.update()
            found.append(as_bytes())
        return found


def adaptive(solver: Any, loss: nn.Variable, feed: Callable[[], None], **options: Any) -> Any:
    return AdaptiveLossScalingUpdater(solver, loss, feed, storage=AT_RANDOM, scale=256.0, **options)


def delayed(solver: Any, loss: nn.Variable, feed: Callable[[], None]) -> Any:
    return adaptive(solver, loss, feed, config=AdaLossConfig(delay=1))


def nnablas(solver: Any, loss: Any, feed: Callable[[], None]) -> Any:
    return DynamicLossScalingUpdater(solver, loss, feed, scale=256.0)


@pytest.mark.parametrize(
    ("make", "build"),
    [(adaptive, two_layers), (delayed, two_layers), (nnablas, emulated)],
)
def test_graphs_that_are_built_again_draw_on(make: Make, build: Any) -> None:
    kept, rebuilt = (Run(make, rebuilt=again, build=build).gradients(8) for again in (False, True))
    assert len(set(rebuilt)) == 8
    assert rebuilt == kept


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_loaded_state_draws_on(rebuilt: bool) -> None:
    run = Run(adaptive, rebuilt=rebuilt, rate=0.1)
    run.gradients(5)
    state = json.loads(json.dumps(run.updater.state_dict()))
    values = snapshot()
    expected = run.gradients(6)
    again = Run(adaptive, rebuilt=rebuilt, rate=0.1)
    for name, value in values.items():
        nn.get_parameters()[name].d = value
    again.updater.load_state_dict(state)
    assert again.gradients(6) == expected


def test_a_repeated_batch_draws_anew_and_the_same_in_each_run() -> None:
    def one() -> Tuple[List[bytes], int, int]:
        run = Run(adaptive, rebuilt=False)
        run.updater.scale = 2.0**40
        found = run.gradients(3)
        return found, run.updater.counters.repeats, run.updater.state_dict()["scaling"]["draws"]

    first = one()
    assert first == one()
    assert first[1] > 0
    # Each backward draws for the output gradients of both layers; some are run once more for a better scale.
    assert first[2] >= 2 * (3 + first[1])


@pytest.mark.parametrize("look", [lambda u: SanityChecker(u).check(), lambda u: diagnose(u)])
def test_a_watcher_draws_no_random_numbers(look: Callable[[Any], Any]) -> None:
    undisturbed = Run(adaptive, rebuilt=False).gradients(6)
    run = Run(adaptive, rebuilt=False)
    found = run.gradients(3)
    look(run.updater)
    assert found + run.gradients(3) == undisturbed


def test_all_losses_of_a_scaler_draw_from_one_stream() -> None:
    x = data(6, 4)
    losses = two_layers(x), two_layers(x) * 1.0
    solver = solver_of(S.Sgd(0.0))
    scaler = GradScaler(solver, storage=AT_RANDOM)

    def iterate(loss: nn.Variable) -> bytes:
        scaler_step(scaler, solver, loss)
        return as_bytes()

    for loss in losses:
        iterate(loss)
    found = [iterate(loss) for _ in range(4) for loss in losses]
    assert len(set(found)) == 8
    state: Dict[str, Any] = json.loads(json.dumps(scaler.state_dict()))
    expected = [iterate(loss) for _ in range(2) for loss in losses]
    scaler.load_state_dict(state)
    assert [iterate(loss) for _ in range(2) for loss in losses] == expected
    scaler = GradScaler(solver, storage=AT_RANDOM)
    scaler.load_state_dict(state)
    assert [iterate(loss) for _ in range(2) for loss in losses] == expected
