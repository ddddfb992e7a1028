# SPDX-License-Identifier: Apache-2.0
"""Rounding at random goes on where it was: over graphs, losses, saved states and checks."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
    GradScaler,
    Precision,
)
from nnabla_adaloss.diagnosis import SanityChecker, diagnose

AT_RANDOM = Precision(
    "float8_e4m3", "float8_e5m2", operands_only=True, otherwise="float16", stochastic_seed=3
)
Make = Callable[[Any, nn.Variable, Callable[[], None]], Any]


def network(x: nn.Variable) -> nn.Variable:
    h = F.tanh(PF.affine(x, 5, name="a", rng=np.random.RandomState(0)))
    return F.mean(PF.affine(h, 3, name="b", rng=np.random.RandomState(1)) ** 2)


def emulated(x: nn.Variable) -> FormatEmulation:
    return FormatEmulation(network(x), AT_RANDOM)


class Run:
    """A training on one batch, of which only the random numbers differ from iteration to iteration."""

    def __init__(self, make: Make, *, rebuilt: bool, build: Any = network, rate: float = 0.0) -> None:
        nn.clear_parameters()
        x = nn.Variable.from_numpy_array(np.random.RandomState(2).randn(6, 4).astype(np.float32))

        def feed() -> None:
            if rebuilt:
                loss = build(x)
                if isinstance(loss, FormatEmulation):
                    loss.go_on_from(self.updater.loss)
                self.updater.loss = loss

        loss = build(x)
        self.solver = S.Sgd(rate)
        self.parameters = nn.get_parameters()
        self.solver.set_parameters(self.parameters)
        self.updater = make(self.solver, loss, feed)

    def gradients(self, updates: int) -> List[bytes]:
        found = []
        for _ in range(updates):
            self.updater.update()
            found.append(b"".join(v.g.tobytes() for _, v in sorted(self.parameters.items())))
        return found


def adaptive(solver: Any, loss: nn.Variable, feed: Callable[[], None], **options: Any) -> Any:
    return AdaptiveLossScalingUpdater(solver, loss, feed, storage=AT_RANDOM, scale=256.0, **options)


def delayed(solver: Any, loss: nn.Variable, feed: Callable[[], None]) -> Any:
    return adaptive(solver, loss, feed, config=AdaLossConfig(delay=1))


def fixed(solver: Any, loss: nn.Variable, feed: Callable[[], None]) -> Any:
    return FixedLossScalingUpdater(solver, loss, feed, scale=256.0, storage=AT_RANDOM)


def nnablas(solver: Any, loss: Any, feed: Callable[[], None]) -> Any:
    return DynamicLossScalingUpdater(solver, loss, feed, scale=256.0)


@pytest.mark.parametrize(
    ("make", "build"),
    [(adaptive, network), (delayed, network), (fixed, network), (nnablas, emulated)],
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
    values = {name: v.d.copy() for name, v in run.parameters.items()}
    expected = run.gradients(6)
    again = Run(adaptive, rebuilt=rebuilt, rate=0.1)
    for name, value in values.items():
        again.parameters[name].d = value
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
def test_who_looks_on_draws_nothing(look: Callable[[Any], Any]) -> None:
    undisturbed = Run(adaptive, rebuilt=False).gradients(6)
    run = Run(adaptive, rebuilt=False)
    found = run.gradients(3)
    look(run.updater)
    assert found + run.gradients(3) == undisturbed


def test_all_losses_of_a_scaler_draw_from_one_stream() -> None:
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.random.RandomState(2).randn(6, 4).astype(np.float32))
    losses = network(x), network(x) * 1.0
    solver = S.Sgd(0.0)
    solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(solver, storage=AT_RANDOM)

    def gradients(loss: nn.Variable) -> bytes:
        solver.zero_grad()
        scaler.forward(loss)
        scaler.backward(loss)
        scaler.step(solver)
        scaler.update()
        return b"".join(v.g.tobytes() for _, v in sorted(nn.get_parameters().items()))

    for loss in losses:
        gradients(loss)
    found = [gradients(loss) for _ in range(4) for loss in losses]
    assert len(set(found)) == 8
    state: Dict[str, Any] = json.loads(json.dumps(scaler.state_dict()))
    expected = [gradients(loss) for _ in range(2) for loss in losses]
    scaler.load_state_dict(state)
    assert [gradients(loss) for _ in range(2) for loss in losses] == expected
    scaler = GradScaler(solver, storage=AT_RANDOM)
    scaler.load_state_dict(state)
    assert [gradients(loss) for _ in range(2) for loss in losses] == expected
