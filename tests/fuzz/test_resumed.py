# SPDX-License-Identifier: Apache-2.0
"""Random trainings that are killed twice, and go on from checkpoints bit for bit, in processes of their own.

`ADALOSS_FUZZ=25 pytest tests/fuzz/test_resumed.py` tries a hundred.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
import pytest
from hypothesis import assume, given

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    GradScaler,
    load_checkpoint,
    save_checkpoint,
)
from tests.fuzz.budget import budget
from tests.fuzz.programs import BATCH, HEADS, STEPS, WIDTH, Builder
from tests.worlds.children import end_of, in_a_child
from tests.worlds.values import FLOAT, HALF, solver_states

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

END = 9  # iterations


def carried(b: Builder, h: nn.Variable) -> nn.Variable:
    """A state in shared memory, which is a parameter."""
    before = b.parameter("before", BATCH, WIDTH, need_grad=False)
    y = F.tanh(h + F.affine(before, b.parameter("W", WIDTH, WIDTH)))
    y.data = before.data
    return y


# What forward writes without a name is refused, and each graph with a trained leaf without one is a new one.
NAMELESS = {"aliased", "aliased gradient", "own view", "reshaped", "unlinked weight", "view"}
NAMELESS |= {"batch_normalization", "noisy"}
PARTS = {name: step for name, step in {**STEPS, "recurrent": carried}.items() if name not in NAMELESS}


class Training(NamedTuple):
    """A random training."""

    steps: Tuple[str, ...]
    topologies: Tuple[int, ...]  # which of the steps each graph has, as bits
    head: str
    kind: str  # an "updater", "two updaters" or a "scaler"
    solver: str
    solvers: int  # of a scaler
    of_a_module: bool
    rebuilt: bool  # whether each batch has a graph of its own
    batches: int  # per update
    storage: Optional[str]  # "native": a half context
    config: Any
    options: Any  # of updaters
    limit: float  # beyond which gradients overflow in some places
    saved: Tuple[int, int]  # iterations
    rate: int  # the iteration in which the learning rate changes


def loss_of(training: Training, kept: Any, x: nn.Variable, t: nn.Variable, topology: int) -> nn.Variable:
    """One of the graphs, whose steps are behind each other."""
    b, h = Builder(kept, training.limit), x
    for index, name in enumerate(("layer", *training.steps)):
        if index == 0 or topology >> index & 1:
            b.scope = f"{index} {name}"
            h = PARTS[name](b, h)
    b.scope = "head"
    return HEADS[training.head](b, h, t)


class Net(nn.Module):  # type: ignore[misc]  # nnabla has no type hints
    """The same, with parameters of its own."""

    def call(self, *given: Any) -> nn.Variable:
        return loss_of(*given)


class Run:
    """A training from its beginning, or from a checkpoint."""

    def __init__(self, training: Training, storage: Optional[str]) -> None:
        nn.clear_parameters()
        self.training, self.net = training, Net()
        self.kept: Dict[str, nn.Variable] = {}
        self.x, self.t = nn.Variable((BATCH, WIDTH)), nn.Variable((BATCH, 1))
        self.graphs = [self.build(topology) for topology in (-1, *training.topologies)][1:]
        own = self.parameters(grad_only=True)
        count = 2 if training.kind == "two updaters" else training.solvers
        self.solvers = [getattr(S, training.solver)(2.0**-5) for _ in range(count)]
        for number, solver in enumerate(self.solvers):
            solver.set_parameters({k: v for n, (k, v) in enumerate(own.items()) if n % count == number})
        self.updaters: List[Any] = []
        self.scaler: Any = None
        if training.kind == "scaler":
            self.scaler = GradScaler(*self.solvers, storage=storage, config=training.config)
            self.parts: List[Any] = [self.scaler, *self.solvers]
        else:
            for number, solver in enumerate(self.solvers):
                policies = ("on_nonfinite_loss", "on_nonfinite_forward", "on_scale_floor")
                self.updaters.append(
                    AdaptiveLossScalingUpdater(
                        solver,
                        self.graphs[0],
                        lambda number=number: self.feed_updater(number),
                        storage=storage,
                        config=training.config,
                        accum_grad=training.batches,
                        max_retries=6,
                        **dict.fromkeys(policies, "skip"),
                        **training.options,
                    )
                )
            self.parts = list(self.updaters)
        self.parts += [self.net] if training.of_a_module else []

    def build(self, topology: int) -> nn.Variable:
        """A graph; within the net's own scope, or the current one."""
        call = self.net if self.training.of_a_module else loss_of
        return call(self.training, self.kept, self.x, self.t, topology)

    def parameters(self, *, grad_only: bool) -> Dict[str, nn.Variable]:
        found = self.net if self.training.of_a_module else nn
        return found.get_parameters(grad_only=grad_only)  # type: ignore[no-any-return]

    def feed(self, number: int) -> nn.Variable:
        """Feed a batch, whose graph is returned."""
        rng = np.random.default_rng(number)
        nn.seed(number)
        self.x.d, self.t.d = rng.standard_normal(self.x.shape), rng.integers(0, 3, self.t.shape)
        which = int(rng.integers(len(self.graphs)))
        return self.build(self.training.topologies[which]) if self.training.rebuilt else self.graphs[which]

    def feed_updater(self, number: int) -> None:
        updater = self.updaters[number]
        updater.loss = self.feed(updater.counters.fed)

    @property
    def iteration(self) -> int:
        """How many there were."""
        return self.scaler.state_dict()["iteration"] if self.scaler else self.updaters[-1].iteration

    def iterate(self) -> None:
        """One iteration."""
        number = self.iteration
        if number == self.training.rate:
            for solver in self.solvers:
                solver.set_learning_rate(2.0**-7)
        for updater in self.updaters:
            updater.update()
        if self.scaler is None:
            return
        for solver in self.solvers:
            solver.zero_grad()
        for batch in range(self.training.batches):
            loss = self.feed(number * self.training.batches + batch)
            self.scaler.forward(loss, clear_no_need_grad=True)
            self.scaler.backward(loss, clear_buffer=True)
        for solver in self.solvers:
            self.scaler.step(solver)
        self.scaler.update()

    def everything(self) -> Any:
        """What must be the same."""
        arrays = {name: v.d.copy() for name, v in self.parameters(grad_only=False).items()}
        return arrays, [solver_states(solver) for solver in self.solvers]


def child(training: Training, folder: Path, start: int, stop: int, storage: Any = "") -> int:
    """Run from a checkpoint (0: the beginning) to another, and die, or to the end; the exit code."""

    def action() -> None:
        warnings.simplefilter("ignore")
        own = training.storage if storage == "" else storage
        with nn.context_scope(HALF if own == "native" else FLOAT):
            run = Run(training, None if own == "native" else own)
            if start:
                load_checkpoint(folder / str(start), *run.parts)
            while run.iteration < END:
                if run.iteration == stop > start:
                    save_checkpoint(folder / str(stop), *run.parts)
                    run.iterate()
                    os.kill(os.getpid(), signal.SIGKILL)
                run.iterate()
            (folder / "end").write_bytes(pickle.dumps(run.everything()))

    return end_of(in_a_child(action))


bits = st.integers(0, 2**5 - 1).map(lambda mask: 2 * mask)
configs = st.builds(
    lambda method, delay, every: AdaLossConfig(
        loss_scale_method=method, delay=None if method == "element_wise_range" else delay, measure_every=every
    ),
    st.sampled_from(["amax_history"] * 3 + ["approx_range", "abs_range", "element_wise_range"]),
    st.sampled_from([None, None, 0]),
    st.sampled_from([1, 2, 8]),
)
trainings = st.builds(
    Training,
    steps=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=5).map(tuple),
    topologies=st.lists(bits, min_size=1, max_size=4).map(tuple),
    head=st.sampled_from([head for head in sorted(HEADS) if head != "penalty"]),
    kind=st.sampled_from(["updater", "updater", "two updaters", "scaler"]),
    solver=st.sampled_from(["Sgd", "Momentum", "Adam"]),
    solvers=st.sampled_from([1, 2]),
    of_a_module=st.booleans(),
    rebuilt=st.booleans(),
    batches=st.sampled_from([1, 1, 2]),
    storage=st.sampled_from([None, "float16", "float16", "float8_e5m2", "bfloat16", "native"]),
    config=configs,
    options=st.fixed_dictionaries(
        {
            "on_overflow": st.sampled_from(["repeat", "next"]),
            "global_scale": st.sampled_from(["history", "history", "dynamic"]),
        }
    ),
    limit=st.sampled_from([np.inf, 2.0**10, 2.0**4]),
    saved=st.tuples(st.integers(1, 4), st.integers(5, END - 1)),
    rate=st.integers(0, END),
)


@budget(4)
@given(trainings)
def test_a_training_that_is_killed_twice_goes_on_bit_for_bit(training: Training) -> None:
    first, second = training.saved
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Not all functions run in all formats.
        assume(child(training, folder, 0, 0) == 0)
        expected = pickle.loads((folder / "end").read_bytes())
        for start, stop in ((0, first), (first, second)):
            assert child(training, folder, start, stop) == -signal.SIGKILL
        assert child(training, folder, second, 0) == 0
        np.testing.assert_equal(pickle.loads((folder / "end").read_bytes()), expected)
        if training.storage in ("float16", "bfloat16"):
            assert child(training, folder, first, 0, "float32") == 0
