# SPDX-License-Identifier: Apache-2.0
"""How far each way of scaling reaches, as a text in Markdown."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from .reach_ways import FORMATS, LIFTED, WAYS, of_small_loss
from .several_losses import PAIRS
from .table import paragraph, rows, weight_label

_TITLES = {"heads": "Two heads on one trunk", "towers": "Two networks that share their input alone"}
_TIMES = 2.0
_SHOWN = (1e-5, 1e-8, 1e-10, 1e-15, 1e-20)


def markdown(picture: str, records: List[Dict[str, Any]]) -> str:
    """The smallest ratio that each method reaches, and errors by layer at some."""
    parts = [
        "# How far one scale reaches\n",
        "Made by `python benchmarks/study.py --reach` (`--report` makes it again from what is there).\n",
        paragraph(
            "Two losses, 1 : r, tell of a batch of digits whether they are odd, and which they are. The "
            "parameters stay as they are, 24 times the same batch, so that scales settle. The error of a "
            "layer's weight gradient is the norm of its difference from that of float32, the terms added in "
            "float64, divided by the norm of the latter; the rounding of activations and weights is in it."
        ),
        paragraph(
            "In the tables: the smallest r at which the worst layer of the small loss has an error of at "
            f"most {_TIMES:g} times the least that any method has at r = 1. {LIFTED} is approx_range "
            "without its bounds (`use_bound=False`)."
        ),
        f"![The error of the worst layer of the small loss against the ratio]({picture})\n",
    ]
    for net in PAIRS:
        mine = [r for r in records if r["net"] == net]
        if mine:
            parts += [f"## {_TITLES[net]}\n", _reached(mine)]
    heads = [r for r in records if r["net"] == "heads"]
    if heads:
        parts += ["## Errors by layer, two heads on one trunk\n", *_by_layer(heads)]
    return "\n".join(parts).rstrip() + "\n"


def _reached(records: Sequence[Dict[str, Any]]) -> str:
    body = [[method, *(_smallest(records, storage, method) for storage in FORMATS)] for method in WAYS]
    return rows(["", *FORMATS], body)


def _smallest(records: Sequence[Dict[str, Any]], storage: str, method: str) -> str:
    own = [r for r in records if r["storage"] == storage]
    at_one = [of_small_loss(r) for r in own if r["ratio"] == 1.0]
    reached = ""
    for r in sorted((r for r in own if r["method"] == method), key=lambda r: -float(r["ratio"])):
        if of_small_loss(r) > _TIMES * min(at_one):
            return reached or "none"
        reached = weight_label(r["ratio"])
    return reached


def _by_layer(records: Sequence[Dict[str, Any]]) -> List[str]:
    parts = []
    for storage in FORMATS:
        body = []
        layers: Tuple[str, ...] = ()
        for ratio in _SHOWN:
            for method in WAYS:
                for r in records:
                    if (r["storage"], r["method"], r["ratio"]) == (storage, method, ratio):
                        layers = tuple(r["errors"])
                        body.append(
                            [weight_label(ratio), method, *(f"{e:.2g}" for e in r["errors"].values())]
                        )
        if body:
            parts += [f"{storage}:\n", rows(["r", "method", *layers], body)]
    return parts
