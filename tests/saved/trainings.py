# SPDX-License-Identifier: Apache-2.0
"""Trainings that are saved half way: one for each kind of state that is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import nnabla as nn

from nnabla_adaloss import AdaptiveLossScalingUpdater, load_checkpoint, save_checkpoint
from tools.same_programs import FLOAT, HALF, Program, Training

ITERATIONS = 6

TRAININGS = {
    name: Program(*options.split("/"))
    for name, options in {
        "default": "mlp/float16/amax/history/plain/adam",
        "float": "residual/none/amax/history/plain/momentum",
        "bfloat16": "two_losses/bfloat16/amax/history/average/sgd",
        "fp8_hybrid": "attention/fp8_hybrid/amax/history/spike/momentum",
        "rounded_at_random": "mlp/random/amax/history/plain/sgd",
        "native_half": "mlp/half/amax/history/plain/sgd",
        "delay_0": "mlp/float16/amax_delay0/history/plain/sgd",
        "merged_components": "rnn/float16/amax/history/spike/momentum",
        "policy": "conv/float16/amax/policy/spike/momentum",
        "next": "two_losses/float16/amax/next/spike/adam",
        "accumulated": "residual/float16/amax/next/accum_spike/sgd",
        "dynamic": "mlp/float16/amax/dynamic/spike/momentum",
        "dynamic_next": "conv/float16/amax/dynamic_next/spike/sgd",
        "dynamic_fixed": "mlp/float16/fixed/dynamic_next/spike/sgd",
        "approx_range": "conv/float16/approx/history/spike/sgd",
        "approx_range_delay_0": "lstm/none/approx_delay0/history/plain/sgd",
        "abs_range": "mlp/float16/abs/history/spike/sgd",
        "element_wise_range": "mlp/float16/element/history/plain/sgd",
        "two_graphs": "absent/float16/amax/rebuilt/plain/sgd",
        "three_sizes": "tied/float16/amax/reshaped/spike/sgd",
        "loss_weights": "annealed/float16/amax/history/plain/adam",
        "GradScaler": "conv/float16/amax/grad_scaler/spike/momentum",
        "GradScaler_two_losses": "mlp/float16/approx/grad_two/spike/sgd",
        "GradScaler_two_graphs": "absent/float16/amax/grad_rebuilt/plain/sgd",
        "LossScaler": "mlp/float16/amax/loss_scaler/spike/sgd",
    }.items()
}


def outcome(training: Training) -> List[Any]:
    """Train on and return of each iteration result and scales, and losses, as JSON holds them."""
    found = []
    for _ in range(ITERATIONS):
        training.scales.clear()
        training.step()
        result, losses = training.results[-1]
        scales: List[Any] = [[scale, *map(dict, layers)] for scale, layers in training.scales]
        found.append({"result": result, "losses": losses, "scales": scales})
    return found


class Saved:
    """The files of a training in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.program = TRAININGS[name]
        self.context = HALF if self.program.storage == "half" else FLOAT
        self.checkpoint = folder / f"{name}.checkpoint"
        self.states = folder / f"{name}.states"

    def write(self) -> None:
        """Train and save."""
        with nn.context_scope(self.context):
            training = Training(self.program)
            for _ in range(ITERATIONS):
                training.step()
            extra = {"fed": training.fed}
            save_checkpoint(self.checkpoint, training.trainer, *_solvers(training), extra=extra)
            if isinstance(training.trainer, AdaptiveLossScalingUpdater):
                training.trainer.save_states(self.states)

    def go_on(self, *, from_states: bool) -> List[Any]:
        """Load and train on; the outcome."""
        with nn.context_scope(self.context):
            training = Training(self.program)
            extra = load_checkpoint(self.checkpoint, training.trainer, *_solvers(training))
            training.fed = extra["fed"]
            if from_states:
                # Another updater of the parameters and the solver that the checkpoint has restored.
                training.trainer = training.make()
                training.trainer.load_states(self.states)
            return outcome(training)


def _solvers(training: Training) -> List[Any]:
    """The solvers that a checkpoint is given: those that no updater brings along."""
    return [] if hasattr(training.trainer, "solver") else training.solvers
