# SPDX-License-Identifier: Apache-2.0
"""How far each way of scaling reaches: two losses 1 : r on one network, and the error of each gradient."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import nnabla as nn
import nnabla.solvers as S
import numpy as np
from numpy.typing import NDArray

from .experiment import Experiment
from .methods import Job
from .reach_picture import draw
from .reach_table import markdown
from .reach_ways import FORMATS, WAYS
from .several_losses import PAIRS, Terms, terms

_EXPONENTS = range(0, -21, -1)
_UPDATES = 24

Gradients = Dict[str, NDArray[np.float64]]


class ReachJob(NamedTuple):
    """One ratio."""

    net: str
    storage: str
    method: str
    ratio: float


def experiment(only: Optional[Sequence[str]]) -> Experiment:
    """All ratios of a format and method after each other."""
    jobs = [
        ReachJob(net, storage, method, float(f"1e{exponent}"))
        for net in (only or PAIRS)
        for storage in FORMATS
        for method in WAYS
        for exponent in _EXPONENTS
    ]
    return Experiment("reach", jobs, work, markdown, draw)


def work(job: ReachJob) -> Dict[str, Any]:
    """Run batches without changing the parameters, so that scales settle, and compare the last gradients."""
    nn.seed(0)
    start = time.perf_counter()
    with nn.parameter_scope("", OrderedDict()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = terms(job.net, 0)
        parameters = nn.get_parameters()
        losses.feed()
        exact = combined(losses, parameters, job.ratio)
        solver = S.Sgd(0.0)
        solver.set_parameters(parameters)
        loss = losses.large + losses.small * job.ratio
        loop = WAYS[job.method](Job(solver, loss, lambda: None, FORMATS[job.storage]))
        for _ in range(_UPDATES):
            loop.updater.update()
        errors = {name: _error(p.g, exact[name]) for name, p in parameters.items() if name.endswith("W")}
    return {
        **job._asdict(),
        "errors": {name.rsplit("/", 2)[0]: float(f"{error:.3g}") for name, error in errors.items()},
        "alphas": {} if loop.scaling is None else dict(loop.scaling.layer_scales),
        "scale": loop.updater.scale,
        "seconds": round(time.perf_counter() - start, 3),
    }


def combined(losses: Terms, parameters: Dict[str, nn.Variable], ratio: float) -> Gradients:
    """The gradients of the weighted sum, from those of both losses in float, added in float64."""
    of_terms: List[Gradients] = []
    for loss in (losses.large, losses.small):
        for parameter in parameters.values():
            parameter.grad.zero()
        loss.forward()
        loss.backward()
        of_terms.append({name: p.g.astype(np.float64) for name, p in parameters.items()})
    large, small = of_terms
    return {name: large[name] + ratio * small[name] for name in parameters}


def _error(found: NDArray[np.float32], exact: NDArray[np.float64]) -> float:
    """The relative error; 1, that of a gradient that is lost, where what was found is not finite."""
    error = float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))
    return error if np.isfinite(error) else 1.0
