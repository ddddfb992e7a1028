# SPDX-License-Identifier: Apache-2.0
"""A loss that is suddenly larger, and stays so: how many steps that costs, in networks of 4 to 64 layers."""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import nnabla.solvers as S

from .classifiers import classifier
from .experiment import Experiment, Line
from .methods import METHODS, REFERENCE, Trainee, longest_row, train
from .nets import QUIET
from .task import Task
from .text import paragraph, rows

QUIET_BATCHES = 100
"""Batches before the jump."""

AFTER = 300
"""Batches from the jump on."""

_WIDTH = 32
_LEARNING_RATE = 0.05


def _jump(factor: float, batch: int) -> float:
    return 1.0 if batch <= QUIET_BATCHES else factor


def _alternating(batch: int) -> float:
    return 1.0 if batch <= QUIET_BATCHES else 1e6 if batch % 2 else 1e-6


WEIGHTS: Dict[str, Callable[[int], float]] = {
    "2^10, for good": partial(_jump, 2.0**10),
    "2^20, for good": partial(_jump, 2.0**20),
    "1e6 and 1e-6 in turn": _alternating,
}
"""What the loss is multiplied by, by number of the batch."""

_METHODS = ("amax_history", "skip", "GradScaler", "halving")


class JumpJob(NamedTuple):
    """One training."""

    net: str
    weights: str
    method: str
    seed: int
    after: int


def mlp(layers: int, x: nn.Variable, *, training: bool) -> nn.Variable:
    """Tanh layers that begin as rotations, so that deep ones learn as well as others (Saxe et al. 2014)."""
    h = F.reshape(x, (x.shape[0], -1))
    for index in range(layers):
        h = F.tanh(PF.affine(h, _WIDTH, w_init=I.OrthogonalInitializer(), name=f"layer{index}"))
    return PF.affine(h, 10, name="out")


NETS: Dict[str, Callable[[int], Task]] = {
    **{f"mlp{n}": partial(classifier, partial(mlp, n), 32) for n in (4, 16, 32, 64)},
    # In these the largest gradients are not those that layers read.
    **{name: QUIET[name].build for name in ("gcn", "transformer")},
}


def experiment(quick: bool) -> Experiment:
    """All ways of a jump after each other, the reference first."""
    jobs = [
        JumpJob(net, weights, method, 0, 60 if quick else AFTER)
        for weights in WEIGHTS
        for net in NETS
        for method in (REFERENCE, *_METHODS)
    ]
    return Experiment(jobs, work, table)


def work(job: JumpJob) -> Line:
    """Train, and count what the jump has cost."""
    nn.seed(job.seed)
    start = time.perf_counter()
    weight_of = WEIGHTS[job.weights]
    with nn.parameter_scope("", OrderedDict()):
        task = NETS[job.net](job.seed)
        (player,) = task.players
        weight, solver = nn.Variable(()), S.Sgd(_LEARNING_RATE)
        solver.set_parameters(player.parameters)

        def feed() -> None:
            # Steps stay what they are: only the storage has to do with the weight.
            weight.d = weight_of(trainee.fed)
            solver.set_learning_rate(_LEARNING_RATE / weight_of(trainee.fed))
            player.feed()

        trainee = Trainee(player.loss * weight, solver, feed)
        warned = train(METHODS[job.method], [trainee], "float16", QUIET_BATCHES + job.after)
        score = task.score()
    lost = [batch for batch in trainee.lost if batch > QUIET_BATCHES]
    overflows = [overflow.batch for overflow in trainee.overflows if overflow.batch > QUIET_BATCHES]
    return {
        "lost": len(lost),
        "in_a_row": longest_row(lost),
        "repeats": len(overflows) - len(lost),
        "last_overflow": max(overflows, default=QUIET_BATCHES) - QUIET_BATCHES,
        "score": score,
        "warnings": warned,
        "seconds": round(time.perf_counter() - start, 2),
    }


def table(lines: List[Line]) -> str:
    """A row for each network and jump, the ways beside each other."""
    text = (
        f"Made by `python benchmarks/study.py jumps`. Tanh MLPs of width {_WIDTH} and two networks of the "
        f"quiet trainings in emulated float16: {QUIET_BATCHES} quiet batches, then the loss is "
        "multiplied, and the "
        "learning rate divided likewise. Lost batches from the jump on, of how many; in brackets the longest "
        "row of them; *rep.*: batches run again. *halving*: nnabla's updater, whose scale is the largest "
        "that did not overflow before. A mark (!) says that something was warned of. Scores: fp32, and the "
        "ways in their order; of MLPs and the graph network the accuracy on 360 images."
    )
    head = ["", "network", *_METHODS, "score: fp32", "the ways"]
    known = {(r["weights"], r["net"], r["method"]): r for r in lines}
    body = []
    for weights, net in dict.fromkeys((r["weights"], r["net"]) for r in lines):
        mine = [known.get((weights, net, method)) for method in _METHODS]
        fp32 = known.get((weights, net, REFERENCE))
        scores = [f"{one['score']:.3f}" for one in mine if one is not None]
        body.append(
            [weights, net, *map(_shown, mine), f"{fp32['score']:.3f}" if fp32 else "", " ".join(scores)]
        )
    return "\n".join(["# A loss that jumps\n", paragraph(text), rows(head, body)])


def _shown(record: Optional[Line]) -> str:
    if record is None:
        return ""
    repeats = f", {record['repeats']} rep." if record["repeats"] else ""
    row = f" ({record['in_a_row']})" if record["lost"] else ""
    return f"{record['lost']} of {record['after']}{row}{repeats}{' !' if record['warnings'] else ''}"
