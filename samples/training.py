# SPDX-License-Identifier: Apache-2.0
"""One network that is trained on the digits in one way."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, NamedTuple

import nnabla as nn
import nnabla.functions as F
from common.digits import BatchFeeder, Data, Examples
from methods import METHODS, NNABLAS_GROWTH_INTERVAL, Job
from problems import PROBLEMS


class Settings(NamedTuple):
    """What all trainings of a program share.

    Attributes:
        iterations: batches each method may use, those it throws away included.
        seed: decides initial weights and the order of batches.
        growth_interval: after how many updates without overflow dynamic scaling doubles its scale.
    """

    iterations: int
    seed: int
    growth_interval: int = NNABLAS_GROWTH_INTERVAL


class Training:
    """One network that is trained with one method; its parameters are its own.

    Args:
        network: key of `PROBLEMS`.
        loss_weight: what the mean cross entropy, or the second of two losses, is multiplied by.
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
        """Train on one batch and return how many it took: a method may throw some away before."""
        before = self.feeder.count
        self._solver.set_learning_rate(self._learning_rate * (1.0 - before / self.settings.iterations))
        self.loop.updater.update()
        # Whoever skips an update leaves the gradients that made it do so.
        self.updates += not self._solver.check_inf_or_nan_grad()
        return self.feeder.count - before

    def parameters(self) -> Any:
        """The scope in which its parameters are nnabla's, as a context."""
        return nn.parameter_scope("", self._parameters)

    @property
    def thrown_away(self) -> int:
        """Batches that no update was made with."""
        return self.feeder.count - self.updates

    def evaluate(self, examples: Examples) -> tuple[float, float]:
        """Accuracy and mean cross entropy of the fp32 weights as they are."""
        with self.parameters():
            logits = self._build(nn.Variable.from_numpy_array(examples.x))
        loss = F.mean(F.softmax_cross_entropy(logits, nn.Variable.from_numpy_array(examples.t)))
        loss.persistent = logits.persistent = True
        loss.forward(clear_buffer=True)
        right = logits.d.argmax(axis=1) == examples.t[:, 0]
        return float(right.mean()), float(loss.d)
