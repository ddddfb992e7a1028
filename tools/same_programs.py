# SPDX-License-Identifier: Apache-2.0
"""Short trainings of small networks in which each pair of options occurs, and hashes of their results.

`python -m tools.same` runs this script with the given checkout. It uses only public names that will stay, so
that checkouts of other versions can be compared.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from dataclasses import asdict
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from nnabla.function import PythonFunction

import nnabla_adaloss as ada

PARTS = "results", "scales", "counters", "state", "parameters"
ITERATIONS = 12
FIELDS = "updated", "scale", "retries", "reason", "overflow_layers", "nonfinite_layers", "cause", "component"
COUNTS = "iteration", "steps", "skipped_steps", "total_updates", "skipped_updates", "scale"
FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")
HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")

Fill = Callable[[np.random.RandomState, int, Sequence[int]], Any]


class Batch:
    """Inputs of a network, and their values, which the number of the batch determines."""

    def __init__(self, size: int, number: int) -> None:
        self.size, self.number = size, number
        self._inputs: List[Tuple[nn.Variable, Fill]] = []
        self._data: List[nn.Variable] = []

    def data(self, *shape: int) -> nn.Variable:
        """Normally distributed numbers."""
        self._data.append(self._add((self.size, *shape), lambda rng, _, shape: rng.standard_normal(shape)))
        return self._data[-1]

    def labels(self, classes: int) -> nn.Variable:
        """Numbers of classes."""
        return self._add((self.size, 1), lambda rng, _, shape: rng.randint(0, classes, shape))

    def weight(self, of: Callable[[int], float]) -> nn.Variable:
        """A loss weight that depends on the batch."""
        return self._add((), lambda rng, number, shape: of(number))

    def fill(self, number: int, factor: float, planted: float) -> None:
        """Fill in batch `number`, data times a factor, one element replaced unless `planted` is 0."""
        rng = np.random.RandomState(number)
        for v, fill in self._inputs:
            v.d = fill(rng, number, v.shape)
        v = self._data[0]
        v.d *= factor
        if planted:
            v.d[(0,) * v.ndim] = planted

    def _add(self, shape: Sequence[int], fill: Fill) -> nn.Variable:
        self._inputs.append((nn.Variable(shape), fill))
        return self._inputs[-1][0]


def _error(b: Batch, h: nn.Variable, name: str = "out") -> nn.Variable:
    return F.mean(F.squared_error(PF.affine(h, 2, name=name), b.data(2)))


def _classes(b: Batch, h: nn.Variable) -> nn.Variable:
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="out"), b.labels(3)))


def _hidden(b: Batch) -> nn.Variable:
    return F.tanh(PF.affine(b.data(5), 6, name="hidden"))


def mlp(b: Batch) -> nn.Variable:
    return _classes(b, F.relu(PF.affine(_hidden(b), 6, name="second")))


def conv(b: Batch) -> nn.Variable:
    h = F.relu(PF.batch_normalization(PF.convolution(b.data(2, 5, 5), 3, (3, 3), name="conv"), name="bn"))
    return _classes(b, F.average_pooling(h, (2, 2)))


def residual(b: Batch) -> nn.Variable:
    h = PF.affine(b.data(5), 6, name="first")
    for index in range(3):
        h = h + F.swish(PF.affine(h, 6, name=f"block{index}"))
    return _error(b, h)


def two_losses(b: Batch) -> nn.Variable:
    h = _hidden(b)
    return _error(b, h) + 1e-6 * _error(b, F.sigmoid(PF.affine(h, 4, name="small/hidden")), "small")


def lstm(b: Batch) -> nn.Variable:
    x, h, c = b.data(3, 2), nn.Variable((b.size, 4)), nn.Variable((b.size, 4))
    h.data.zero()
    c.data.zero()
    for step in F.split(x, axis=1):
        h, c = PF.lstm_cell(step, h, c, 4, name="cell")
    return _error(b, h)


def rnn(b: Batch) -> nn.Variable:
    h = _hidden(b)
    for _ in range(4):
        h = F.tanh(PF.affine(h, 6, name="recurrent"))
    return _error(b, h)


def attention(b: Batch) -> nn.Variable:
    x = b.data(3, 4)
    q, k, v = (PF.affine(x, 4, base_axis=2, name=name) for name in "qkv")
    h = F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True) * 0.5), v)
    return _classes(b, PF.layer_normalization(h + x, batch_axis=(0, 1), name="norm"))


def deconv(b: Batch) -> nn.Variable:
    h = F.elu(PF.depthwise_convolution(b.data(2, 3, 3), (2, 2), name="depthwise"))
    return F.mean(F.squared_error(PF.deconvolution(h, 2, (3, 3), name="out"), b.data(2, 4, 4)))


def dropout(b: Batch) -> nn.Variable:
    return _classes(b, PF.affine(F.dropout(_hidden(b), 0.3, seed=7), 6, name="second"))


def prelu(b: Batch) -> nn.Variable:
    h = PF.prelu(PF.convolution(b.data(2, 4, 4), 3, (3, 3), with_bias=False, name="conv"), name="prelu")
    return _error(b, F.max_pooling(h, (2, 2)))


def embed(b: Batch) -> nn.Variable:
    h = F.reshape(PF.embed(b.labels(4), 4, 5, name="embed"), (b.size, 5))
    return _error(b, F.tanh(PF.affine(h, 6, name="hidden")))


def concat(b: Batch) -> nn.Variable:
    first, second = F.split(F.reshape(PF.affine(b.data(5), 8, name="first"), (b.size, 2, 4)), axis=1)
    return _classes(b, F.concatenate(F.relu(first), PF.affine(second, 3, name="second"), axis=1))


def tied(b: Batch) -> nn.Variable:
    w = PF.affine(b.data(5), 5, name="out"), nn.get_parameters()["out/affine/W"]
    return F.mean(F.squared_error(F.affine(F.sigmoid(w[0]), F.transpose(w[1], (1, 0))), b.data(5)))


def recompute(b: Batch) -> nn.Variable:
    h = _hidden(b)
    with nn.recompute():
        h = F.sigmoid(PF.affine(h, 6, name="again"))
    return _error(b, h)


class Cube(PythonFunction):  # type: ignore[misc]  # nnabla has no type hints
    """x ** 3 as a Python function."""

    @property
    def name(self) -> str:
        return "Cube"

    def min_outputs(self) -> int:
        return 1

    def grad_depends_output_data(self, i: int, o: int) -> bool:
        return False

    def grad_depends_input_data(self, i: int, j: int) -> bool:
        return True

    def setup_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].reset_shape(inputs[0].shape, True)

    def forward_impl(self, inputs: Any, outputs: Any) -> None:
        outputs[0].d = inputs[0].d ** 3

    def backward_impl(self, inputs: Any, outputs: Any, propagate: Any, accumulate: Any) -> None:
        if propagate[0]:
            found = outputs[0].g * 3 * inputs[0].d ** 2
            inputs[0].g = inputs[0].g + found if accumulate[0] else found


def python(b: Batch) -> nn.Variable:
    return _error(b, Cube()(_hidden(b)))


def absent(b: Batch) -> nn.Variable:
    h = _hidden(b)
    if b.number % 3 == 1:  # only where each batch has a graph of its own
        return _classes(b, h)
    rare = _error(b, h, "rare") * b.weight(lambda number: float(number % 3 == 0))
    return _classes(b, h) + rare


def annealed(b: Batch) -> nn.Variable:
    h = _hidden(b)
    return (_error(b, h) + F.mean(PF.affine(h, 3, name="b") ** 2)) * b.weight(lambda n: 1e-3 * 0.5**n)


def scalar(b: Batch) -> nn.Variable:
    return F.log(F.exp(0.1 * _error(b, F.sigmoid(_hidden(b)))) + 1.0) * 1e-4


NETWORKS = {
    make.__name__: make
    for make in (
        *(mlp, conv, residual, two_losses, lstm, rnn, attention, deconv, dropout, prelu, embed, concat, tied),
        *(recompute, python, absent, annealed, scalar),
    )
}
# "half" is nnabla's half-precision context.
STORAGES: Dict[str, Any] = {
    **{name: name for name in ("float16", "bfloat16", "fp8_hybrid", "float8_e5m2", "float8_e4m3")},
    "exception": {"*out*": "bfloat16", "*": "float16"},
    "random": ada.Precision("float16", "float8_e5m2", stochastic_seed=3),
    "none": None,
    "half": None,
}
# Arguments of AdaLossConfig.
METHODS: Dict[str, Dict[str, Any]] = {
    "amax": {},
    "amax_delay0": {"delay": 0},
    "amax_every1": {"measure_every": 1, "init_scale": 4.0},
    "amax_every3": {"measure_every": 2, "update_per_n_iteration": 3, "power_of_two": False},
    "amax_exclude": {"exclude": ["*out*"]},
    "amax_range": {"u_max": 2.0**12, "u_min": 2.0**-12},
    "approx": {"loss_scale_method": "approx_range"},
    "approx_delay0": {"loss_scale_method": "approx_range", "delay": 0, "accum_upper_bound": 16.0},
    "approx_free": {"loss_scale_method": "approx_range", "use_bound": False, "n_uf_threshold": 0.1},
    "abs": {"loss_scale_method": "abs_range", "delay": 1, "scale_upper_bound": 4.0},
    "abs_delay0": {"loss_scale_method": "abs_range", "delay": 0},
    "fixed": {"loss_scale_method": "fixed", "fixed_loss_scale": 2.0},
    "fixed_one": {"loss_scale_method": "fixed"},
    "element": {"loss_scale_method": "element_wise_range", "max_rescue_ratio": 0.9},
    "element_free": {"loss_scale_method": "element_wise_range", "use_bound": False, "power_of_two": False},
}
LOOPS = (
    *("history", "next", "dynamic", "dynamic_next", "policy", "rebuilt", "reshaped", "rebuilt_next"),
    *("engine", "grad_scaler", "grad_two", "grad_bare", "grad_rebuilt", "fixed", "loss_scaler", "baseline"),
)
# `overflow`: an element of 1e6 in some batches; `spike`: inputs 200 times as large.
EXTRAS = (
    *("plain", "accum", "average", "decay", "clip", "hooks", "keep", "resume", "overflow", "spike", "nan"),
    *("accum_overflow", "resume_spike", "once", "monitors"),
)
SOLVERS: Dict[str, Callable[[], Any]] = {
    "sgd": lambda: S.Sgd(0.1),
    "momentum": lambda: S.Momentum(0.05),
    "adam": lambda: S.Adam(0.01, eps=1e-20),
}


class Program(NamedTuple):
    """Training, by the name of each option."""

    network: str
    storage: str
    method: str
    loop: str
    extra: str
    solver: str

    def __str__(self) -> str:
        return "/".join(self)


def programs(count: int = 740) -> Dict[str, Program]:
    """Choose programs, by name: each has the most new pairs and triples of random candidates."""
    rng, seen = random.Random(0), set()  # type: random.Random, Set[Any]
    options = (tuple(NETWORKS), tuple(STORAGES), tuple(METHODS), LOOPS, EXTRAS, tuple(SOLVERS))
    found: Dict[str, Program] = {}

    def drawn() -> Program:
        one = Program(*map(rng.choice, options))
        # A third, and those without a configuration, have the default method.
        default = not len(found) % 3 or one.loop in ("fixed", "loss_scaler", "baseline")
        return one._replace(method="amax") if default else one

    def parts(one: Program, size: int) -> List[Any]:
        return [part for part in itertools.combinations(enumerate(one), size) if part not in seen]

    while len(found) < count:
        best = max((drawn() for _ in range(60)), key=lambda one: (len(parts(one, 2)), len(parts(one, 3))))
        seen.update(parts(best, 2), parts(best, 3))
        found[str(best)] = best
    return found


# Arguments of AdaptiveLossScalingUpdater, by loop and by extra.
UPDATERS: Dict[str, Callable[[], Dict[str, Any]]] = {
    "history": dict,
    "rebuilt": dict,
    "reshaped": dict,
    "next": lambda: {"on_overflow": "next"},
    "rebuilt_next": lambda: {"on_overflow": "next", "scale": 2.0**20},
    "dynamic": lambda: {"global_scale": "dynamic", "N": 2, "scale": 2.0**14},
    "dynamic_next": lambda: {"global_scale": "dynamic", "N": 2, "on_overflow": "next", "hysteresis": 2},
    "policy": lambda: {"global_scale": ada.HistoryPolicy(margin=2.0, window=4, start_scale=2.0**16)},
}
SKIP = {"on_nonfinite_loss": "skip", "on_nonfinite_forward": "skip", "on_scale_floor": "skip"}


class Events:
    """Monitor that keeps the events without their texts."""

    def __init__(self) -> None:
        self.received: List[Any] = []

    def _keep(self, event: Any) -> None:
        fields = {name: value for name, value in event._asdict().items() if name != "detail"}
        self.received.append((type(event).__name__, fields))

    on_overflowed = on_batch_repeated = on_batch_thrown_away = on_scale_changed = on_update_ended = _keep


class Training:
    """Running program: `step` is an iteration, `parts` are its results."""

    def __init__(self, program: Program) -> None:
        nn.clear_parameters()
        nn.seed(0)
        nn.random.prng = np.random.RandomState(0)
        self.loop, self.extras, self.program = program.loop, program.extra.split("_"), program
        self.storage: Any = STORAGES[program.storage]
        self.fed, self.results, self.scales, self.events = 0, [], [], Events()
        self.build()
        # "grad_two" has another network for the second solver.
        groups: Dict[bool, Dict[str, nn.Variable]] = {False: {}, True: {}}
        for name, v in nn.get_parameters().items():
            groups[name.startswith("other/")][name] = v
        self.solvers = [SOLVERS[program.solver]() for group in groups.values() if group]
        for solver, group in zip(self.solvers, groups.values()):
            solver.set_parameters(group)
        self.trainer = self.make()

    def build(self) -> None:
        """Build the graph of the next batch."""
        self.batch = Batch(3 + self.fed % 3 if self.loop == "reshaped" else 4, self.fed)
        self.losses = [NETWORKS[self.program.network](self.batch)]
        if self.loop == "grad_two":
            with nn.parameter_scope("other"):
                self.losses.append(mlp(self.batch) * 1e-5)

    def make(self) -> Any:
        """Make the updater, scaler or engine."""
        loss, solver = self.losses[0], self.solvers[0]
        config = ada.AdaLossConfig(**METHODS[self.program.method])
        options: Dict[str, Any] = {}
        if self.loop.startswith("grad"):
            return ada.GradScaler(*self.solvers, config=config, storage=self.storage)
        if self.loop == "loss_scaler":
            return ada.LossScaler(initial_scale=2.0**16, growth_interval=2)
        if self.loop in ("engine", "baseline"):
            loss = self.stored(loss)
        if self.loop == "engine":
            return ada.AdaptiveLossScaling(loss, config)
        if "accum" in self.extras:
            options["accum_grad"] = 2
        if "decay" in self.extras:
            options["weight_decay"] = 0.01
        if self.loop == "baseline":
            return ada.DynamicLossScalingUpdater(solver, loss, self.feed, 2.0**14, N=2, **options)
        if "monitors" in self.extras:
            options["monitors"] = [self.events]
        if self.loop == "fixed":
            return ada.FixedLossScalingUpdater(
                solver, loss, self.feed, 2.0**10, storage=self.storage, **options
            )
        options.update(UPDATERS[self.loop](), config=config, storage=self.storage)
        if {"overflow", "nan"} & set(self.extras):
            options.update(SKIP)
        if "average" in self.extras:
            options.update(average=True, accum_grad=2)
        if "clip" in self.extras:
            options["on_gradients"] = lambda solver: solver.clip_grad_by_norm(0.01)
        if "keep" in self.extras:
            options["clear_buffer"] = False
        if "once" in self.extras:
            options["max_retries"] = 0
        if "hooks" in self.extras:
            options["function_post_hook"] = (None, lambda f: self.events.received.append(f.info.type_name))
        return ada.AdaptiveLossScalingUpdater(solver, loss, self.feed, **options)

    def stored(self, loss: nn.Variable) -> Any:
        """Put the loss into its storage."""
        return loss if self.storage is None else ada.FormatEmulation(loss, self.storage)

    def feed(self) -> None:
        """Fill in the next batch, in a new graph where there is one for each."""
        if self.loop in ("rebuilt", "reshaped", "rebuilt_next", "grad_rebuilt") and self.fed:
            self.build()
            if not self.loop.startswith("grad"):
                self.trainer.loss = self.losses[0]
        bad = self.fed % 5 == 3
        planted = 1e6 if "overflow" in self.extras else np.nan if "nan" in self.extras else 0.0
        self.batch.fill(self.fed, 200.0 if bad and "spike" in self.extras else 1.0, planted if bad else 0.0)
        self.fed += 1

    def step(self) -> None:
        """Train in one iteration."""
        by_hand = self.loop.startswith("grad") or not hasattr(self.trainer, "update")
        try:
            found = self.step_by_hand() if by_hand else self.trainer.update()
            # The result of nnabla's own updater is None.
            result = [getattr(found, name, self.trainer.scale) for name in FIELDS] if not by_hand else found
        except ada.LossScaleError as error:
            result = str(error)[:60]
        self.results.append((result, [loss.d.tolist() for loss in self.losses]))
        for engine in self.engines():
            scales = engine.layer_scales, engine.accumulated_scales
            self.scales.append((engine.loss_scale, [sorted(found.items()) for found in scales]))
        if "resume" in self.extras and len(self.results) == ITERATIONS // 2:
            self.resume()

    def step_by_hand(self) -> Any:
        """Train in one iteration of a hand-written loop."""
        trainer, solvers = self.trainer, self.solvers
        for solver in solvers:
            solver.zero_grad()
        for _ in range(1 + ("accum" in self.extras)):
            self.feed()
            for loss in self.losses:
                self.run(loss)
        finite = [not solver.check_inf_or_nan_grad() for solver in solvers]
        if self.loop == "loss_scaler":
            finite = [
                trainer.unscale_gradients_and_check([v.grad for v in solvers[0].get_parameters().values()])
            ]
        for solver in solvers:
            if "clip" in self.extras:
                if self.loop.startswith("grad"):
                    trainer.unscale_(solver)
                solver.clip_grad_by_norm(0.01)
            if "decay" in self.extras:
                solver.weight_decay(0.01)
        if self.loop.startswith("grad"):
            stepped = [trainer.step(solver) for solver in solvers]
            trainer.update()
            return stepped, "" if all(stepped) else trainer.cause
        if all(finite):
            solvers[0].update()
        if self.loop == "engine" and (all(finite) or not trainer.after_overflow()):
            trainer.after_update() if all(finite) else trainer.drop_iteration()
        return finite

    def run(self, loss: nn.Variable) -> None:
        """Run forward and backward."""
        trainer = self.trainer
        if self.loop.startswith("grad"):
            if self.loop == "grad_bare" and self.storage is None:
                trainer.scaling(loss)  # may replace functions at the loss
                loss.forward(clear_no_need_grad=True)
            else:
                trainer.forward(loss, clear_no_need_grad=True)
            trainer.backward(loss, clear_buffer=True)
        elif self.loop == "engine":
            trainer.forward(clear_no_need_grad=True)
            trainer.backward(8.0, clear_buffer=True)
        else:
            stored = self.stored(loss)
            stored.forward(clear_no_need_grad=True)
            stored.backward(trainer.scale, clear_buffer=True)

    def resume(self) -> None:
        """Continue with a new updater that has loaded the old one's state."""
        if hasattr(self.trainer, "state_dict"):
            state = json.loads(json.dumps(self.trainer.state_dict()))
            self.trainer = self.make()
            self.trainer.load_state_dict(state)

    def engines(self) -> List[Any]:
        """Engines of the last batch, whose scales are recorded."""
        if self.loop.startswith("grad"):
            return [self.trainer.scaling(loss) for loss in self.losses]
        found = self.trainer if self.loop == "engine" else getattr(self.trainer, "scaling", None)
        return [found] if hasattr(found, "layer_scales") else []

    def parts(self) -> List[Any]:
        """Hashed values, in the order of `PARTS`."""
        trainer = self.trainer
        counters = [getattr(trainer, name, None) for name in COUNTS]
        counters += sorted(asdict(trainer.counters).items()) if hasattr(trainer, "counters") else []
        state = trainer.state_dict() if hasattr(trainer, "state_dict") else {}
        arrays = [(name, v.d.tobytes()) for name, v in sorted(nn.get_parameters(grad_only=False).items())]
        for solver in self.solvers:
            for name, own in sorted(solver.get_states().items()):
                arrays += [(name, own.t), *((key, v.d.tobytes()) for key, v in sorted(own.pstate.items()))]
        return [
            (self.results, self.events.received),
            self.scales,
            counters,
            sorted(map(repr, numbers(state))),
            arrays,
        ]


def numbers(state: Any) -> Iterator[float]:
    """Yield the numbers of a saved state that determine the next steps, whatever their keys.

    Settings and versions are left out, and 0 and 1 as well: flags and counts come and go.
    """
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key not in ("version", "schema", "settings", "chosen", "parameters"):
                yield from numbers(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from numbers(value)
    elif isinstance(state, (int, float)) and state not in (0, 1):
        yield float(state)


def hashes(program: Program) -> str:
    """Train, and return a hash of each part, or the exception that the program raises."""
    context = HALF if program.storage == "half" else FLOAT
    try:
        with nn.context_scope(context):
            training = Training(program)
            for _ in range(ITERATIONS if context is FLOAT else ITERATIONS // 2):
                training.step()
            parts = training.parts()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]!r}"
    return " ".join(hashlib.blake2b(repr(part).encode(), digest_size=6).hexdigest() for part in parts)


def answer(request: Dict[str, Any]) -> Dict[str, Any]:
    """Run the program that a request names."""
    return {"hashes": hashes(PROGRAMS[request["program"]])}


PROGRAMS = programs()

if __name__ == "__main__":
    from checkouts import serve  # beside this script: the checkout may have no such file

    serve(answer)
