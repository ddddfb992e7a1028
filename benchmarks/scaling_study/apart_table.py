# SPDX-License-Identifier: Apache-2.0
"""The trainings with gradients far apart, as a text in Markdown."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .apart_cells import CELLS
from .methods import METHOD_TITLES, METHODS, REFERENCE, STORAGE_TITLES
from .plan import REFERENCE_SEEDS, SEEDS
from .table import paragraph, percent, rows
from .verdict import RULE

Line = Mapping[str, Any]


def markdown(_picture: str, records: List[Dict[str, Any]]) -> str:
    """Scores, what was lost, and in which layer the most."""
    lines = [r for r in records if r["net"] in CELLS]
    wanted = {net: least for net in CELLS if (least := _wanted(net, lines)) is not None}
    storages = [s for s in STORAGE_TITLES if any(r["storage"] == s and r["net"] in wanted for r in lines)]
    body = []
    for method in METHODS:
        own = [_cell(net, s, method, lines) for s in storages for net in CELLS if net in wanted]
        there = [cell for cell in own if cell]
        if there:
            passed = sum(_passes(cell, wanted[cell[0]["net"]]) for cell in there)
            lost = sum(r["lost"] for cell in there for r in cell)
            repeats = sum(r["repeats"] for cell in there for r in cell)
            body.append([METHOD_TITLES[method], f"{passed} of {len(there)}", str(lost), str(repeats)])
    parts = [
        "# Where gradients lie far apart\n",
        "Made by `python benchmarks/study.py --apart` (`--report` makes it again from what is there).\n",
        paragraph(RULE),
        paragraph(
            f"{SEEDS} seeds of each cell, {REFERENCE_SEEDS} of fp32. All methods compute functions of one "
            "element at the loss in float, as the package's updaters do by default (`float_tail`): dynamic "
            "scaling gets the same, so that methods differ in their scales alone. Adam's eps is 1e-30: "
            "it takes the same steps however small gradients are."
        ),
        rows(["method", "cells that pass", "batches lost", "batches repeated"], body),
    ]
    for storage in storages:
        parts += [f"## {STORAGE_TITLES[storage]}\n", "Mean scores.\n", _scores(storage, lines, wanted)]
        parts += [
            "Of the gradients that arrive at layers, the share of elements that became zero, in the layer "
            "with most:\n",
            _underflow(storage, lines, wanted),
        ]
    errors = sorted(
        {f"- {r['net']}, {r['storage']}, {r['method']}: {r['error']}" for r in lines if r["error"]}
    )
    return "\n".join([*parts, *errors]).rstrip() + "\n"


def _wanted(net: str, lines: Sequence[Line]) -> Optional[float]:
    scores = [r["score"] for r in lines if r["net"] == net and r["method"] == REFERENCE]
    if len(scores) < 2:
        return None
    return mean(scores) - max(2.0 * stdev(scores), CELLS[net].resolution)


def _cell(net: str, storage: str, method: str, lines: Sequence[Line]) -> List[Line]:
    return [r for r in lines if (r["net"], r["storage"], r["method"]) == (net, storage, method)]


def _passes(cell: Sequence[Line], wanted: float) -> bool:
    scores = [r["score"] for r in cell]
    return None not in scores and mean(scores) >= wanted


def _scores(storage: str, lines: Sequence[Line], wanted: Mapping[str, float]) -> str:
    body = []
    for net, least in wanted.items():
        cells = [_cell(net, storage, method, lines) for method in METHODS]
        if not any(cells):
            continue
        fp32 = [r["score"] for r in lines if r["net"] == net and r["method"] == REFERENCE]
        reference = f"{mean(fp32):.3f} ± {stdev(fp32):.3f}"
        title, measure = CELLS[net].title, CELLS[net].measure
        body.append([net, f"{title}: {measure}", reference, *(_mark(cell, least) for cell in cells)])
    return rows(["", "", "fp32", *METHODS], body)


def _mark(cell: Sequence[Line], wanted: float) -> str:
    if not cell:
        return ""
    scores = [r["score"] for r in cell]
    shown = "error" if None in scores else f"{mean(scores):.3f}"
    lost = sum(r["lost"] for r in cell)
    return f"{'✓' if _passes(cell, wanted) else '✗'} {shown}{f', {lost} lost' if lost else ''}"


def _underflow(storage: str, lines: Sequence[Line], wanted: Mapping[str, float]) -> str:
    body = []
    for net in wanted:
        cells = [_cell(net, storage, method, lines) for method in METHODS]
        if any(cells):
            body.append([net, *map(_worst_layer, cells)])
    return rows(["", *METHODS], body)


def _worst_layer(cell: Sequence[Line]) -> str:
    if not cell:
        return ""
    shares = {name: mean(r["layers"].get(name, 0.0) for r in cell) for name in cell[0]["layers"]}
    worst = max(shares, key=lambda name: shares[name])
    return f"{percent(shares[worst])} {worst}" if shares[worst] else "0"
