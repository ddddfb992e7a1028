# SPDX-License-Identifier: Apache-2.0
"""Two tasks on one trunk, of which each batch trains one, with losses of very different sizes."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import nnabla as nn
import nnabla.solvers as S
from common.digits import BatchFeeder, load

from .experiment import Experiment, Line
from .methods import METHODS, REFERENCE, Trainee, train
from .nets import adam
from .several_losses import PAIRS
from .task import cross_entropy
from .text import paragraph, rows, weight_label

BATCHES = 600
_ABSENT = 50
_BATCH = 64

LARGE, SMALL = "large", "small"

Turns = Callable[[int, int], str]
"""Which task a batch trains: of its number, and of how many."""

ORDERS: Dict[str, Turns] = {
    "large first": lambda batch, of: LARGE if batch % 2 else SMALL,
    "small first": lambda batch, of: SMALL if batch % 2 else LARGE,
    "half of it large": lambda batch, of: LARGE if batch <= of // 2 or batch % 2 else SMALL,
    "small absent": lambda batch, of: LARGE if batch <= _ABSENT else "both",
}
RATIOS = (1e-6, 1e-8, 1e-10, 1e-12)

SOLVERS: Dict[str, Callable[[], Any]] = {
    "Adam": lambda: adam(3e-3),
    # Its learning rate is divided by the weight, so that fp32 takes the same steps with any.
    "SGD": lambda: S.Sgd(0.2),
}
_METHODS = ("amax_history", "next", "GradScaler", "dynamic_65536")


class TurnJob(NamedTuple):
    """One training."""

    net: str
    ratio: float
    solver: str
    method: str
    seed: int
    batches: int


def experiment(quick: bool) -> Experiment:
    """All ways of an order and a ratio after each other, the reference first."""
    jobs = [
        TurnJob(order, ratio, solver, method, 0, 100 if quick else BATCHES)
        for solver in SOLVERS
        for order in ORDERS
        # Both at once have one learning rate: SGD would not train the small one at all.
        if solver == "Adam" or order != "small absent"
        for ratio in RATIOS
        for method in (REFERENCE, *_METHODS)
    ]
    return Experiment(jobs, work, table)


def work(job: TurnJob) -> Line:
    """Train, and see how much either task has learned."""
    nn.seed(job.seed)
    start = time.perf_counter()
    turn_of = ORDERS[job.net]
    with nn.parameter_scope("", OrderedDict()):
        train_set, test = load()
        x, digit, odd = nn.Variable((_BATCH, 1, 8, 8)), nn.Variable((_BATCH, 1)), nn.Variable((_BATCH, 1))
        weights = {LARGE: nn.Variable(()), SMALL: nn.Variable(())}
        large, small = PAIRS["heads"](x)
        loss = weights[LARGE] * cross_entropy(large, odd) + weights[SMALL] * cross_entropy(small, digit)
        batches, solver = BatchFeeder(train_set, x, digit, job.seed), SOLVERS[job.solver]()
        rate, parameters = solver.learning_rate(), nn.get_parameters()
        solver.set_parameters(parameters)
        told = PAIRS["heads"](nn.Variable.from_numpy_array(test.x))
        sizes = {LARGE: 1.0, SMALL: job.ratio}
        zero = 0

        def feed() -> None:
            turn = turn_of(trainee.fed, job.batches)
            for task, weight in weights.items():
                weight.d = sizes[task] if turn in (task, "both") else 0.0
            if job.solver == "SGD":
                solver.set_learning_rate(rate / sizes[turn])
            batches()
            odd.d = digit.d % 2

        def watch(*_: Any) -> None:
            nonlocal zero
            zero += not any(p.g.any() for p in parameters.values())

        trainee = Trainee(loss, solver, feed)
        warned = train(METHODS[job.method], [trainee], "float16", job.batches, after=watch)
        scores = _accuracies(told, test.t)
    return {
        "large": scores[0],
        "small": scores[1],
        "lost": len(trainee.lost),
        "repeats": len(trainee.overflows) - len(trainee.lost),
        "zero": zero,
        "warnings": warned,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _accuracies(told: Tuple[nn.Variable, nn.Variable], t: Any) -> List[float]:
    found = []
    for logits, wanted in zip(told, (t % 2, t)):
        logits.forward(clear_buffer=True)
        found.append(float((logits.d.argmax(axis=1) == wanted[:, 0]).mean()))
    return found


def table(lines: List[Line]) -> str:
    """A row for each order and ratio, the ways beside each other."""
    text = (
        "Made by `python benchmarks/study.py turns`. Two heads on one trunk in emulated float16: one tells "
        "whether a digit is odd, with a loss weight of 1, the other which it is, with the ratio for a weight."
        " Each batch trains one of them, and the other's weight is 0: they take turns, all of the first half "
        f"are for the large one, or the small one is absent from {_ABSENT} batches and then trained beside "
        "the large one. SGD's learning rate is divided by the weight, and Adam's eps is 1e-30, so that "
        "neither cares how large a loss is. Each cell: accuracy of the large task and of the small one on "
        "360 images; batches lost, run again (*rep.*), and those after which all gradients were *zero*. A "
        "mark (!) says that something was warned of."
    )
    head = ["", "solver", "ratio", REFERENCE, *_METHODS]
    known = {(r["net"], r["solver"], r["ratio"], r["method"]): r for r in lines}
    body = [
        [order, solver, weight_label(ratio)]
        + [_shown(known.get((order, solver, ratio, method))) for method in (REFERENCE, *_METHODS)]
        for order, solver, ratio in dict.fromkeys((r["net"], r["solver"], r["ratio"]) for r in lines)
    ]
    return "\n".join(["# Two tasks in turn\n", paragraph(text), rows(head, body)])


def _shown(record: Optional[Line]) -> str:
    if record is None:
        return ""
    counts = [
        f", {record[name]} {word}"
        for name, word in (("lost", "lost"), ("repeats", "rep."), ("zero", "zero"))
        if record[name]
    ]
    return f"{record['large']:.3f} {record['small']:.3f}{''.join(counts)}{' !' if record['warnings'] else ''}"
