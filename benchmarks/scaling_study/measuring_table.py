# SPDX-License-Identifier: Apache-2.0
"""Tables of what measuring costs and what is missed where it is left out."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any, Callable, Dict, List, Mapping, Sequence

from .jumps import AT, JUMPS, NEAR, STAYS, until_right
from .table import paragraph, percent, rows

Record = Dict[str, Any]
_KEY = ("net", "storage", "method", "every", "jump", "seed")


def markdown(picture: str, records: List[Record]) -> str:
    """What each distance comes to, over all trainings; then jumps, then single networks."""
    trainings = calm(records)
    distances = sorted({r["every"] for r in trainings})
    return "\n".join(
        [
            "# How often to measure\n",
            paragraph(
                "Made by `python benchmarks/study.py --measuring`: `AdaLossConfig(measure_every=n)` with "
                "loss weight 1e-3. Gradients are looked at in all iterations, also in those that hold "
                "scales. Underflow is the share of their elements that became zero, where a gradient that "
                "consists of zeros counts whole. Overflows are those of 1000 batches; each is a repeat."
            ),
            f"![Underflow, overflows, time and jumps]({picture})\n",
            _summary(trainings, held_over_measuring(records), distances),
            "## A loss that jumps\n",
            paragraph(
                f"float16, one seed; the loss of batch {AT} is multiplied, or that of all batches from "
                "there on, and the learning rate divided, so that steps are the same. Batches until the "
                f"scale is for {STAYS} batches within a factor of {NEAR:g} of that of the training without "
                f"a jump, less the jump; then the underflow of the {AT} batches from the jump on, in "
                "brackets that of the same batches without a jump; then how many more were repeated."
            ),
            _jumps(records, distances),
            "## Networks\n",
            _networks(trainings, distances),
        ]
    )


def calm(records: Sequence[Record]) -> List[Record]:
    """Trainings in an emulated storage whose loss does not jump."""
    return [r for r in records if r["jump"] == "none" and r["storage"] != "native"]


def jumped(records: Sequence[Record]) -> List[Record]:
    """Trainings whose loss jumps."""
    return [r for r in records if r["jump"] != "none"]


def held_over_measuring(records: Sequence[Record]) -> Dict[str, float]:
    """By network: the time of an iteration that holds scales over that of one that measures."""
    native = [r for r in records if r["storage"] == "native" and r["holding_over_measuring"]]
    nets = dict.fromkeys(r["net"] for r in native)
    return {net: median(r["holding_over_measuring"] for r in native if r["net"] == net) for net in nets}


def relative_time(measured: float, ratio: float) -> float:
    """The time of an iteration, as a multiple of one that measures, where a share of them does."""
    return measured + (1.0 - measured) * ratio


def mean_by_distance(
    records: Sequence[Record], distances: Sequence[int], value: Callable[[Record], float]
) -> List[float]:
    """The mean of a value over all trainings with each distance."""
    return [fmean([value(r) for r in records if r["every"] == every] or [0.0]) for every in distances]


def per_thousand(record: Record) -> float:
    """Overflows of 1000 batches."""
    return float(1e3 * record["overflows"] / max(1, record["batches"]))


def until(record: Record, known: Mapping[Any, Record]) -> Any:
    """How many batches after its jump the scale of a training is right; None: never."""
    other = known[tuple({**record, "jump": "none"}[name] for name in _KEY)]
    return until_right({"jump": record["jump"], **_followed(record)}, _followed(other))


def by_key(records: Sequence[Record]) -> Dict[Any, Record]:
    """Trainings by what tells them apart."""
    return {tuple(record[name] for name in _KEY): record for record in records}


def _followed(record: Record) -> Dict[str, List[Any]]:
    """The scale after each batch, from where it changed."""
    changes = record["scales"]
    fed, exponents = [], []
    for (first, exponent), (end, _) in zip(changes, [*changes[1:], [record["batches"] + 1, None]]):
        fed += list(range(first, end))
        exponents += [exponent] * (end - first)
    return {"fed": fed, "exponents": exponents}


def _summary(trainings: Sequence[Record], ratios: Mapping[str, float], distances: Sequence[int]) -> str:
    storages = list(dict.fromkeys(r["storage"] for r in trainings))
    methods = list(dict.fromkeys(r["method"] for r in trainings))
    columns: List[List[str]] = []
    heads = []
    for storage in storages:
        for method in methods:
            mine = [r for r in trainings if (r["storage"], r["method"]) == (storage, method)]
            heads.append(f"{storage}, {method}")
            lost = mean_by_distance(mine, distances, lambda r: float(r["underflow"]))
            over = mean_by_distance(mine, distances, per_thousand)
            columns.append([f"{percent(u)}, {o:.1f}" for u, o in zip(lost, over)])
    measured = mean_by_distance(trainings, distances, lambda r: float(r["measured"]))
    for net, ratio in ratios.items():
        heads.append(f"time, {net}")
        columns.append([f"{relative_time(share, ratio):.3f}" for share in measured])
    body = [[str(every), *(column[i] for column in columns)] for i, every in enumerate(distances)]
    note = paragraph(
        "Underflow and overflows, means over networks and seeds. Time: of an iteration of nnabla in float32, "
        "with nothing emulated, relative to one that measures; iterations of both kinds were timed in turns, "
        "and counted, while others worked on that machine."
    )
    return rows(["n", *heads], body) + "\n" + note


def _jumps(records: Sequence[Record], distances: Sequence[int]) -> str:
    known = by_key(records)
    body = []
    for net, method in dict.fromkeys((r["net"], r["method"]) for r in jumped(records)):
        for jump in JUMPS:
            mine = [r for r in records if (r["net"], r["method"], r["jump"]) == (net, method, jump)]
            cells = {r["every"]: r for r in jumped(mine)}
            if cells:
                shown = [_jump(cells[every], known) if every in cells else "" for every in distances]
                body.append([net, method, jump, *shown])
    return rows(["", "method", "jump", *(f"n = {every}" for every in distances)], body)


def _jump(record: Record, known: Mapping[Any, Record]) -> str:
    other = known[tuple({**record, "jump": "none"}[name] for name in _KEY)]
    right = until(record, known)
    return (
        f"{'never' if right is None else right}, {percent(record['underflow_after'])} "
        f"({percent(other['underflow_after'])}), {record['repeats'] - other['repeats']}"
    )


def _networks(trainings: Sequence[Record], distances: Sequence[int]) -> str:
    body = []
    for cell in dict.fromkeys((r["net"], r["storage"], r["method"]) for r in trainings):
        mine = [r for r in trainings if (r["net"], r["storage"], r["method"]) == cell]
        line = list(cell)
        for every in distances:
            there = [r for r in mine if r["every"] == every]
            scores = [r["score"] for r in there if r["score"] is not None]
            score = f"{fmean(scores):.3f}" if scores and len(scores) == len(there) else "error"
            share = percent(fmean([r["underflow"] for r in there] or [0.0]))
            line.append(f"{score}, {share}, {fmean([per_thousand(r) for r in there] or [0.0]):.1f}")
        body.append(line)
    note = paragraph("Score, underflow, overflows of 1000 batches: means over seeds.")
    return note + "\n" + rows(["", "storage", "method", *(f"n = {every}" for every in distances)], body)
