# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: parameters, solvers, loss scales, and how far the data is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, List, Sequence

import nnabla as nn


class Checkpoints:
    """The last two states of a training, each a folder that gets its name when it is whole.

    Args:
        folder: where they are.
        updaters: what trains: their solvers, data feeders (`Feeder`) and scales are saved.
    """

    def __init__(self, folder: Path, updaters: Sequence[Any]) -> None:
        self._folder, self._updaters = folder, updaters

    def save(self, iteration: int) -> None:
        """Save the state after so many iterations."""
        unfinished = self._folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        nn.save_parameters(str(unfinished / "parameters.h5"))
        for number, updater in enumerate(self._updaters):
            updater.solver.save_states(str(unfinished / f"solver{number}.h5"))
            if hasattr(updater, "save_states"):
                updater.save_states(unfinished / f"scaling{number}.json")
        state = {
            "iteration": iteration,
            "batches": [updater.data_feeder.count for updater in self._updaters],
            # All that can be saved of nnabla's own updater: its count of good updates starts at 0 again.
            "scales": [updater.scale for updater in self._updaters],
        }
        (unfinished / "training.json").write_text(json.dumps(state), "utf-8")
        whole = self._folder / f"{iteration:08d}"
        shutil.rmtree(whole, ignore_errors=True)
        unfinished.rename(whole)
        for old in self._whole()[:-2]:
            shutil.rmtree(old)

    def load(self) -> int:
        """Go on from the last checkpoint; returns the iterations that are done, 0 where there is none."""
        if not self._whole():
            return 0
        last = self._whole()[-1]
        state = json.loads((last / "training.json").read_text("utf-8"))
        nn.load_parameters(str(last / "parameters.h5"))  # first: scales are checked against them
        for number, updater in enumerate(self._updaters):
            updater.solver.load_states(str(last / f"solver{number}.h5"))
            if hasattr(updater, "load_states"):
                updater.load_states(last / f"scaling{number}.json")
            else:
                updater.scale = state["scales"][number]
            updater.data_feeder.count = state["batches"][number]
        return int(state["iteration"])

    def _whole(self) -> List[Path]:
        return sorted(self._folder.glob("[0-9]" * 8))
