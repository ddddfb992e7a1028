# SPDX-License-Identifier: Apache-2.0
"""Trainings with gradients far apart, compared with fp32."""

from __future__ import annotations

from typing import Dict, Iterator, Mapping, Sequence

from .experiment import Experiment, Line
from .methods import METHOD_TITLES, REFERENCE, STORAGE_TITLES
from .nets import FAR_APART
from .text import paragraph, percent, rows
from .training import Run, results_of, train
from .verdict import RULE, Cell, Key, cells, count, references

IN_EIGHT_BITS = {
    "heads_1e-5": ("e5m2_stored", "e4m3_stored"),
    "heads_1e-8": ("e5m2_stored", "e4m3_stored"),
    "heads_1e-10": ("fp8_hybrid",),
    "sigmoids": ("e5m2_stored", "e4m3_stored"),
}
SEEDS, REFERENCE_SEEDS = 3, 5
_MANY_LOST = 0.005

_NOTE = (
    "A whole cell has 3 seeds, the reference 5. What a single seed comes to says little where training is "
    "chaotic, as that of the GAN. All methods compute functions of one element at the loss in float, as the "
    "package's updaters do by default (`float_tail`): dynamic scaling gets the same, so that methods differ "
    "in their scales alone."
)


def experiment(quick: bool) -> Experiment:
    """Define the jobs: the reference first, then one seed after the other."""
    return Experiment(list(_runs(quick)), work, table)


def _runs(quick: bool) -> Iterator[Run]:
    nets = {name: FAR_APART[name] for name in (["heads_1e-8", "towers"] if quick else FAR_APART)}
    for seed in range(2 if quick else REFERENCE_SEEDS):
        for name, net in nets.items():
            yield Run(name, "float32", 1.0, REFERENCE, seed, net.iterations)
    for seed in range(1 if quick else SEEDS):
        for name, net in nets.items():
            for storage in ("float16", *IN_EIGHT_BITS.get(name, ())):
                for method in METHOD_TITLES:
                    yield Run(name, storage, 1.0, method, seed, net.iterations)


def work(run: Run) -> Line:
    """Train a network."""
    return train(run, FAR_APART[run.net])._asdict()


def table(lines: Sequence[Line]) -> str:
    """Write the passing cells in total; then networks, cells and counts by storage."""
    results = results_of(lines)
    found = cells(results, FAR_APART)
    unfinished = sum(len(cell.results) < SEEDS for cell in found.values())
    storages = [s for s in STORAGE_TITLES if any(key.storage == s for key in found)]
    known = references(results, FAR_APART)
    parts = [
        "# Which loss scaling trains as well as fp32\n",
        "Made by `python benchmarks/study.py apart` (`--report` makes it again from what is there).\n",
        paragraph(RULE),
        paragraph(_NOTE),
        f"{len(results)} trainings are there, in {len(found)} cells; {unfinished} have fewer seeds.\n",
        _summary(found, storages),
        "## Networks\n",
        rows(
            ["", "network", "iterations", "learning rate", "score", "fp32 (seeds)", "to pass"],
            [
                [
                    net,
                    FAR_APART[net].title,
                    str(FAR_APART[net].iterations),
                    f"{FAR_APART[net].learning_rate:g}",
                    FAR_APART[net].measure,
                    f"{reference.mean:.3f} ± {reference.deviation:.3f} ({reference.seeds})",
                    f"{reference.wanted:.3f}",
                ]
                for net, reference in known.items()
            ],
        ),
    ]
    for storage in storages:
        parts += [f"## {STORAGE_TITLES[storage]}\n", _cells(found, storage)]
    errors = [
        f"- {key.net}, {key.storage}, {key.method}: {error}\n"
        for key, cell in found.items()
        for error in sorted({result.error for result in cell.results} - {""})
    ]
    return "\n".join([*parts, *(["## Trainings that ended with an error\n", *errors] if errors else [])])


def _summary(found: Mapping[Key, Cell], storages: Sequence[str]) -> str:
    body = []
    for method, title in METHOD_TITLES.items():
        mine = [cell for key, cell in found.items() if key.method == method]
        if mine:
            passes = ["{} of {}".format(*count(found, storage, method)) for storage in storages]
            whole = f"{sum(cell.passes for cell in mine)} of {len(mine)}"
            sums = [str(round(sum(cell.total(field) for cell in mine))) for field in ("lost", "repeats")]
            underflow = percent(sum(cell.underflow for cell in mine) / len(mine))
            body.append([title, *passes, whole, *sums, underflow])
    head = ["method, at its defaults", *storages, "cells that pass", "batches lost", "repeated", "underflow"]
    return rows(head, body)


def _cells(found: Mapping[Key, Cell], storage: str) -> str:
    note = "Mean score, and in parentheses the share of the batches that was thrown away, from 0.5 % on.\n\n"
    grouped: Dict[str, Dict[str, Cell]] = {}
    for key, cell in found.items():
        if key.storage == storage:
            grouped.setdefault(key.net, {})[key.method] = cell
    body = [[net, *(_mark(mine.get(method)) for method in METHOD_TITLES)] for net, mine in grouped.items()]
    return note + rows(["", *METHOD_TITLES], body)


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return ""
    score = "error" if cell.score is None else f"{cell.score:.3f}"
    share = cell.per_batch("lost")
    lost = f" ({100.0 * share:.1f} % lost)" if share >= _MANY_LOST else ""
    return f"{'✓' if cell.passes else '✗'} {score}{lost}"
