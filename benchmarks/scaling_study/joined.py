# SPDX-License-Identifier: Apache-2.0
"""Trainings and gradients with fewer scales per network, in two versions of the package.

One version of the package is imported at a time: its lines have a label; the table compares two.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.solvers as S
import numpy as np

import nnabla_adaloss
from nnabla_adaloss import AdaptiveLossScalingUpdater, Format, FormatEmulation, LossScaleWarning, Precision

from .experiment import Experiment, Line
from .joined_programs import PROGRAMS, Array, Program
from .joined_table import (
    DEPTHS,
    GRADIENTS,
    LABELS,
    SEEDS,
    STORAGES,
    TRAINING,
    UPDATES_BEFORE,
    UPDATES_TO_SETTLE,
    table,
)
from .methods import REFERENCE, Method, Trainee, adaptive, plain, rounded, train

_QUICK = ("rnn16_vanish", "transformer2", "siamese")
_QUICK_ITERATIONS = 24
_QUICK_STORAGES = ("float16",)
_OF_GRADIENTS = (
    *("rnn64_vanish", "rnn64_explode", "rnn256_vanish", "rnn256_explode", "lstm64_vanish"),
    *("transformer2", "transformer2_plain", "transformer12", "transformer12_plain"),
    *("autoencoder", "siamese"),
)
_UPDATES_MORE = 16
_SMALL_STEPS = 0.1

Gradients = Dict[str, Array]


class JoinedJob(NamedTuple):
    """A training, or the gradients of one batch."""

    part: str
    net: str
    storage: str
    method: str  # fp32, or the label of the version that scales
    seed: int
    iterations: int


def experiment(quick: bool) -> Experiment:
    """Define the trainings of all labels and in fp32, then the gradients; `selected` filters one version."""
    return Experiment(list(_jobs(quick)), work, table)


def _jobs(quick: bool) -> Iterator[JoinedJob]:
    names, storages = (_QUICK, _QUICK_STORAGES) if quick else (tuple(PROGRAMS), STORAGES)
    for seed in range(1 if quick else SEEDS):
        for name in names:
            iterations = _QUICK_ITERATIONS if quick else PROGRAMS[name].iterations
            yield JoinedJob(TRAINING, name, "float32", REFERENCE, seed, iterations)
            for storage in storages:
                for label in LABELS:
                    yield JoinedJob(TRAINING, name, storage, label, seed, iterations)
    for name in _OF_GRADIENTS:
        if name in names:
            for storage in storages:
                for label in LABELS:
                    yield JoinedJob(GRADIENTS, name, storage, label, 0, UPDATES_TO_SETTLE)


def default_label() -> str:
    """Return `before` if the package is in a checkout of this name, else `now`."""
    return LABELS[0] if _checkout() == LABELS[0] else LABELS[1]


def _checkout() -> str:
    return Path(nnabla_adaloss.__file__ or "").parents[1].name


def selected(jobs: Iterable[JoinedJob], label: str, *, gradients: bool) -> List[JoinedJob]:
    """Select the trainings of a version, or its passes over single batches."""
    part = GRADIENTS if gradients else TRAINING
    return [job for job in jobs if job.part == part and job.method in (label, REFERENCE)]


def work(job: JoinedJob) -> Line:
    """Train, or compare the gradients of a batch."""
    nn.seed(job.seed)
    with nn.parameter_scope("", OrderedDict()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            line = (_trained if job.part == TRAINING else _gradients)(PROGRAMS[job.net], job)
            line["error"] = ""
        except Exception as raised:
            line = {"error": f"{type(raised).__name__}: {raised}"}
    line["warnings"] = [str(one.message) for one in caught if issubclass(one.category, LossScaleWarning)]
    return {**line, "checkout": _checkout()}


def _trained(program: Program, job: JoinedJob) -> Line:
    built = program.build(job.seed)
    trainees = []
    for player in built.players:
        solver = program.solver(program.learning_rate)
        solver.set_parameters(player.parameters)
        trainees.append(Trainee(player.loss, solver, player.feed))
    reference = job.method == REFERENCE
    method: Method = plain() if reference else adaptive()
    elements = flushed = 0

    def before(batch: int) -> None:
        for trainee in trainees:
            trainee.solver.set_learning_rate(program.learning_rate * (1.0 - (batch - 1) / job.iterations))

    def after(batch: int, loops: Sequence[Any]) -> None:
        nonlocal elements, flushed
        for loop in loops:
            if loop.emulation is not None and batch % 10 == 0:
                counted, lost = rounded(loop.emulation)
                elements, flushed = elements + counted, flushed + lost

    train(method, trainees, None if reference else job.storage, job.iterations, before, after)
    score = built.score()
    return {
        "score": score if np.isfinite(score) else None,
        "batches": sum(trainee.fed for trainee in trainees),
        "repeats": sum(trainee.repeats for trainee in trainees),
        "lost": sum(trainee.lost for trainee in trainees),
        "underflow": flushed / max(1, elements),
    }


def _gradients(program: Program, job: JoinedJob) -> Line:
    """Train in fp32, then compare the gradients of one batch with exact ones, once scales are stable."""
    built = program.build(job.seed)
    (player,) = built.players
    # Small steps, after which gradients still vanish or explode.
    solver = program.solver(_SMALL_STEPS * program.learning_rate)
    solver.set_parameters(player.parameters)
    train(plain(), [Trainee(player.loss, solver, player.feed)], None, UPDATES_BEFORE)
    for variable in built.inputs.values():
        variable.need_grad = True
    leaves = {**player.parameters, **built.inputs}
    player.feed()
    exact = _backward(player.loss, leaves)
    # Activations of the format, and gradients as in fp32.
    of_rounded = _backward(
        FormatEmulation(player.loss, _WITH_EXACT_GRADIENTS[job.storage], float_tail=True), leaves
    )
    still = S.Sgd(0.0)
    still.set_parameters(leaves)
    trainee = Trainee(player.loss, still, lambda: None)
    updater = AdaptiveLossScalingUpdater(still, player.loss, storage=job.storage, monitors=[trainee])
    kinds: List[str] = []
    # The last pass must be of the usual kind, without measurement.
    while len(kinds) < job.iterations or (
        updater.scaling.result.kind == "measuring" and len(kinds) < job.iterations + _UPDATES_MORE
    ):
        updater.update()
        kinds.append(updater.scaling.result.kind)
    emulation: Any = updater.scaling.loss
    components = len(updater.scaling.result.schedule.components.names)
    found = {name: leaf.g.astype(np.float64) for name, leaf in leaves.items()}
    return {
        "kind": kinds[-1],
        "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "components": components,
        "repeats": trainee.repeats,
        "lost": trainee.lost,
        "norms": {name: _short(np.linalg.norm(exact[name])) for name in leaves},
        "errors": {name: _error(found[name], exact[name]) for name in leaves},
        "rounding_errors": {name: _error(found[name], of_rounded[name]) for name in leaves},
        "flushed": {name: _flushed(emulation, [leaf]) for name, leaf in leaves.items()},
        "flushed_by_depth": _by_depth(emulation, player.loss),
        "flushed_most": _flushed_most(emulation, player.loss),
    }


# A single format serves activations and gradients; with float32's exponents no gradient is lost.
_WIDE_FLOAT16 = Format.ieee("wide_float16", exponent_bits=8, mantissa_bits=10)
_WITH_EXACT_GRADIENTS = {
    "float16": Precision("float16", "float32"),
    "float8_e5m2": Precision("float8_e5m2", "float32"),
    "fp8_hybrid": Precision(
        "float8_e4m3", "float32", saturate=True, operands_only=True, otherwise=_WIDE_FLOAT16
    ),
}


def _backward(loss: Any, leaves: Mapping[str, nn.Variable]) -> Gradients:
    """Compute the gradients of a loss without scaling."""
    for leaf in leaves.values():
        leaf.grad.zero()
    loss.forward(clear_no_need_grad=True)
    loss.backward(clear_buffer=True)
    return {name: leaf.g.astype(np.float64) for name, leaf in leaves.items()}


def _short(number: Any) -> float:
    return float(f"{number:.3g}")


def _error(found: Array, exact: Array) -> Optional[float]:
    """Relative error; None if the exact value is 0."""
    # Squares of float32 numbers do not underflow in float64.
    norm = float(np.linalg.norm(exact))
    if not norm:
        return None
    error = float(np.linalg.norm(found - exact) / norm)
    return _short(error) if np.isfinite(error) else 1e9


def _flushed(emulation: FormatEmulation, variables: Iterable[nn.Variable]) -> List[int]:
    """Count nonzero elements of gradients, and those that became zero when stored."""
    told = [emulation.gradient_rounding(variable) for variable in variables]
    return [sum(one.nonzero for one in told if one), sum(one.underflowed for one in told if one)]


def _outputs(loss: nn.Variable) -> List[Tuple[str, nn.Variable]]:
    """List the outputs of functions, from the inputs on, with their functions."""
    found: List[Tuple[str, nn.Variable]] = []
    loss.visit(lambda f: found.extend((f"{len(found)} {f.info.type_name}", o) for o in f.outputs))
    return found


def _by_depth(emulation: FormatEmulation, loss: nn.Variable) -> List[List[int]]:
    """Count the same over all outputs, in equal parts from the inputs to the loss."""
    variables = [variable for _, variable in _outputs(loss)]
    ends = [round(len(variables) * part / DEPTHS) for part in range(DEPTHS + 1)]
    return [_flushed(emulation, variables[start:end]) for start, end in zip(ends, ends[1:])]


def _flushed_most(emulation: FormatEmulation, loss: nn.Variable) -> List[Any]:
    """Find the output with the largest lost share, by number and function; and the number of outputs."""
    outputs = _outputs(loss)
    shares = []
    for name, variable in outputs:
        nonzero, flushed = _flushed(emulation, [variable])
        shares.append((_short(flushed / max(1, nonzero)), name))
    return [*max(shares)[::-1], len(outputs)]
