# SPDX-License-Identifier: Apache-2.0
"""Which trainings the study consists of, and in which order: what is there early tells the most."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

from .methods import METHODS, REFERENCE
from .nets import NETS
from .training import Run

WEIGHTS = (1.0, 1e-3, 1e-6, 1e-9)
STORAGES_OF_THE_STUDY = ("float16", "fp8_hybrid", "e4m3")
SEEDS = 3
REFERENCE_SEEDS = 5
REFERENCE_STORAGE = "float32"


class Choice(NamedTuple):
    """What is to be trained.

    Attributes:
        nets: keys of `NETS`.
        storages: keys of `STORAGES`.
        methods: keys of `METHODS`.
        weights: what losses are multiplied by.
        seeds: how many, from 0 on.
        reference_seeds: likewise, of the reference.
        shorter: what iterations are divided by.
    """

    nets: Sequence[str] = tuple(NETS)
    storages: Sequence[str] = STORAGES_OF_THE_STUDY
    methods: Sequence[str] = tuple(METHODS)
    weights: Sequence[float] = WEIGHTS
    seeds: int = SEEDS
    reference_seeds: int = REFERENCE_SEEDS
    shorter: int = 1


def iterations(net: str, shorter: int = 1) -> int:
    """Batches of each player of a network."""
    return max(2, NETS[net].iterations // shorter)


def of_this_length(records: Sequence[Dict[str, Any]], shorter: int = 1) -> List[Dict[str, Any]]:
    """The lines that tell of trainings as long as they are now; a network may have been given more."""
    return [r for r in records if r["net"] in NETS and r["iterations"] == iterations(r["net"], shorter)]


def planned(choice: Choice) -> List[Run]:
    """All trainings: a seed after the other, in it a storage after the other, the fast networks first."""
    return list(_planned(choice))


def _planned(choice: Choice) -> Iterator[Run]:
    nets = [net for net in NETS if net in choice.nets]
    for seed in range(choice.seeds):
        for storage in choice.storages:
            for net in nets:
                length = iterations(net, choice.shorter)
                if seed == 0 and storage == choice.storages[0]:
                    # Without its spread nothing can be said of any cell.
                    for reference_seed in range(choice.reference_seeds):
                        yield Run(net, REFERENCE_STORAGE, 1.0, REFERENCE, reference_seed, length)
                for weight in choice.weights:
                    for method in choice.methods:
                        yield Run(net, storage, weight, method, seed, length)
