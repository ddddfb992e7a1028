# SPDX-License-Identifier: Apache-2.0
"""Which trainings there are, and in which order."""

from __future__ import annotations

from itertools import groupby

from scaling_study.experiment import missing_of
from scaling_study.methods import METHODS, REFERENCE
from scaling_study.nets import NETS
from scaling_study.plan import (
    REFERENCE_SEEDS,
    SEEDS,
    STORAGES_OF_THE_STUDY,
    WEIGHTS,
    Choice,
    of_this_length,
    planned,
)
from scaling_study.training import Run


def test_every_cell_has_all_seeds_and_no_training_is_there_twice() -> None:
    runs = planned(Choice())
    cells = len(NETS) * len(STORAGES_OF_THE_STUDY) * len(WEIGHTS) * len(METHODS)
    assert len(runs) == len(set(runs)) == cells * SEEDS + len(NETS) * REFERENCE_SEEDS


def test_part_of_a_study_can_be_read() -> None:
    runs = [run for run in planned(Choice()) if run.method != REFERENCE]
    assert [seed for seed, _ in groupby(run.seed for run in runs)] == list(range(SEEDS))
    first = [run for run in runs if run.seed == 0]
    assert [storage for storage, _ in groupby(run.storage for run in first)] == list(STORAGES_OF_THE_STUDY)
    for _, cell in groupby(first, key=lambda run: (run.storage, run.net, run.weight)):
        assert [run.method for run in cell] == list(METHODS)


def test_the_reference_of_a_network_comes_before_its_cells() -> None:
    runs = planned(Choice(nets=("mlp8", "lenet"), storages=("fp8_hybrid", "float16"), seeds=2))
    for net in ("lenet", "mlp8"):
        of_net = [run.method for run in runs if run.net == net]
        assert of_net[:REFERENCE_SEEDS] == [REFERENCE] * REFERENCE_SEEDS
        assert REFERENCE not in of_net[REFERENCE_SEEDS:]


def test_what_is_there_is_not_done_again() -> None:
    runs = planned(Choice(nets=("lenet",), storages=("float16",), seeds=1))
    there = [{**run._asdict(), "score": 0.5} for run in runs[::2]]
    assert missing_of(runs, there) == runs[1::2]
    assert missing_of(runs, [{"net": "lenet"}]) == runs


def test_a_training_of_another_length_is_another_one() -> None:
    run = Run("lenet", "float16", 1e-9, "none", 0, 200)
    short = {**run._asdict(), "iterations": 50}
    assert missing_of([run], [short]) == [run]
    assert of_this_length([short, run._asdict()]) == [run._asdict()]
    assert of_this_length([short, run._asdict()], shorter=4) == [short]
