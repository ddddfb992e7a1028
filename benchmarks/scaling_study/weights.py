# SPDX-License-Identifier: Apache-2.0
"""Trainings with loss weights that change from batch to batch, compared with fp32."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
from common.digits import BatchFeeder, load
from numpy.typing import NDArray

from nnabla_adaloss import LossScaleWarning

from .experiment import Experiment, Line
from .methods import REFERENCE, STORAGES, Method, Trainee, adaptive, grad_scaler, plain, train
from .nets import adam
from .several_losses import BATCH, head, trunk
from .task import accuracy
from .text import paragraph, rows, weight_label

METHOD_TITLES = {
    "amax_history": "AdaptiveLossScalingUpdater, defaults",
    "next": 'AdaptiveLossScalingUpdater, on_overflow="next"',
    "grad_scaler": "GradScaler, defaults",
    "dynamic": 'AdaptiveLossScalingUpdater, global_scale="dynamic"',
}
SEEDS = 3
_TOLERANCE = 0.01
_COUNTS = ("repeats", "lost", "warnings")
_STORAGE = "float16"
_QUICK = ("turns_1e-6_large_first", "late_1e-9_from_1", "annealed", "sparse_examples")
_QUICK_ITERATIONS = 48

Targets = NDArray[np.int64]
Weights = Callable[[int], Sequence[float]]
"""Weight of each head's loss in a batch, by number from 0."""


class Head(NamedTuple):
    """Task of a head."""

    classes: int
    target: Callable[[Targets], Targets]


HEADS = {
    "large": Head(2, lambda digit: digit % 2),
    "small": Head(10, lambda digit: digit),
    "third": Head(2, lambda digit: (digit < 5).astype(np.int64)),
}
SOLVERS: Dict[str, Tuple[Callable[[float], Any], float]] = {"sgd": (S.Sgd, 0.3), "adam": (adam, 1e-3)}


class Program(NamedTuple):
    """Losses and the changes of their weights."""

    title: str
    weights: Weights
    iterations: int = 600
    solvers: Sequence[str] = tuple(SOLVERS)
    place: str = "loss"  # factor of: a head's loss, the losses of its examples, or its logits
    divided: bool = False  # SGD's learning rate is divided by the greatest weight of the batch
    clipped: bool = False  # the gradient of each parameter has a norm of 1 at most
    dynamic: bool = False  # trained with `global_scale="dynamic"` as well


def _in_turn(weights: Sequence[float], order: Sequence[int]) -> Weights:
    """Give one head a loss in each batch, in the repeated `order`."""

    def of(batch: int) -> Sequence[float]:
        turn = order[batch % len(order)]
        return [weight if index == turn else 0.0 for index, weight in enumerate(weights)]

    return of


def _late(weight: float, start: int) -> Weights:
    return lambda batch: (1.0, weight if batch >= start else 0.0)


def _curriculum(batch: int) -> Sequence[float]:
    step = min(batch // 100, 16)
    return [10.0 ** -min(step, 16 - step)] * 2


def _once_in(distance: int, rare: Sequence[float], other: Sequence[float]) -> Weights:
    return lambda batch: rare if batch % distance == distance - 1 else other


_ORDERS = {
    "large_first": ((0, 1), 600),
    "small_first": ((1, 0), 600),
    "large_in_5": ((0, 1, 1, 1, 1), 600),
    "large_in_150": ((0,) + (1,) * 149, 3000),
}


def _programs() -> Iterator[Tuple[str, Program]]:
    small = {weight_label(weight): weight for weight in (1e-6, 1e-9, 1e-12)}
    for name, (order, iterations) in _ORDERS.items():
        for label, weight in small.items():
            title = f"in turn, 1 : {label}, {name.replace('_', ' ')}"
            weights = _in_turn((1.0, weight), order)
            yield f"turns_{label}_{name}", Program(title, weights, iterations, divided=True)
    for start in (0, 1, 50):
        for label, weight in small.items():
            # SGD would need another learning rate for the small head.
            title = f"second loss of {label} from batch {start} on"
            yield f"late_{label}_from_{start}", Program(title, _late(weight, start), solvers=["adam"])
    three = _in_turn((1.0, 1e-5, 1e-10), range(3))
    yield "three", Program("three in turn, 1 : 1e-5 : 1e-10", three, divided=True)
    title = "both 1 to 1e-8 and back, by 10 every 100 batches"
    yield "curriculum", Program(title, _curriculum, 1600, ["sgd"], divided=True)
    title = "second loss times 0.9 in each batch"
    yield "annealed", Program(title, lambda batch: (1.0, 0.9**batch), 1200, dynamic=True)
    rewards = _once_in(30, (1.0, 1.0), (0.0, 0.0))
    yield "sparse_losses", Program("weight 1 once in 30 batches, else 0", rewards, 1500)
    title = "advantages of 1 once in 30 batches, else 0"
    yield "sparse_examples", Program(title, rewards, 1500, place="examples")
    gate = _once_in(60, (1.0, 1.0), (1.0, 0.0))
    yield "rare", Program("a branch that data opens once in 60 batches", gate, 1500, place="logits")
    spikes = _once_in(140, (2.0**12,) * 2, (1.0, 1.0))
    yield "spikes", Program("weight 4096 once in 140 batches, else 1; clipped", spikes, 1500, clipped=True)


PROGRAMS = dict(_programs())


class WeightsJob(NamedTuple):
    """Key of a training."""

    net: str
    solver: str
    method: str
    seed: int
    iterations: int


def experiment(quick: bool) -> Experiment:
    """Define the jobs: one seed after the other; of each program the reference first."""
    return Experiment(list(_jobs(quick)), work, table)


def _jobs(quick: bool) -> Iterator[WeightsJob]:
    for seed in range(1 if quick else SEEDS):
        for name in _QUICK if quick else PROGRAMS:
            program = PROGRAMS[name]
            iterations = _QUICK_ITERATIONS if quick else program.iterations
            for solver in program.solvers:
                for method in (REFERENCE, *METHOD_TITLES):
                    if method != "dynamic" or program.dynamic:
                        yield WeightsJob(name, solver, method, seed, iterations)


def work(job: WeightsJob) -> Line:
    """Train, and return the accuracy of each head and the counts of batches."""
    program, error = PROGRAMS[job.net], ""
    nn.seed(job.seed)
    with nn.parameter_scope("", OrderedDict()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainee, scores = _made(program, job)
        start = time.perf_counter()
        try:
            train(_method(job.method, program), [trainee], STORAGES[_STORAGE], job.iterations)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - start
        return {
            "scores": None if error else [score() for score in scores],
            "batches": trainee.fed,
            "repeats": trainee.repeats,
            "lost": trainee.lost,
            "warnings": sum(issubclass(one.category, LossScaleWarning) for one in caught),
            "seconds": round(seconds, 3),
            "error": error,
        }


def _made(program: Program, job: WeightsJob) -> Tuple[Trainee, Sequence[Callable[[], float]]]:
    """Build a loss that is ready to be trained, and a function for the accuracy of each head."""
    (examples, test), heads = load(), list(HEADS.items())[: len(program.weights(0))]
    x, digit = nn.Variable((BATCH, *examples.x.shape[1:])), nn.Variable((BATCH, 1))
    h, batches, loss = trunk(x), BatchFeeder(examples, x, digit, job.seed), 0.0
    shape = () if program.place == "loss" else (BATCH, 1)
    factors, targets = [nn.Variable(shape) for _ in heads], [nn.Variable((BATCH, 1)) for _ in heads]
    for (name, kind), factor, target in zip(heads, factors, targets):
        logits = head(h, kind.classes, name)
        each = F.softmax_cross_entropy(logits * factor if program.place == "logits" else logits, target)
        mean = F.mean(each * factor if program.place == "examples" else each)
        loss = loss + (mean * factor if program.place == "loss" else mean)
    scores = [accuracy(partial(_logits, name), test._replace(t=kind.target(test.t))) for name, kind in heads]
    make, rate = SOLVERS[job.solver]
    solver, divided = make(rate), program.divided and job.solver == "sgd"
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        batch = batches.count
        batches()
        weights = program.weights(batch)
        for (_, kind), weight, factor, target in zip(heads, weights, factors, targets):
            factor.d, target.d = weight, kind.target(digit.d)
        left = max(0.0, 1.0 - batch / job.iterations)
        solver.set_learning_rate(rate * left / (max(weights) if divided else 1.0))

    return Trainee(loss, solver, feed), scores


def _logits(name: str, x: nn.Variable) -> nn.Variable:
    return head(trunk(x), HEADS[name].classes, name)


def _method(name: str, program: Program) -> Method:
    """Make a way to train, with clipping if the program clips."""
    arguments: Dict[str, Any] = {"on_gradients": _clip} if program.clipped else {}
    made: Dict[str, Callable[[], Method]] = {
        REFERENCE: lambda: plain(**arguments),
        "amax_history": lambda: adaptive(**arguments),
        "next": lambda: adaptive(on_overflow="next", **arguments),
        "grad_scaler": lambda: grad_scaler(**arguments),
        "dynamic": lambda: adaptive(global_scale="dynamic", **arguments),
    }
    return made[name]()


def _clip(solver: Any) -> None:
    solver.clip_grad_by_norm(1.0)


class Key(NamedTuple):
    """Cell of the table."""

    net: str
    solver: str
    method: str


class Cell(NamedTuple):
    """Results of a cell's seeds."""

    passes: bool
    differences: Sequence[float]  # each head's accuracy minus that of fp32; empty if a training failed
    counts: Mapping[str, int]


_NOTE = (
    "Networks of three dense layers with a head for each loss, on digits: odd or even has the large loss, "
    "which digit the small one, and less than five or not the third. All is stored in float16, emulated; "
    "loss weights are inputs. A cell has the difference of each head's accuracy on 360 images to that of "
    f"fp32 with the same solver and seed, the mean of {SEEDS} seeds, ✓ where none is more than "
    f"{_TOLERANCE:g} lower. Then come repeats, lost batches and warnings, where there are any, the sum of "
    "the seeds. What a GradScaler repeats, it does not count. SGD's learning rate is 0.3, divided by the "
    "weight of the batch where losses are in turn and in the curriculum; Adam's is 0.001, and its eps 1e-30. "
    "Both fall to zero linearly."
)


def table(lines: List[Line]) -> str:
    """Write the number of passing cells, then a row for each program and solver."""
    found: Dict[Key, List[Line]] = {}
    for line in lines:
        found.setdefault(Key(line["net"], line["solver"], line["method"]), []).append(line)
    references = {
        key: {one["seed"]: one for one in of} for key, of in found.items() if key.method == REFERENCE
    }
    cells = {key: _cell(of, references.get(key._replace(method=REFERENCE), {})) for key, of in found.items()}
    unfinished = sum(len(found[key]) < SEEDS for key in cells if key.method != REFERENCE)
    body = []
    for key, known in references.items():
        scores = [" ".join(f"{score:.3f}" for score in one["scores"] or ()) for one in known.values()][:1]
        others = [cells.get(key._replace(method=method)) for method in METHOD_TITLES]
        body.append([f"{PROGRAMS[key.net].title}; {key.solver}", *scores, *map(_mark, others)])
    errors = [
        f"- {', '.join(key)}: {error}\n"
        for key, of in found.items()
        for error in sorted({line["error"] for line in of} - {""})
    ]
    parts = [
        "# Weights of losses that change from batch to batch\n",
        "Made by `python benchmarks/study.py weights`.\n",
        paragraph(_NOTE),
        f"{len(lines)} trainings are there; {unfinished} cells have fewer seeds.\n",
        _summary(cells),
        "## Programs\n",
        rows(["", f"{REFERENCE}, seed 0", *METHOD_TITLES], body),
    ]
    return "\n".join([*parts, *(["## Trainings that ended with an error\n", *errors] if errors else [])])


def _summary(cells: Mapping[Key, Cell]) -> str:
    body = []
    for method, title in METHOD_TITLES.items():
        mine = [cell for key, cell in cells.items() if key.method == method]
        sums = [str(sum(cell.counts[field] for cell in mine)) for field in _COUNTS]
        body.append([method, title, f"{sum(cell.passes for cell in mine)} of {len(mine)}", *sums])
    return rows(["", "way", "as good as fp32", "repeated", "lost", "warnings"], body)


def _cell(lines: Sequence[Line], references: Mapping[int, Line]) -> Cell:
    """Compare the results of a cell's seeds with those of fp32."""
    wanted = {seed: one["scores"] for seed, one in references.items() if one["scores"]}
    each = [
        np.subtract(line["scores"], wanted[line["seed"]])
        for line in lines
        if line["scores"] and line["seed"] in wanted
    ]
    differences = (np.mean(each, axis=0).round(6) + 0.0).tolist() if len(each) == len(lines) else []
    passes = bool(differences) and min(differences) >= -_TOLERANCE
    return Cell(passes, differences, {field: sum(line[field] for line in lines) for field in _COUNTS})


def _mark(cell: Optional[Cell]) -> str:
    if cell is None:
        return ""
    differences = " ".join(f"{difference:+.3f}" for difference in cell.differences) or "error"
    told = [f"{name} {number}" for name, number in cell.counts.items() if number]
    return ", ".join([f"{'✓' if cell.passes else '✗'} {differences}", *told])
