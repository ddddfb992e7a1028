# SPDX-License-Identifier: Apache-2.0
"""Trainings on a device, beside the same on a CPU: parameters, results and saved states, bit for bit.

nnabla computes both on the CPU; kernels, launches and waits are those of a device.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    FixedLossScalingUpdater,
    GradScaler,
    Precision,
    Recorder,
    load_checkpoint,
    save_checkpoint,
)
from tests.counted_device.alone import Alone
from tests.counted_device.device import CountedDevice
from tests.worlds.trainings import solver_of
from tests.worlds.values import Values, assert_equal, snapshot
from tests.worlds.warned import warned

STOCHASTIC = Precision("float16", "float8_e5m2", stochastic_seed=3)
BY_LAYER = {"out*": "float16", "*": "fp8_hybrid"}
SKIP = {"on_nonfinite_loss": "skip", "on_nonfinite_forward": "skip"}


class Training(NamedTuple):
    """What trains a network, and feeds it."""

    loss: nn.Variable
    solvers: List[Any]
    feed: Callable[[], None]


Fed = Mapping[int, float]
# Statistics of arrays in a saved state.
SUMS = ("statistics",)
NOTHING: Fed = MappingProxyType({})
Result = Tuple[Values, str, Any]


def decisive(state: Any) -> Any:
    """A saved state without statistics of arrays, whose sums a device adds up in another order."""
    if isinstance(state, Mapping):
        return {name: decisive(value) for name, value in state.items() if name not in SUMS}
    return [*map(decisive, state)] if isinstance(state, (list, tuple)) else state


def network(x: nn.Variable) -> nn.Variable:
    """Convolution, batch normalization, attention."""
    h = PF.batch_normalization(PF.convolution(x, 6, (3, 3), pad=(1, 1), name="conv"), name="bn")
    h = F.tanh(PF.affine(F.max_pooling(F.relu(h), (2, 2)), 12, name="hidden"))
    q = F.reshape(h, (x.shape[0], 3, 4))
    attended = F.batch_matmul(F.softmax(F.batch_matmul(q, q, transpose_b=True)), q)
    return PF.affine(F.reshape(attended, h.shape), 5, name="out")


def begin() -> None:
    nn.clear_parameters()
    nn.seed(0)
    nn.random.prng = np.random.RandomState(0)


def built(x: nn.Variable, t: nn.Variable, weight: Any, divisor: nn.Variable) -> nn.Variable:
    """The loss; the gradient between product and quotient grows with the inverse of the divisor."""
    return F.mean(F.softmax_cross_entropy(network(x) * divisor / divisor, t)) * weight


def training(
    context: nn.Context,
    *,
    solvers: int = 1,
    pixels: Fed = NOTHING,
    weights: Fed = NOTHING,
    divisors: Fed = NOTHING,
) -> Training:
    """A training; by the number of the batch: pixels of its first image, loss weights, and divisors of
    which small ones make gradients overflow.
    """
    begin()
    x, t, weight, divisor = (nn.Variable(shape) for shape in ((4, 2, 6, 6), (4, 1), (), (4, 1)))
    weight.d = 1e-3
    with nn.context_scope(context):
        loss = built(x, t, weight if weights else 1e-3, divisor)
        names, half = sorted(nn.get_parameters()), len(nn.get_parameters()) // 2
        parts = [names] if solvers == 1 else [names[:half], names[half:]]
        made = [solver_of(S.Adam(0.01), {n: nn.get_parameters()[n] for n in part}) for part in parts]
    rng, number = np.random.default_rng(1), [0]

    def feed() -> None:
        x.d, t.d = rng.standard_normal(x.shape), rng.integers(0, 5, t.shape)
        divisor.d = np.full(divisor.shape, divisors.get(number[0], 1.0))
        if number[0] in pixels:
            x.d[0] = pixels[number[0]]
        if number[0] in weights:
            weight.d = weights[number[0]]
        number[0] += 1

    return Training(loss, made, feed)


def updated(
    context: nn.Context,
    updates: int = 8,
    make: Any = AdaptiveLossScalingUpdater,
    fed: Optional[Mapping[str, Fed]] = None,
    **options: Any,
) -> Result:
    train = training(context, **(fed or {}))
    updater = make(train.solvers[0], train.loss, train.feed, **options)
    results = [updater.update() for _ in range(updates)]
    return snapshot(), str(results), decisive(updater.state_dict())


def scaled(
    context: nn.Context,
    *,
    solvers: int = 1,
    clip: bool = False,
    fed: Optional[Mapping[str, Fed]] = None,
    seed: Any = None,
    **options: Any,
) -> Result:
    train, results = training(context, solvers=solvers, **(fed or {})), []
    scaler = GradScaler(*train.solvers, **options)
    for _ in range(8):
        train.feed()
        for solver in train.solvers:
            solver.zero_grad()
        scaler.forward(train.loss, clear_no_need_grad=True)
        scaler.backward(train.loss, clear_buffer=True, grad=seed)
        for solver in train.solvers:
            if clip:
                scaler.unscale_(solver)
                solver.clip_grad_by_norm(0.1)
            results.append(scaler.step(solver))
        scaler.update()
    return snapshot(), str(results), decisive(scaler.state_dict())


def rebuilt(context: nn.Context, **options: Any) -> Result:
    begin()
    rng, updater, results = np.random.default_rng(1), None, []
    for number in range(7):
        batch = 4 + number % 3
        x, t, divisor = (nn.Variable(shape) for shape in ((batch, 2, 6, 6), (batch, 1), (batch, 1)))
        x.d, t.d = rng.standard_normal(x.shape), rng.integers(0, 5, t.shape)
        divisor.d = np.full(divisor.shape, 2.0**-12 if number == 4 else 1.0)
        with nn.context_scope(context):
            loss = built(x, t, 1e-3, divisor)
            if updater is None:
                updater = AdaptiveLossScalingUpdater(solver_of(S.Momentum(0.01)), loss, **options)
        updater.loss = loss
        results.append(updater.update())
    return snapshot(), str(results), decisive(updater.state_dict()) if updater else None


def resumed(context: nn.Context, path: Path, **options: Any) -> Result:
    train = training(context)
    updater = AdaptiveLossScalingUpdater(train.solvers[0], train.loss, train.feed, **options)
    for _ in range(4):
        updater.update()
    save_checkpoint(path, updater)
    for _ in range(3):
        updater.update()
    load_checkpoint(path, updater)
    results = [updater.update() for _ in range(3)]
    return snapshot(), str(results), decisive(updater.state_dict())


def with_an_array(context: nn.Context, **options: Any) -> Result:
    seed = nn.NdArray(())
    # A device's is not read, so that it counts as 1 among loss weights.
    seed.fill(1.5)
    return scaled(context, seed=seed, **options)


def alone(context: nn.Context, **options: Any) -> Result:
    return updated(context, comm=Alone(context), **options)


def recorded(context: nn.Context, **options: Any) -> Result:
    recorder = Recorder(every=2, histograms=True)
    return updated(context, monitors=[recorder], **options)


OVERFLOW = {"divisors": {3: 2.0**-12, 6: 2.0**-12}}
Program = Callable[..., Result]
EVERYWHERE: Dict[str, Tuple[Program, Dict[str, Any]]] = {
    "an updater": (updated, {}),
    "an overflow": (updated, {"fed": OVERFLOW}),
    'an overflow, "next"': (updated, {"fed": OVERFLOW, "on_overflow": "next"}),
    "NaN": (updated, {"fed": {"pixels": {4: np.nan}}, **SKIP}),
    "accumulation": (updated, {"accum_grad": 3, "updates": 5}),
    "a searched scale": (updated, {"global_scale": "dynamic", "on_overflow": "next"}),
    "approx_range": (updated, {"config": AdaLossConfig("approx_range")}),
    "a measuring pass for each": (updated, {"config": AdaLossConfig("abs_range"), "updates": 5}),
    "weight decay": (updated, {"weight_decay": 1e-4}),
    "zero gradients": (updated, {"fed": {"weights": {0: 1e-3, 4: 0.0, 6: 1e-3}}}),
    "fed weights": (updated, {"fed": {"weights": {n: 0.5**n for n in range(8)}}}),
    "fed weights that are small": (updated, {"fed": {"weights": {n: 10.0**-n for n in range(8)}}}),
    "a fixed scale": (updated, {"make": FixedLossScalingUpdater, "scale": 1024.0}),
    "a fixed scale that is too large": (updated, {"make": FixedLossScalingUpdater, "scale": 2.0**40}),
    "a communicator of one": (alone, {}),
    "hooks": (updated, {"function_post_hook": lambda f: None}),
    "a recorder": (recorded, {}),
    "a checkpoint": (resumed, {}),
    "graphs that are built again": (rebuilt, {}),
    "a scaler": (scaled, {}),
    "a scaler and two solvers": (scaled, {"solvers": 2}),
    "a scaler that clips": (scaled, {"clip": True}),
    "a scaler, overflow": (scaled, {"fed": OVERFLOW}),
    "a scaler, NaN": (scaled, {"fed": {"pixels": {4: np.nan}}}),
    "a scaler, a seed in an array": (with_an_array, {}),
}
# Emulated formats: what rounds is the same in all programs, so that a few stand for all.
IN_FLOAT = {
    **{name: EVERYWHERE[name] for name in ("an overflow", "NaN", "a checkpoint", "a scaler and two solvers")},
    "nothing emulated": (updated, {"storage": None}),
    "fp8_hybrid": (updated, {"storage": "fp8_hybrid"}),
    "E5M2, rounded at random": (updated, {"storage": STOCHASTIC}),
    "a format for each layer": (updated, {"storage": BY_LAYER}),
}
SLOW = pytest.mark.slow, pytest.mark.gate
PROGRAMS = [pytest.param("half", program, id=f"half, {name}") for name, program in EVERYWHERE.items()]
PROGRAMS += [
    pytest.param("float", program, id=f"float, {name}", marks=SLOW) for name, program in IN_FLOAT.items()
]


@pytest.mark.parametrize(("kind", "program"), PROGRAMS)
def test_a_training_is_the_same_on_a_device_as_on_a_cpu(
    on_device: CountedDevice, kind: str, program: Any, tmp_path: Path
) -> None:
    run, options = program
    if kind == "float":
        options = {"storage": "float16", **options}
    if run is resumed:
        options = {"path": tmp_path / "checkpoint", **options}
    backend = ["cpu:half", "cpu:float"] if kind == "half" else ["cpu:float"]
    contexts = on_device.context(kind), nn.Context(backend, "CpuCachedArray", "0")
    found: List[Result] = []
    for context in contexts:
        with warned(), on_device as counts:
            found.append(run(context, **options))
        assert bool(counts.launches) is (context is contexts[0])
    assert_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
