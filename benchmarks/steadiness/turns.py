# SPDX-License-Identifier: Apache-2.0
"""Two tasks on one trunk, of which each batch trains one, with losses of very different sizes."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
from common.digits import BatchFeeder, load
from scaling_study.experiment import Experiment
from scaling_study.several_losses import PAIRS
from scaling_study.solvers import adam
from scaling_study.table import paragraph, rows, weight_label

from .ways import REFERENCE, Tally, Trainee, train

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
_WAYS = ("default", "next", "GradScaler", "dynamic")


class TurnJob(NamedTuple):
    """One training."""

    net: str
    ratio: float
    solver: str
    way: str
    seed: int
    batches: int


def experiment(batches: Optional[int] = None) -> Experiment:
    """All ways of an order and a ratio after the other, the reference first.

    Args:
        batches: how many in each training; None: `BATCHES`.
    """
    jobs = [
        TurnJob(order, ratio, solver, way, 0, BATCHES if batches is None else batches)
        for solver in SOLVERS
        for order in ORDERS
        # Both at once have one learning rate: SGD would not train the small one at all.
        if solver == "Adam" or order != "small absent"
        for ratio in RATIOS
        for way in (REFERENCE, *_WAYS)
    ]
    return Experiment("steady_turns", jobs, work, markdown)


def work(job: TurnJob) -> Dict[str, Any]:
    """Train, and see how much either task has learned."""
    nn.seed(job.seed)
    start = time.perf_counter()
    turn_of = ORDERS[job.net]
    with nn.parameter_scope("", OrderedDict()):
        train_set, test = load()
        x, digit, odd = nn.Variable((_BATCH, 1, 8, 8)), nn.Variable((_BATCH, 1)), nn.Variable((_BATCH, 1))
        weights = {LARGE: nn.Variable(()), SMALL: nn.Variable(())}
        large, small = PAIRS["heads"](x)
        loss = weights[LARGE] * _cross_entropy(large, odd) + weights[SMALL] * _cross_entropy(small, digit)
        batches, solver = BatchFeeder(train_set, x, digit, job.seed), SOLVERS[job.solver]()
        rate, parameters = solver.learning_rate(), nn.get_parameters()
        solver.set_parameters(parameters)
        told = PAIRS["heads"](nn.Variable.from_numpy_array(test.x))
        sizes = {LARGE: 1.0, SMALL: job.ratio}
        zero = 0

        def feed() -> None:
            turn = turn_of(tally.fed, job.batches)
            for task, weight in weights.items():
                weight.d = sizes[task] if turn in (task, "both") else 0.0
            if job.solver == "SGD":
                solver.set_learning_rate(rate / sizes[turn])
            batches()
            odd.d = digit.d % 2

        def watch() -> None:
            nonlocal zero
            zero += not any(p.g.any() for p in parameters.values())

        tally = Tally(feed)
        warned = train(job.way, [Trainee(loss, solver, tally)], "float16", job.batches, watch)
        scores = _accuracies(told, test.t)
    return {
        **job._asdict(),
        "large": scores[0],
        "small": scores[1],
        "lost": len(tally.lost),
        "repeats": len(tally.overflows) - len(tally.lost),
        "zero": zero,
        "warnings": warned,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _cross_entropy(logits: nn.Variable, t: nn.Variable) -> nn.Variable:
    return F.mean(F.softmax_cross_entropy(logits, t))


def _accuracies(told: Tuple[nn.Variable, nn.Variable], t: Any) -> List[float]:
    found = []
    for logits, wanted in zip(told, (t % 2, t)):
        logits.forward(clear_buffer=True)
        found.append(float((logits.d.argmax(axis=1) == wanted[:, 0]).mean()))
    return found


def markdown(_picture: str, records: List[Dict[str, Any]]) -> str:
    """A row for each order and ratio, the ways beside each other."""
    text = (
        "Made by `python benchmarks/steady.py`. Two heads on one trunk in emulated float16: one tells whether"
        " a digit is odd, with a loss weight of 1, the other which it is, with the ratio for a weight. Each "
        "batch trains one of them, and the other's weight is 0: they take turns, all of the first half are "
        f"for the large one, or the small one is absent from {_ABSENT} batches and then trained beside the "
        "large one. SGD's learning rate is divided by the weight, and Adam's eps is 1e-30, so that neither "
        "cares how large a loss is. Each cell: accuracy of the large task and of the small one on 360 images;"
        " batches lost, run again (*rep.*), and those after which all gradients were *zero*. A mark (!) says "
        "that something was warned of."
    )
    head = ["", "solver", "ratio", REFERENCE, *_WAYS]
    known = {(r["net"], r["solver"], r["ratio"], r["way"]): r for r in records}
    body = [
        [order, solver, weight_label(ratio)]
        + [_shown(known.get((order, solver, ratio, way))) for way in (REFERENCE, *_WAYS)]
        for order, solver, ratio in dict.fromkeys((r["net"], r["solver"], r["ratio"]) for r in records)
    ]
    return "\n".join(["# Two tasks in turn\n", paragraph(text), rows(head, body)])


def _shown(record: Optional[Dict[str, Any]]) -> str:
    if record is None:
        return ""
    counts = [
        f", {record[name]} {word}"
        for name, word in (("lost", "lost"), ("repeats", "rep."), ("zero", "zero"))
        if record[name]
    ]
    return f"{record['large']:.3f} {record['small']:.3f}{''.join(counts)}{' !' if record['warnings'] else ''}"
