# SPDX-License-Identifier: Apache-2.0
"""The study as a text in Markdown."""

from __future__ import annotations

import textwrap
from typing import Any, Dict, Iterable, List, Mapping, Sequence

import numpy as np

from .methods import METHOD_TITLES, METHODS, STORAGE_TITLES, STORAGES
from .nets import NETS
from .plan import REFERENCE_SEEDS, SEEDS, WEIGHTS
from .training import runs_of
from .verdict import RULE, Cell, Key, Results, cells, count, references

_MANY_LOST = 0.005


def markdown(picture: str, records: Sequence[Dict[str, Any]]) -> str:
    """Everything that the results tell, as far as they are there; `picture` is the name of its file."""
    results = runs_of(list(records))
    found = cells(results)
    storages = [name for name in STORAGES if any(key.storage == name for key in found)]
    unfinished = sum(cell.seeds < SEEDS for cell in found.values())
    parts = [
        "# Which loss scaling trains as well as fp32\n",
        "Made by `python benchmarks/study.py` (`--report` makes it again from what is there); "
        "`python benchmarks/study.py --help` tells what is trained.\n",
        paragraph(RULE),
        paragraph(
            f"A whole cell has {SEEDS} seeds, the reference {REFERENCE_SEEDS}. So far {len(results)} "
            f"trainings are there, in {len(found)} cells; {unfinished} of these have fewer seeds. What a "
            "single seed comes to says little where training is chaotic, as that of the GAN."
        ),
        f"![Cells that pass]({picture})\n",
        "## Cells that pass\n",
        _summary(found, storages),
        "## Networks\n",
        _networks(results),
    ]
    for storage in storages:
        parts += [f"## {STORAGE_TITLES[storage]}\n", _cells(found, storage), _counts(found, storage)]
    return "\n".join([*parts, *_errors(found)]).rstrip() + "\n"


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, laid out to be read as text as well."""
    lines = [list(head), *map(list, body)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |\n" for line in lines)


def weight_label(weight: float) -> str:
    """A loss weight as one writes it: 1, 1e-9."""
    return f"{weight:g}" if weight >= 1.0 else np.format_float_scientific(weight, trim="-", exp_digits=1)


def percent(share: float) -> str:
    """A share in percent; what is not zero does not look like zero."""
    return "< 0.01 %" if 0.0 < share < 5e-5 else f"{100.0 * share:.2f} %"


def paragraph(text: str) -> str:
    """A text in lines of 120 characters at most."""
    return textwrap.fill(text, 120) + "\n"


def _summary(found: Mapping[Key, Cell], storages: Sequence[str]) -> str:
    body = []
    for method in METHODS:
        passes = ["{} of {}".format(*count(found, storage, method)) for storage in storages]
        mine = [cell for key, cell in found.items() if key.method == method]
        if mine:
            body.append(
                [
                    METHOD_TITLES[method],
                    *passes,
                    percent(float(np.mean([cell.lost for cell in mine]))),
                    percent(float(np.mean([cell.underflow for cell in mine]))),
                ]
            )
    return rows(["method, at its defaults", *storages, "batches lost", "gradients that underflow"], body)


def _networks(results: Results) -> str:
    body = []
    for net, reference in references(results).items():
        description = NETS[net]
        body.append(
            [
                net,
                description.title,
                str(description.iterations),
                f"{description.learning_rate:g}",
                description.measure,
                f"{reference.mean:.3f} ± {reference.deviation:.3f} ({reference.seeds})",
                f"{reference.wanted:.3f}",
            ]
        )
    head = ["", "network", "iterations", "learning rate", "score", "fp32 (seeds)", "to pass"]
    return rows(head, body)


def _cells(found: Mapping[Key, Cell], storage: str) -> str:
    body = []
    for net in NETS:
        for weight in WEIGHTS:
            mine = [found.get(Key(net, storage, weight, method)) for method in METHODS]
            if any(mine):
                body.append([net, weight_label(weight), *map(_mark, mine)])
    note = "Mean score, and in parentheses the share of the batches that was thrown away, from 0.5 % on.\n\n"
    return note + rows(["", "loss weight", *METHODS], body)


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return ""
    score = "error" if cell.score is None else f"{cell.score:.3f}"
    lost = f" ({100.0 * cell.lost:.1f} % lost)" if cell.lost >= _MANY_LOST else ""
    return f"{'✓' if cell.passes else '✗'} {score}{lost}"


def _counts(found: Mapping[Key, Cell], storage: str) -> str:
    """What the adaptive ways and dynamic scaling did, of 1000 batches, over all loss weights."""
    body = []
    for net in NETS:
        for method in ("dynamic_65536", "approx_range", "amax_history"):
            mine = [found.get(Key(net, storage, weight, method)) for weight in WEIGHTS]
            there = [cell for cell in mine if cell is not None]
            if there:
                body.append(
                    [
                        net,
                        method,
                        f"{1e3 * np.mean([c.lost for c in there]):.1f}",
                        f"{np.mean([c.repeated for c in there]):.1f}",
                        f"{np.mean([c.overflows for c in there]):.1f}",
                        percent(float(np.mean([c.underflow for c in there]))),
                    ]
                )
    head = ["", "method", "lost", "repeated", "overflows", "underflow"]
    note = "Of 1000 batches, over all loss weights: how many were lost, run again, and overflowed.\n\n"
    return note + rows(head, body)


def _errors(found: Mapping[Key, Cell]) -> List[str]:
    lines = [
        f"- {key.net}, {key.storage}, loss weight {weight_label(key.weight)}, {key.method}: {error}"
        for key, cell in found.items()
        for error in sorted(set(cell.errors))
    ]
    return ["## Trainings that ended with an error\n", "\n".join(lines)] if lines else []
