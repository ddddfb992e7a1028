# SPDX-License-Identifier: Apache-2.0
"""Training of one network with all methods in turn, batch by batch, so that times are comparable."""

from __future__ import annotations

import time
from statistics import mean
from typing import Any, Callable, Dict, List, NamedTuple

import numpy as np
from common.digits import Data
from training import Settings, Training
from underflow import Underflow, UnderflowProbe, total

from nnabla_adaloss import AdaptiveLossScaling

# Methods in the order of the table.
COMPARED = ("fp32", "no scaling", "fixed (128)", "dynamic", "adaptive")
# A probe costs as much as two batches.
_PROBES = 12
_PROBE_INTERVAL = 10


class Result(NamedTuple):
    """Result of one training.

    Attributes:
        network: key of `NETWORKS`.
        loss_weight: factor of the mean cross entropy.
        method: key of `METHODS`.
        test_accuracy: share of test images that are correct by the fp32 weights at the end.
        final_loss: mean cross entropy over all training images at the end, without the loss weight.
        skipped_updates: batches thrown away because of infinities or NaNs.
        underflow: share of all gradient elements that fp16 storage loses to zero, over the whole training.
        underflow_by_layer: the same for each layer.
        milliseconds: mean wall time of one batch.
        relative_time: the time of all timed batches, relative to fp32's in the same turns.
        iterations: the batches of `scales` and `global_scale`.
        global_scale: the loss scale S0.
        scales: the scale of each layer's output gradient.
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
    network: str, loss_weight: float, data: Data, settings: Settings, progress: Callable[[int], Any]
) -> List[Result]:
    """Train `network` with every method and return a result for each.

    Args:
        network: key of `NETWORKS`.
        loss_weight: factor of the mean cross entropy.
        data: the digits.
        settings: common settings of all trainings.
        progress: called after each turn with the number of trainings that took part.
    """
    trainees = [Trainee(network, loss_weight, method, data, settings) for method in COMPARED]
    probe_every = min(settings.iterations, max(_PROBE_INTERVAL, settings.iterations // _PROBES))
    for turn in range(settings.iterations):
        for trainee in trainees:
            trainee.take_turn(turn)
            if turn % probe_every == probe_every - 1:
                trainee.probe()
        progress(len(trainees))
    reference = trainees[COMPARED.index("fp32")]
    return [trainee.result(reference) for trainee in trainees]


class Trainee(Training):
    """Training with measurements of times, scales and underflow."""

    def __init__(self, network: str, loss_weight: float, method: str, data: Data, settings: Settings) -> None:
        super().__init__(network, loss_weight, method, data, settings)
        with self.parameters():
            self._probe = UnderflowProbe(self.loss)
        self._probe_indices = np.arange(self.feeder.batch_size)
        self._seconds: Dict[int, float] = {}
        self._underflow: List[Dict[str, Underflow]] = []
        self._turns: List[int] = []
        self._global_scale: List[float] = []
        self._scales: Dict[str, List[float]] = {layer: [] for layer in self._probe.outputs}

    def take_turn(self, turn: int) -> None:
        """Train on one batch, unless an earlier turn has used up this turn's batch."""
        if self.feeder.count > turn:
            return
        start = time.perf_counter()
        batches = self.update()
        self._seconds[turn] = (time.perf_counter() - start) / batches
        self._note_scales(turn)

    def _note_scales(self, turn: int) -> None:
        self._turns.append(turn)
        self._global_scale.append(self.loop.updater.scale)
        for layer, output in self._probe.outputs.items():
            if isinstance(self.loop.loss, AdaptiveLossScaling):
                scale = self.loop.loss.scale_of(output)
            else:
                scale = self.loop.updater.scale
            self._scales[layer].append(scale)

    def probe(self) -> None:
        """Count underflow for the weights as they are, always on the same images."""
        if self.method == "fp32":
            return
        self.feeder.feed(self._probe_indices)
        self._underflow.append(self._probe.measure(self.loop.loss, self.loop.updater.scale))

    def result(self, reference: Trainee) -> Result:
        """Make the result of the training; times are relative to those of `reference`."""
        shared = sorted(self._seconds.keys() & reference._seconds.keys())
        accuracy, _ = self.evaluate(self.data.test)
        _, final_loss = self.evaluate(self.data.train)
        by_layer = {layer: total(p[layer] for p in self._underflow) for layer in self._probe.outputs}
        return Result(
            self.network,
            self.loss_weight,
            self.method,
            accuracy,
            final_loss,
            self.thrown_away,
            total(by_layer.values()).share,
            {layer: counts.share for layer, counts in by_layer.items()},
            1e3 * mean(self._seconds.values()),
            sum(self._seconds[t] for t in shared) / sum(reference._seconds[t] for t in shared),
            self._turns,
            self._global_scale,
            self._scales,
        )
