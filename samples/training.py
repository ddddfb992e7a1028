# SPDX-License-Identifier: Apache-2.0
"""Trains one network in all ways at the same time, a batch each in turn, so that times are comparable."""

from __future__ import annotations

import time
from collections import OrderedDict
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import numpy as np
from digits import BatchFeeder, Digits, Images
from methods import METHODS, Job
from networks import NETWORKS
from underflow import Underflow, UnderflowProbe, total

from nnabla_adaloss import AdaptiveLossScaling

# A probe costs as much as two batches.
_PROBES = 12
_PROBE_INTERVAL = 10


class Settings(NamedTuple):
    """What all trainings of a comparison share.

    Attributes:
        iterations: batches each method may use, those it throws away included.
        growth_interval: after how many updates without overflow dynamic and adaptive double the scale.
        seed: decides initial weights and the order of batches.
    """

    iterations: int
    growth_interval: int
    seed: int


class Result(NamedTuple):
    """How one training went.

    Attributes:
        network: key of `NETWORKS`.
        loss_weight: what the mean cross entropy is multiplied by.
        method: key of `METHODS`.
        test_accuracy: share of test images told right by the fp32 weights at the end.
        final_loss: mean cross entropy over all training images at the end, without the loss weight.
        skipped_updates: batches thrown away because of infinities or NaNs.
        underflow: share of all gradient elements that fp16 storage loses to zero, over the whole training.
        underflow_by_layer: the same for each layer.
        milliseconds: median wall time of one batch.
        relative_time: median ratio of that time to fp32's for the same turn.
        iterations: the numbers of the batches `scales` and `global_scale` belong to.
        global_scale: the loss scale S0.
        scales: for each layer the scale that the gradient of its output carries.
    """

    network: str
    loss_weight: float
    method: str
    test_accuracy: float
    final_loss: float
    skipped_updates: int
    underflow: float
    underflow_by_layer: Dict[str, float]
    milliseconds: float
    relative_time: float
    iterations: List[int]
    global_scale: List[float]
    scales: Dict[str, List[float]]


def compare_methods(
    network: str, loss_weight: float, data: Digits, settings: Settings, progress: Callable[[int], Any]
) -> List[Result]:
    """Train `network` with every method and return a result for each.

    Args:
        network: key of `NETWORKS`.
        loss_weight: what the mean cross entropy is multiplied by.
        data: the digits.
        settings: what all trainings share.
        progress: called after each turn with the number of trainings that took it.
    """
    trainees = [Trainee(network, loss_weight, method, data, settings) for method in METHODS]
    probe_every = min(settings.iterations, max(_PROBE_INTERVAL, settings.iterations // _PROBES))
    for turn in range(settings.iterations):
        for trainee in trainees:
            trainee.take_turn(turn)
            if turn % probe_every == probe_every - 1:
                trainee.probe()
        progress(len(trainees))
    reference = trainees[list(METHODS).index("fp32")]
    return [trainee.result(reference) for trainee in trainees]


class Trainee:
    """One network that is trained with one method; its parameters are its own."""

    def __init__(
        self, network: str, loss_weight: float, method: str, data: Digits, settings: Settings
    ) -> None:
        recipe = NETWORKS[network]
        self.network, self.loss_weight, self.method = network, loss_weight, method
        self._data = data
        self._settings = settings
        # SGD moves weights by learning rate times gradient: this takes the loss weight out again.
        self._learning_rate = recipe.learning_rate / loss_weight
        self._parameters: Dict[str, Any] = OrderedDict()
        self._build = recipe.build
        nn.seed(settings.seed)
        with nn.parameter_scope("", self._parameters):
            x = nn.Variable((recipe.batch_size, *data.train.pixels.shape[1:]))
            t = nn.Variable((recipe.batch_size, 1))
            loss = F.mean(F.softmax_cross_entropy(recipe.build(x), t)) * loss_weight
            self._solver = S.Momentum(self._learning_rate, 0.9)
            self._solver.set_parameters(nn.get_parameters())
            self._feeder = BatchFeeder(data.train, x, t, settings.seed)
            self._loop = METHODS[method](Job(self._solver, loss, self._feeder, settings.growth_interval))
            self._probe = UnderflowProbe(loss)
        self._probe_indices = np.arange(recipe.batch_size)
        self._updates = 0
        self._seconds: Dict[int, float] = {}
        self._underflow: List[Dict[str, Underflow]] = []
        self._turns: List[int] = []
        self._global_scale: List[float] = []
        self._scales: Dict[str, List[float]] = {layer: [] for layer in self._probe.outputs}

    def take_turn(self, turn: int) -> None:
        """Train on one batch, unless an earlier turn has used up this turn's batch."""
        if self._feeder.count > turn:
            return
        self._solver.set_learning_rate(self._learning_rate * (1.0 - turn / self._settings.iterations))
        before = self._feeder.count
        start = time.perf_counter()
        self._loop.updater.update()
        self._seconds[turn] = (time.perf_counter() - start) / (self._feeder.count - before)
        # Whoever skips an update leaves the gradients that made it do so.
        self._updates += not self._solver.check_inf_or_nan_grad()
        self._note_scales(turn)

    def _note_scales(self, turn: int) -> None:
        self._turns.append(turn)
        self._global_scale.append(self._loop.updater.scale)
        for layer, output in self._probe.outputs.items():
            if isinstance(self._loop.loss, AdaptiveLossScaling):
                scale = self._loop.loss.scale_of(output)
            else:
                scale = self._loop.updater.scale
            self._scales[layer].append(scale)

    def probe(self) -> None:
        """Count underflow for the weights as they are, always on the same images."""
        if self.method == "fp32":
            return
        self._feeder.feed(self._probe_indices)
        self._underflow.append(self._probe.measure(self._loop.loss, self._loop.updater.scale))

    def result(self, reference: Trainee) -> Result:
        """How the training went; times are compared with those of `reference`."""
        shared = sorted(self._seconds.keys() & reference._seconds.keys())
        accuracy, _ = self._evaluate(self._data.test)
        _, final_loss = self._evaluate(self._data.train)
        by_layer = {layer: total(p[layer] for p in self._underflow) for layer in self._probe.outputs}
        return Result(
            self.network,
            self.loss_weight,
            self.method,
            accuracy,
            final_loss,
            self._feeder.count - self._updates,
            total(by_layer.values()).share,
            {layer: counts.share for layer, counts in by_layer.items()},
            1e3 * median(self._seconds.values()),
            median(self._seconds[turn] / reference._seconds[turn] for turn in shared),
            self._turns,
            self._global_scale,
            self._scales,
        )

    def _evaluate(self, images: Images) -> tuple[float, float]:
        with nn.parameter_scope("", self._parameters):
            logits = self._build(nn.Variable.from_numpy_array(images.pixels))
        loss = F.mean(F.softmax_cross_entropy(logits, nn.Variable.from_numpy_array(images.digits)))
        loss.persistent = logits.persistent = True
        loss.forward(clear_buffer=True)
        right = logits.d.argmax(axis=1) == images.digits[:, 0]
        return float(right.mean()), float(loss.d)
