# SPDX-License-Identifier: Apache-2.0
"""Ordinary training programs, drawn step by step, and run in nnabla's own loop or with this package."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    GradScaler,
    load_checkpoint,
    save_checkpoint,
)
from tests.worlds import random_graphs
from tests.worlds.random_graphs import BATCH, WIDTH
from tests.worlds.tampering import Gate, Tampering

Records = List[Tuple[int, Dict[str, np.ndarray]]]


class Builder:
    """Makes the parts of a network; parameters follow from their names, and are those of the last build."""

    def __init__(self, kept: Dict[str, nn.Variable], limit: float) -> None:
        self.scope, self.limit, self.count = "", limit, 0
        self.weights: List[nn.Variable] = []
        self.kept = kept  # leaves that are no parameters, and live on when the graph is built anew

    def parameter(self, kind: str, *shape: int, need_grad: bool = True, fill: Optional[float] = None) -> Any:
        """A parameter, by default of random numbers."""
        name = f"{self.scope}/{kind}"
        values = self.numbers(name, *shape) if fill is None else np.full(shape, fill, np.float32)
        v = nn.parameter.get_parameter_or_create(name, shape, values, need_grad=need_grad)
        if need_grad and shape == (WIDTH, WIDTH):
            self.weights.append(v)
        return v

    def state(self, *shape: int) -> nn.Variable:
        """A leaf that is no parameter."""
        if self.scope not in self.kept:
            self.kept[self.scope] = constant(self.numbers(self.scope, *shape))
        return self.kept[self.scope]

    def numbers(self, name: str, *shape: int) -> np.ndarray:
        """Random numbers that follow from a name."""
        return np.random.default_rng(list(name.encode())).standard_normal(shape).astype(np.float32) * 0.5

    def leaf(self, kind: str, *shape: int, reuse: bool = False) -> nn.Variable:
        """A parameter of a step of `random_graphs`; one that is used already, where they are to be shared."""
        self.count += 1
        return self.weight() if reuse else self.parameter(f"{kind}{self.count}", *shape)

    def pick(self, pool: List[nn.Variable]) -> nn.Variable:
        """The input of a step of `random_graphs`."""
        return pool[0]

    def weight(self) -> nn.Variable:
        """A weight that is used already, or the first one."""
        return self.weights[0] if self.weights else self.parameter("W", WIDTH, WIDTH)

    def image(self, h: nn.Variable) -> nn.Variable:
        """Two channels of 4 by 4."""
        return F.reshape(F.affine(h, self.parameter("image", WIDTH, 32)), (BATCH, 2, 4, 4))

    def flat(self, h: nn.Variable) -> nn.Variable:
        """The width again, of anything."""
        size = int(np.prod(h.shape[1:]))
        return F.tanh(F.affine(h, self.parameter("flat", size, WIDTH)))

    def statistics(self, *shape: int) -> List[nn.Variable]:
        """Running mean and variance."""
        fills = {"mean": 0.0, "variance": 1.0}
        return [self.parameter(k, *shape, need_grad=False, fill=fill) for k, fill in fills.items()]


class Limited(Tampering):
    """Gradients beyond a limit become infinite, as in a narrow format."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def changed(self, g: np.ndarray) -> np.ndarray:
        return np.where(np.abs(g) > self.limit, np.float32(np.inf), g)


Step = Callable[[Builder, nn.Variable], nn.Variable]


def constant(values: Any) -> nn.Variable:
    """A leaf that needs no gradient."""
    return nn.Variable.from_numpy_array(np.array(values, np.float32))


def layer(b: Builder, h: nn.Variable) -> nn.Variable:
    return F.tanh(F.affine(h, b.parameter("W", WIDTH, WIDTH), b.parameter("b", WIDTH)))


def aliased(share_data: bool) -> Step:
    def step(b: Builder, h: nn.Variable) -> nn.Variable:
        w = b.weight()
        other = nn.Variable(w.shape, need_grad=True)
        if share_data:
            other.data = w.data
        else:
            other.data = b.state(*w.shape).data
        other.grad = w.grad
        return F.tanh(F.affine(h, other))

    return step


def view(b: Builder, h: nn.Variable) -> nn.Variable:
    """The same memory by `NdArray.view`."""
    w = b.weight()
    other = nn.Variable((WIDTH * WIDTH,), need_grad=True)
    other.data, other.grad = w.data.view((WIDTH * WIDTH,)), w.grad.view((WIDTH * WIDTH,))
    return h + F.mean(F.tanh(other), keepdims=True).reshape((1, 1))


def narrowed(b: Builder, h: nn.Variable) -> nn.Variable:
    """Halves of one array, as packed parameters are."""
    packed, halves = b.parameter("packed", 2 * WIDTH, WIDTH), []
    for index in range(2):
        half = b.kept.get(f"{b.scope} {index}")
        if half is None:
            half = b.kept[f"{b.scope} {index}"] = nn.Variable((WIDTH, WIDTH), need_grad=True)
            half.data = packed.data.narrow(0, index * WIDTH, WIDTH)
            half.grad = packed.grad.narrow(0, index * WIDTH, WIDTH)
        halves.append(half)
    return F.affine(F.tanh(F.affine(h, halves[0])), halves[1])


def batch_normalization(function: Callable[..., Any], **options: Any) -> Step:
    def step(b: Builder, h: nn.Variable) -> nn.Variable:
        y = b.image(h)
        shape = (1, 2, 1, 1)
        beta, gamma = b.parameter("beta", *shape, fill=0.1), b.parameter("gamma", *shape, fill=1.2)
        return b.flat(function(y, beta, gamma, *b.statistics(*shape), **options))

    return step


def fused_convolution(residual: bool, normalized: bool) -> Step:
    def step(b: Builder, h: nn.Variable) -> nn.Variable:
        y, options = b.image(h), {}
        shape = (1, 2, 1, 1)
        if normalized:
            options = dict(zip(("mean", "variance"), b.statistics(*shape)))
            options["beta"], options["gamma"] = (b.parameter(n, *shape, fill=1.0) for n in ("beta", "gamma"))
        if residual:
            options["z"] = y
        w = b.parameter("kernel", 2, 2, 3, 3)
        return b.flat(F.fused_convolution(y, w, pad=(1, 1), nonlinearity="relu", **options))

    return step


def embedding(b: Builder, h: nn.Variable) -> nn.Variable:
    table = b.weight()
    ids = constant([[0, 1], [1, 3], [2, 2]])
    return h + F.affine(F.mean(F.embed(ids, table), axis=1), F.transpose(table, (1, 0)))


def lstm_cells(b: Builder, h: nn.Variable) -> nn.Variable:
    """Two steps of one cell."""
    c = y = F.constant(0.0, (BATCH, WIDTH))
    w, bias = b.parameter("cell", 2 * WIDTH, 4 * WIDTH), b.parameter("bias", 4 * WIDTH)
    for _ in range(2):
        gates = F.split(F.reshape(F.affine(F.concatenate(h, y, axis=1), w, bias), (BATCH, 4, WIDTH)), axis=1)
        i, f, o = map(F.sigmoid, gates[:3])
        c = f * c + i * F.tanh(gates[3])
        y = o * F.tanh(c)
    return y


def lstm(b: Builder, h: nn.Variable) -> nn.Variable:
    """nnabla's own, which keeps references of its own to gradients."""
    x = F.reshape(h, (1, BATCH, WIDTH))
    zeros = [constant(np.zeros((1, 1, BATCH, WIDTH))) for _ in "hc"]
    w, bias = b.parameter("lstm", 1, 4, WIDTH, 2 * WIDTH), b.parameter("bias", 1, 1, 4, WIDTH)
    return F.reshape(F.lstm(x, *zeros, w, bias=bias, training=True)[0], (BATCH, WIDTH))


def normalized_weight(b: Builder, h: nn.Variable) -> nn.Variable:
    w, g = b.parameter("direction", WIDTH, WIDTH), b.parameter("g", WIDTH, fill=1.5)
    return F.tanh(F.affine(h, F.weight_normalization(w, g, dim=1)))


def spectral(b: Builder, h: nn.Variable) -> nn.Variable:
    u = b.parameter("u", WIDTH, need_grad=False)
    return F.affine(h, F.spectral_norm(b.parameter("W", WIDTH, WIDTH), u, dim=0, itr=1))


def scattered(trained: bool) -> Step:
    """A memory into which forward writes."""

    def step(b: Builder, h: nn.Variable) -> nn.Variable:
        memory = b.parameter("memory", 4, WIDTH, need_grad=trained)
        return h + F.sum(F.scatter_nd(h, constant([[0, 2, 3]]), out=memory) ** 2, axis=0, keepdims=True) * 0.1

    return step


def averaged(b: Builder, h: nn.Variable) -> nn.Variable:
    """A running mean in the graph, which later layers read."""
    mean = b.parameter("average", BATCH, WIDTH, need_grad=False)
    now = F.assign(mean, 0.9 * mean + 0.1 * h.get_unlinked_variable(need_grad=False))
    return h - F.tanh(now)


def recurrent(b: Builder, h: nn.Variable) -> nn.Variable:
    """A state that goes on from batch to batch, in the memory of what computes it."""
    before = b.state(BATCH, WIDTH)
    w = b.parameter("W", WIDTH, WIDTH)
    y = F.tanh(F.affine(h, b.parameter("in", WIDTH, WIDTH)) + F.affine(before, w)).apply(persistent=True)
    y.data = before.data
    return y


def quantized(b: Builder, h: nn.Variable) -> nn.Variable:
    w = b.parameter("W", WIDTH, WIDTH)
    return F.tanh(F.binary_connect_affine(h, w, b.parameter("binary", WIDTH, WIDTH, need_grad=False)))


def noisy(b: Builder, h: nn.Variable) -> nn.Variable:
    return h + F.vat_noise(F.tanh(h), b.state(BATCH, WIDTH))


def own_view(b: Builder, h: nn.Variable) -> nn.Variable:
    w = b.weight()
    return F.tanh(F.affine(h, F.affine(w, w) + F.affine(w.reshape(w.shape, unlink=True), w)))


def anywhere(step: Callable[..., List[nn.Variable]]) -> Step:
    """A step of `random_graphs` behind what comes before it."""
    return lambda b, h: step(b, [h])[0]


ANYWHERE = {name: anywhere(step) for name, step in random_graphs.STEPS.items() if name != "recompute"}

STEPS: Dict[str, Step] = {
    **ANYWHERE,
    "layer": layer,
    "reshaped": lambda b, h: F.tanh(F.affine(h, b.weight().reshape((WIDTH, WIDTH), unlink=True))),
    "unlinked weight": lambda b, h: F.affine(h, b.weight().get_unlinked_variable(need_grad=True)),
    "frozen use": lambda b, h: F.affine(h, b.weight().get_unlinked_variable(need_grad=False)),
    "aliased": aliased(True),
    "aliased gradient": aliased(False),
    "view": view,
    "narrowed": narrowed,
    "frozen": lambda b, h: F.tanh(F.affine(h, b.parameter("frozen", WIDTH, WIDTH, need_grad=False))),
    "stopped": lambda b, h: h + layer(b, h).get_unlinked_variable(need_grad=False),
    "unlinked": lambda b, h: h * F.sigmoid(F.unlink(layer(b, h))),
    "residual": lambda b, h: h + layer(b, h),
    "dense": lambda b, h: F.tanh(
        F.affine(F.concatenate(h, layer(b, h), axis=1), b.parameter("V", 2 * WIDTH, WIDTH))
    ),
    "layer normalization": lambda b, h: F.layer_normalization(
        h, b.parameter("beta", 1, WIDTH), b.parameter("gamma", 1, WIDTH), batch_axis=0
    ),
    "batch normalization": batch_normalization(F.batch_normalization),
    "running statistics": batch_normalization(F.batch_normalization, batch_stat=False),
    "fused normalization": batch_normalization(F.fused_batch_normalization),
    "fused": fused_convolution(residual=False, normalized=False),
    "fused residual": fused_convolution(residual=True, normalized=False),
    "fused normalized": fused_convolution(residual=False, normalized=True),
    "einsum": lambda b, h: F.tanh(F.einsum(h, b.weight(), equation="ij,jk->ik")),
    "embedding": embedding,
    "lstm cells": lstm_cells,
    "lstm": lstm,
    "normalized weight": normalized_weight,
    "spectral": spectral,
    "scattered": scattered(trained=False),
    "scattered trained": scattered(trained=True),
    "averaged": averaged,
    "recurrent": recurrent,
    "quantized": quantized,
    "noisy": noisy,
    "own view": own_view,
    "python": lambda b, h: Gate()(layer(b, h)),
    "limited": lambda b, h: Limited(b.limit)(layer(b, h)),
    "clipped gradient": lambda b, h: F.clip_grad_by_norm(layer(b, h), 1e-2),
    "clipped values": lambda b, h: F.clip_grad_by_value(
        h, *(constant(np.full(h.shape, v)) for v in (-1e-3, 1e-3))
    ),
    "kept": lambda b, h: layer(b, h).apply(persistent=True),
    "small": lambda b, h: h * 2.0**-12,
}

# What nnabla 1.39 itself computes again from memory that it has freed.
NOT_AGAIN = {
    *ANYWHERE,
    *("averaged", "clipped values", "embedding", "lstm cells", "noisy", "scattered", "scattered trained"),
    *("small", "unlinked", "view"),
}

HEADS: Dict[str, Callable[[Builder, nn.Variable, nn.Variable], nn.Variable]] = {
    "squares": lambda b, h, t: F.mean(F.affine(h, b.parameter("head", WIDTH, 2)) ** 2),
    "classes": lambda b, h, t: F.mean(F.softmax_cross_entropy(F.affine(h, b.parameter("head", WIDTH, 3)), t)),
    "sum": lambda b, h, t: F.sum(F.tanh(h)),
    "rows": lambda b, h, t: F.mean(F.sum(h**2, axis=1)),
    "variance": lambda b, h, t: F.mean((h - F.mean(h, keepdims=True)) ** 2) + F.mean(h),
    "share": lambda b, h, t: F.mean(F.log(F.sigmoid(h) / F.sum(F.sigmoid(h), keepdims=True))),
    "regularizer": lambda b, h, t: F.sum(b.weight() ** 2) + F.mean(h),
    "penalty": lambda b, h, t: F.mean(
        nn.grad([F.sum(F.softplus(F.affine(h, b.parameter("critic", WIDTH, 1))))], [h])[0] ** 2
    ),
}

# Of a loss, a number, and a Variable that holds the number, times one that changes from batch to batch.
WEIGHTS: Dict[str, Callable[[nn.Variable, float, nn.Variable], nn.Variable]] = {
    "none": lambda one, factor, weight: one,
    "constant": lambda one, factor, weight: one * factor,
    "variable": lambda one, factor, weight: one * weight,
    "quotient": lambda one, factor, weight: F.div2(one, weight + 2.0),
    "computed": lambda one, factor, weight: (weight * 0.5 + 0.25) * one,
    "both": lambda one, factor, weight: (one * 2.0**-20 - factor) * weight,
    "squared": lambda one, factor, weight: (one * weight) ** 2,
    "log": lambda one, factor, weight: F.log((F.abs(one) + 0.5) * abs(factor)) * weight,
    "log of a sum": lambda one, factor, weight: F.log(F.abs(one * weight) + 1.0),
    "exp": lambda one, factor, weight: F.exp(F.minimum_scalar(one, 2.0) * 0.5) * weight,
    "power": lambda one, factor, weight: ((F.abs(one) + 0.5) * factor**2) ** 1.5 * weight,
    "root": lambda one, factor, weight: (F.abs(one * factor) + 1e-3) ** 0.5,
    "reciprocal": lambda one, factor, weight: F.r_div_scalar(F.abs(one) + 0.5, factor),
    "maximum": lambda one, factor, weight: F.maximum2(one * weight, one * factor),
    "minimum": lambda one, factor, weight: F.minimum2(F.minimum_scalar(one, 1.0), one * weight),
    "where": lambda one, factor, weight: F.where(
        F.greater_scalar(one, 0.3).apply(need_grad=False), one * weight, one * factor
    ),
    "reshape": lambda one, factor, weight: F.reshape(F.reshape(one, (1, 1)) * F.reshape(weight, (1, 1)), ()),
    "quotient of computed": lambda one, factor, weight: (
        one * factor / (F.exp(-F.abs(one)) + F.abs(weight) + 0.1)
    ),
    "product of computed": lambda one, factor, weight: one * F.sigmoid(one) * F.exp(F.tanh(weight)),
    "held": lambda one, factor, weight: one / (F.abs(F.unlink(one)) + 0.1) * weight,
}

COMBINATIONS: Dict[str, Callable[[List[nn.Variable]], nn.Variable]] = {
    "sum": lambda losses: sum(losses[1:], losses[0]),
    "stack": lambda losses: F.sum(F.stack(*losses, losses[0])),
    "mean of stack": lambda losses: F.mean(F.stack(*losses, losses[0])),
    "product": lambda losses: F.mul2(losses[0], losses[-1]) + losses[0],
}


class Head(NamedTuple):
    """One of the losses that are added."""

    kind: str
    after: int  # how many steps it is behind, at most
    weight: str
    factor: float


class Program(NamedTuple):
    """A training program."""

    steps: Tuple[Tuple[str, bool], ...]  # with whether they are computed again in backward
    heads: Tuple[Head, ...]
    solver: str = "Sgd"
    rebuilt: str = ""  # for each batch: "same", or "varied": some graphs lack a step, or a head
    clear: bool = True
    batches: int = 1  # per update
    clip: str = ""
    # In the second iteration a "parameter" is frozen, or an "inner" variable, and thawed after the third; or
    # all, "nothing" being left, until it is refused.
    toggled: str = ""
    rates: bool = False  # whether the learning rate changes
    saved: int = 0  # after this many iterations the scaler is saved, an updater by a thread at any time
    input_gradient: bool = False
    apart: bool = False  # whether each loss has a backward of its own
    combination: str = "sum"  # what becomes of losses that have one backward
    limit: float = np.inf  # beyond which gradients overflow in some places, so that batches are repeated
    undone: bool = True  # whether forward has changed nothing where "nothing" is refused
    iterations: int = 5

    def train(self, way: str, config: Optional[AdaLossConfig] = None, **options: Any) -> Records:
        """Parameters, gradients at the update and leaves after each iteration, by its number, of nnabla's own
        loop (way "nnabla", or "plain", where nothing is computed again), of an "updater" or of a "scaler"; if
        that is saved, also of the training that goes on from there.
        """

        def run() -> Run:
            return Run(self, way, config, options)

        with tempfile.TemporaryDirectory() as folder:
            first = run()
            first.path = os.path.join(folder, "checkpoint")
            found = first.train()
            if first.then is not None:
                found += run().resume(first.path, first.then)
        return found


@contextmanager
def refused() -> Iterator[None]:
    """Accept that a checkpoint would miss something."""
    try:
        yield
    except ValueError as error:
        assert "the checkpoint would miss" in str(error)  # noqa: PT017


class Moment(NamedTuple):
    """When a checkpoint was written: iterations, batches, and leaves that are in no checkpoint."""

    iteration: int
    number: int
    kept: Dict[str, np.ndarray]


class Run:
    """A program that runs."""

    def __init__(self, program: Program, way: str, config: Optional[AdaLossConfig], options: Any) -> None:
        nn.clear_parameters()
        self.recompute = way != "plain"
        self.program, self.way = program, way
        self.kept: Dict[str, nn.Variable] = {}
        self.x, self.t = nn.Variable((BATCH, WIDTH)), nn.Variable((BATCH, 1))
        self.x.need_grad = program.input_gradient
        self.factors = [constant(head.factor) for head in program.heads]
        self.number = self.iteration = 0
        self.cut = ""  # what is frozen now, of that which lives no longer than a graph
        self.losses = self.build()
        self.seen: Dict[str, np.ndarray] = {}
        self.solver = getattr(S, program.solver)(2.0**-5)
        self.solver.set_parameters(nn.get_parameters())
        self.refused = False  # whether "nothing" is over
        self.path, self.then = "", None  # the checkpoint, and the `Moment` when it was written
        self.scaler = GradScaler(self.solver, config=config) if way == "scaler" else None
        self.updater = self.make_updater(config, options) if way == "updater" else None

    def make_updater(self, config: Optional[AdaLossConfig], options: Any) -> AdaptiveLossScalingUpdater:
        def feed() -> None:
            self.feed()
            if self.program.rebuilt:
                updater.loss = self.losses[0]

        updater = AdaptiveLossScalingUpdater(
            self.solver,
            self.losses[0],
            feed,
            clear_buffer=self.program.clear,
            accum_grad=self.program.batches,
            on_gradients=self.gradients,
            config=config,
            max_retries=40,
            **options,
        )
        return updater

    def build(self) -> List[nn.Variable]:
        """The losses: one, or several that go backward one by one."""
        b, h = Builder(self.kept, self.program.limit), self.x
        varied = self.program.rebuilt == "varied"
        # All that there is in the first graph, which makes the parameters.
        steps = self.program.steps[: -1 if varied and self.number % 2 else None]
        heads = self.program.heads[: 1 if varied and self.number % 3 == 2 else None]
        reached: List[nn.Variable] = []
        inner: List[nn.Variable] = []
        for index, (name, again) in enumerate([("layer", False), *steps]):
            b.scope = f"{index} {name}"
            with nn.recompute(again and self.recompute and name not in NOT_AGAIN):
                h = STEPS[name](b, h)
            if again:
                # nnabla 1.39 reads freed memory where what is recomputed last has several readers, or one
                # that works in place.
                h = F.affine(h, b.parameter("closing", WIDTH, WIDTH))
            reached.append(h)
            if self.program.toggled == "inner" and not index:
                b.scope = "side"
                h = h + layer(b, h)
                inner.append(h.parent.inputs[1])
        losses = []
        for index, head in enumerate(heads):
            b.scope = f"head {index}"
            one = HEADS[head.kind](b, reached[max(len(reached) - 1 - head.after, 0)], self.t)
            losses.append(WEIGHTS[head.weight](one, head.factor, self.factors[index]))
        if not self.program.apart:
            losses = [COMBINATIONS[self.program.combination](losses)]
        ends = [v for loss in losses for v in loss.parent.inputs if v.need_grad]
        self.freezable = {"inner": inner, "nothing": ends}
        for variable in self.freezable.get(self.cut, ()):
            variable.need_grad = False
        return losses

    def feed(self) -> None:
        """The next batch; each is fed once."""
        rng = np.random.default_rng(self.number)
        self.x.d, self.t.d = rng.standard_normal(self.x.shape), rng.integers(0, 3, self.t.shape)
        for variable, head in zip(self.factors, self.program.heads):
            variable.d = head.factor * (1.0, 0.0, 3.0)[self.number % 3]
        if self.program.input_gradient:
            self.x.grad.zero()
        self.number += 1
        if self.program.rebuilt and self.number > 1:
            self.losses = self.build()

    def begin(self) -> None:
        """Freeze something, or thaw it; set a learning rate."""
        if self.iteration in (1, 3):
            self.toggle(frozen=self.iteration == 1)
        if self.program.rates and self.iteration == 2:
            self.solver.set_learning_rate(2.0**-6)

    def toggle(self, *, frozen: bool) -> None:
        """Freeze, or thaw, what the program says."""
        if self.program.toggled == "parameter":
            known, own = nn.get_parameters(grad_only=False), self.solver.get_parameters()
            known[min(own)].need_grad = not frozen
        else:
            self.cut = self.program.toggled if frozen else ""
            for variable in self.freezable.get(self.program.toggled, ()):
                variable.need_grad = not frozen

    def refuse(self) -> None:
        """An iteration in which nothing has a gradient."""
        self.refused = True
        if self.way in ("plain", "nnabla"):
            self.feed()
            if not self.program.undone:
                self.losses[0].forward(clear_no_need_grad=self.program.clear)
            return
        try:
            self.iterate()
        except ValueError as error:
            assert "needs no gradient" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a loss without a gradient is not refused")

    def gradients(self, solver: Any) -> None:
        """Note the complete gradients, and clip them."""
        self.seen = {f"{name}.grad": v.g.copy() for name, v in solver.get_parameters().items()}
        if self.program.input_gradient:
            self.seen["x.grad"] = self.x.g.copy()
        if self.program.clip == "norm":
            solver.clip_grad_by_norm(1e-2)
        elif self.program.clip == "value":
            for v in solver.get_parameters().values():
                v.grad.data = np.clip(v.g, -1e-3, 1e-3)

    def train(self) -> Records:
        """See `Program.train`."""
        with self.saving():
            return [*self.records()]

    def resume(self, path: str, then: Moment) -> Records:
        """Go on from a checkpoint."""
        self.iteration, self.number = then.iteration, then.number
        self.refused = self.number > self.iteration * self.program.batches
        if 1 < self.iteration <= 3 and self.program.toggled != "nothing":
            self.toggle(frozen=True)
        with refused():
            load_checkpoint(path, *self.parts)
            return self.go_on(then)
        # Saved with a graph that does not write what this one writes.
        return []

    def go_on(self, then: Moment) -> Records:
        """The iterations after a checkpoint was loaded."""
        for name, values in then.kept.items():
            self.kept[name].d = values
        return [*self.records()]

    @property
    def parts(self) -> Tuple[Any, ...]:
        """The parts of a checkpoint."""
        return (self.scaler, self.solver) if self.updater is None else (self.updater,)

    def save(self) -> None:
        """Write the checkpoint, if it is not too late."""
        iteration = self.iteration if self.updater is None else self.updater.iteration
        if iteration > self.program.saved:
            return
        with refused():
            save_checkpoint(self.path, *self.parts)
            self.then = Moment(iteration, self.number, {name: v.d.copy() for name, v in self.kept.items()})

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save from a thread, at any time."""
        if self.updater is None or not self.path or not self.program.saved:
            yield
            return
        ended, called, errors = threading.Event(), threading.Event(), []

        def save() -> None:
            try:
                self.save()
            except BaseException as error:
                errors.append(error)
            called.set()

        def run() -> None:
            while not ended.wait(random.expovariate(100.0)):
                called.clear()
                self.updater.when_idle(save)
                called.wait()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        if errors:
            raise errors[0]

    def records(self) -> Iterator[Tuple[int, Dict[str, np.ndarray]]]:
        """Run the iterations that are left."""
        while self.iteration < self.program.iterations:
            self.begin()
            if self.cut == "nothing":
                if not self.refused:
                    self.refuse()
                self.toggle(frozen=False)
            self.iterate()
            self.iteration += 1
            parameters = {name: v.d.copy() for name, v in nn.get_parameters(grad_only=False).items()}
            others = {f"{name} kept": v.d.copy() for name, v in self.kept.items()}
            yield self.iteration, {**parameters, **others, **self.seen}
            if self.scaler is not None and self.path and self.iteration == self.program.saved:
                self.save()

    def iterate(self) -> None:
        """One iteration."""
        if self.updater is not None:
            assert self.updater.update().updated
            return
        scaler = self.scaler
        self.solver.zero_grad()
        for _ in range(self.program.batches):
            self.feed()
            for loss in self.losses:
                if scaler is None:
                    loss.forward(clear_no_need_grad=self.program.clear)
                    loss.backward(clear_buffer=self.program.clear)
                else:
                    scaler.forward(loss, clear_no_need_grad=self.program.clear)
                    scaler.backward(loss, clear_buffer=self.program.clear)
        if scaler is None:
            self.gradients(self.solver)
            self.solver.update()
            return
        if self.program.clip:
            scaler.unscale_(self.solver)
        self.gradients(self.solver)
        assert scaler.step(self.solver)
        scaler.update()
