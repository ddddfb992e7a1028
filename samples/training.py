# SPDX-License-Identifier: Apache-2.0
"""Training of one network on the digits with one method."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, NamedTuple

import nnabla as nn
import nnabla.functions as F
from common.digits import BatchFeeder, Data, Examples
from methods import METHODS, NNABLAS_GROWTH_INTERVAL, Job
from problems import PROBLEMS


class Settings(NamedTuple):
    """Common settings of a program's trainings.

    Attributes:
        iterations: batches each method may use, lost ones included.
        seed: determines initial weights and the order of batches.
        growth_interval: number of updates without overflow after which dynamic scaling doubles its scale.
    """

    iterations: int
    seed: int
    growth_interval: int = NNABLAS_GROWTH_INTERVAL


class Training:
    """Training of one network with one method and parameters of its own.

    Args:
        network: key of `PROBLEMS`.
        loss_weight: factor of the mean cross entropy, or of the second of two losses.
        method: key of `METHODS`.
        data: the digits.
        settings: iterations and seed.
    """

    def __init__(self, network: str, loss_weight: float, method: str, data: Data, settings: Settings) -> None:
        problem = PROBLEMS[network]
        self.network, self.loss_weight, self.method = network, loss_weight, method
        self.data, self.settings = data, settings
        self._parameters: Dict[str, Any] = OrderedDict()
        self._build = problem.build
        nn.seed(settings.seed)
        with self.parameters():
            x = nn.Variable((problem.batch_size, *data.train.x.shape[1:]))
            t = nn.Variable((problem.batch_size, 1))
            self.loss = problem.loss(x, t, loss_weight)
            self._solver = problem.solver(loss_weight)
            self._learning_rate = self._solver.learning_rate()
            self._solver.set_parameters(nn.get_parameters())
            self.feeder = BatchFeeder(data.train, x, t, settings.seed)
            job = Job(self._solver, self.loss, self.feeder, settings.growth_interval)
            self.loop = METHODS[method](job)
        self.updates = 0

    def update(self) -> int:
        """Train on one batch and return the number of batches used: a method may lose some first."""
        before = self.feeder.count
        self._solver.set_learning_rate(self._learning_rate * (1.0 - before / self.settings.iterations))
        self.loop.updater.update()
        # A skipped update leaves its nonfinite gradients in place.
        self.updates += not self._solver.check_inf_or_nan_grad()
        return self.feeder.count - before

    def parameters(self) -> Any:
        """Context with the scope of its parameters."""
        return nn.parameter_scope("", self._parameters)

    @property
    def thrown_away(self) -> int:
        """Number of batches without an update."""
        return self.feeder.count - self.updates

    def evaluate(self, examples: Examples) -> tuple[float, float]:
        """Accuracy and mean cross entropy of the present fp32 weights."""
        with self.parameters():
            logits = self._build(nn.Variable.from_numpy_array(examples.x))
        loss = F.mean(F.softmax_cross_entropy(logits, nn.Variable.from_numpy_array(examples.t)))
        loss.persistent = logits.persistent = True
        loss.forward(clear_buffer=True)
        right = logits.d.argmax(axis=1) == examples.t[:, 0]
        return float(right.mean()), float(loss.d)
