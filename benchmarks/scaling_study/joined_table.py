# SPDX-License-Identifier: Apache-2.0
"""Tables of two versions side by side, with fewer scales per network."""

from __future__ import annotations

from statistics import mean, median, stdev
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .experiment import Line
from .joined_programs import PROGRAMS
from .methods import REFERENCE
from .text import paragraph, rows

LABELS = ("before", "now")
STORAGES = ("float16", "float8_e5m2", "fp8_hybrid")
SEEDS = 3
TRAINING, GRADIENTS = "training", "gradients"
UPDATES_BEFORE, UPDATES_TO_SETTLE = 20, 20

_RESOLUTION = 0.02  # insignificant difference of scores
DEPTHS = 8
_TIMES, _TINY_ERROR = 2.0, 1e-6

_NOTE = (
    "Each component of the gradients has one scale. Does anything train worse, or lose gradients, where more "
    "belongs to one component? Two versions of the package are compared, each with all defaults of "
    "AdaptiveLossScalingUpdater, and with fp32 without scaling. Formats are emulated. Learning rates fall to "
    "zero linearly."
)
_TRAINING_NOTE = (
    "Scores go from 0 to 1, the best: shares of right answers, of the autoencoder the share of the pixels' "
    "variance that it explains, of the GAN the exponential of minus the errors of mean and covariance. Of "
    f"each version: the mean score of {SEEDS} seeds, its difference to fp32's, in parentheses that of the "
    "worst seed, then the share of the elements of gradients that became zero (every tenth batch), and "
    "repeats, lost batches and warnings where there are any, the sums over seeds. ✗ where the differences to "
    f"fp32 of the same seed have a mean that is below zero by more than {_RESOLUTION:g} and twice its "
    "standard error; the last column says *worse* or *better* where those of now to before are as far from "
    "zero. Nets that explode are chaotic: the same seed comes to something else after the least rounding."
)
_GRADIENTS_NOTE = (
    f"{UPDATES_BEFORE} updates in fp32 without scaling, with a tenth of the learning rate, the same for "
    "both versions; then one batch, "
    f"{UPDATES_TO_SETTLE} times or more with a learning rate of 0, and of the last pass the relative error "
    "(L2) of the gradient of each leaf: parameters, inputs (of a recurrent net those of three steps), and "
    "first states. *All* is against fp32. *Backward* is against a backward in fp32 over the same rounded "
    "activations (for fp8_hybrid in float16 of a wider range): look at it where rounding forward changes "
    "all, as in nets that explode. Of transformers each row is the worst leaf of a block. ⚠ where the error "
    f"now is more than {_TIMES:g} times that before, and more than {_TINY_ERROR:g}."
)
_SUMMARY_NOTE = (
    "Of each version: how many components there are; the kind of the last pass; of the backward error the "
    "median and the largest over the leaves; the share of the elements of all gradients that became zero, in "
    "percent, and the variable of which most did, by its number; and the same share in eight parts from the "
    "inputs to the loss."
)


def table(lines: List[Line]) -> str:
    """Write trainings, then gradients, with the versions side by side."""
    trainings = [line for line in lines if line["part"] == TRAINING]
    gradients = [line for line in lines if line["part"] == GRADIENTS]
    made = {
        label: sorted({line["checkout"] for line in lines if line["method"] == label}) for label in LABELS
    }
    told = "; ".join(f"{label}: checkout {', '.join(of)}" for label, of in made.items() if of)
    parts = [
        "# Where more of the network has one scale\n",
        "Made by `python benchmarks/study.py joined` and `python benchmarks/study.py joined --gradients`, "
        "once with each version.\n",
        paragraph(_NOTE),
        f"{len(trainings)} trainings and {len(gradients)} looks at gradients are there ({told or 'none'}).\n",
        *_of_trainings(trainings),
        *_of_gradients(gradients),
    ]
    errors = dict.fromkeys(
        f"- {line['part']}, {line['net']}, {line['storage']}, {line['method']}: {line['error']}\n"
        for line in lines
        if line["error"]
    )
    return "\n".join([*parts, *(["## What ended with an error\n", *errors] if errors else [])])


class Cell(NamedTuple):
    """Results of a training's seeds."""

    scores: Mapping[int, Optional[float]]
    underflow: float
    counts: Mapping[str, int]

    @property
    def mean(self) -> Optional[float]:
        """Mean score; None if a training failed."""
        known = [score for score in self.scores.values() if score is not None]
        return mean(known) if known and len(known) == len(self.scores) else None


def _cell(lines: Sequence[Line]) -> Cell:
    counts = {field: sum(line.get(field, 0) for line in lines) for field in ("repeats", "lost")}
    counts["warnings"] = sum(len(line["warnings"]) for line in lines)
    scores = {line["seed"]: line.get("score") for line in lines}
    return Cell(scores, mean(line.get("underflow", 0.0) for line in lines), counts)


def _of_trainings(lines: Sequence[Line]) -> List[str]:
    found: Dict[Tuple[str, str, str], List[Line]] = {}
    for line in lines:
        found.setdefault((line["net"], line["storage"], line["method"]), []).append(line)
    cells = {key: _cell(of) for key, of in found.items()}
    worse = dict.fromkeys(LABELS, 0)
    whole = dict.fromkeys(LABELS, 0)
    counts: Dict[str, Dict[str, int]] = {label: {} for label in LABELS}
    changed: Dict[str, int] = {"worse": 0, "better": 0}
    body: Dict[str, List[List[str]]] = {}
    for net, program in PROGRAMS.items():
        reference = cells.get((net, "float32", REFERENCE))
        if reference is None or reference.mean is None:
            continue
        for storage in STORAGES:
            mine = {label: cells.get((net, storage, label)) for label in LABELS}
            if not any(mine.values()):
                continue
            row = [f"{program.title}; {net}", f"{reference.mean:.3f}"]
            for label, cell in mine.items():
                if cell is not None:
                    failed = _change(reference, cell) == "worse"
                    worse[label] += failed
                    whole[label] += 1
                    for field, number in cell.counts.items():
                        counts[label][field] = counts[label].get(field, 0) + number
                row.append("" if cell is None else _mark(cell, reference, failed=failed))
            mark = _change(*mine.values())
            if mark:
                changed[mark] += 1
            body.setdefault(storage, []).append([*row, mark])
    if not body:
        return []
    head = ["", "trainings, 3 seeds each", "✗ worse than fp32", "repeats", "lost batches", "warnings"]
    summary = [
        [label, str(whole[label]), str(worse[label]), *map(str, counts[label].values())]
        for label in LABELS
        if whole[label]
    ]
    text = f"Now is worse than before in {changed['worse']} cells, and better in {changed['better']}.\n"
    parts = ["## Trainings\n", paragraph(_TRAINING_NOTE), rows(head, summary), text]
    for storage, of in body.items():
        parts += [f"### {storage}\n", rows(["", REFERENCE, *LABELS, "now"], of)]
    return parts


def _mark(cell: Cell, reference: Cell, *, failed: bool) -> str:
    if cell.mean is None:
        return "✗ error"
    differences = _differences(reference, cell)
    told = [f"{name} {number}" for name, number in cell.counts.items() if number]
    first = f"{'✗' if failed else '✓'} {cell.mean:.3f} {mean(differences):+.3f} ({min(differences):+.3f})"
    return ", ".join([first, f"{100.0 * cell.underflow:.2g} %", *told])


def _differences(before: Cell, now: Cell) -> List[float]:
    """Differences, now minus before, of the scores of common seeds."""
    pairs = [(before.scores.get(seed), score) for seed, score in now.scores.items()]
    return [new - old for old, new in pairs if old is not None and new is not None]


def _change(before: Optional[Cell], now: Optional[Cell]) -> str:
    """Return "worse" or "better", or "" for neither."""
    if before is None or now is None or before.mean is None:
        return ""
    if now.mean is None:
        return "worse"
    differences = _differences(before, now)
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    far = _RESOLUTION + 2.0 * error
    middle = mean(differences)
    return "worse" if middle < -far else "better" if middle > far else ""


_ERRORS = {"errors": "all", "rounding_errors": "backward"}


def _of_gradients(lines: Sequence[Line]) -> List[str]:
    found: Dict[Tuple[str, str], Dict[str, Line]] = {}
    for line in lines:
        if not line["error"]:
            found.setdefault((line["net"], line["storage"]), {})[line["method"]] = line
    if not found:
        return []
    body = []
    for (net, storage), of in found.items():
        flags = sum(any(_flagged(of, leaf, field) for field in _ERRORS) for leaf in _leaves(of))
        told = f"{flags} of {len(_leaves(of))}" if len(of) > 1 else ""
        for label in LABELS:
            if label in of:
                body.append([f"{net}, {storage}", label, *_summary(of[label]), told * (label == LABELS[-1])])
    parts = ["## Gradients\n", paragraph(_GRADIENTS_NOTE), paragraph(_SUMMARY_NOTE)]
    parts.append(rows(["", "", *_SUMMARY, "⚠"], body))
    head = ["leaf", "norm"]
    head += [f"{title}, {label}" for title in _ERRORS.values() for label in LABELS]
    head += [*(f"became zero, {label}" for label in LABELS), "⚠"]
    for key, of in found.items():
        parts += [f"### {', '.join(key)}\n", rows(head, [_leaf_row(of, leaf) for leaf in _shown(of)])]
    return parts


_SUMMARY = ("components", "kind", "median error", "largest", "became zero", "most", "by depth")


def _summary(line: Line) -> List[str]:
    errors = [error for error in line["rounding_errors"].values() if error is not None]
    nonzero, flushed = np.sum(line["flushed_by_depth"], axis=0)
    where, share, outputs = line["flushed_most"]
    by_depth = [f"{100.0 * lost / max(1, of):.2g}" for of, lost in line["flushed_by_depth"]]
    return [
        str(line["components"]),
        line["kind"],
        f"{median(errors):.2g}",
        f"{max(errors):.2g}",
        f"{100.0 * flushed / max(1, nonzero):.2g}",
        f"{100.0 * share:.2g}: {where} of {outputs}" if share else "",
        " ".join(by_depth),
    ]


def _leaves(of: Mapping[str, Line]) -> List[str]:
    return list(next(iter(of.values()))["errors"])


def _shown(of: Mapping[str, Line]) -> List[str]:
    """Leaves in the table: of each block the one with the largest error, and those outside blocks."""
    worst: Dict[str, str] = {}
    for leaf in _leaves(of):
        first = leaf.split("/")[0]
        group = first if first.startswith("block") else leaf
        if group not in worst or _rank(of, leaf) > _rank(of, worst[group]):
            worst[group] = leaf
    return list(worst.values())


def _rank(of: Mapping[str, Line], leaf: str) -> Tuple[bool, float]:
    flagged = any(_flagged(of, leaf, field) for field in _ERRORS)
    return flagged, max(line["rounding_errors"][leaf] or 0.0 for line in of.values())


def _flagged(of: Mapping[str, Line], leaf: str, field: str) -> bool:
    before, now = ((of[label][field][leaf] if label in of else None) for label in LABELS)
    return before is not None and now is not None and now > max(_TIMES * before, _TINY_ERROR)


def _leaf_row(of: Mapping[str, Line], leaf: str) -> List[str]:
    norm = next(iter(of.values()))["norms"][leaf]
    row = [leaf, f"{norm:.2g}"]
    for field in _ERRORS:
        for label in LABELS:
            error = of[label][field][leaf] if label in of else None
            row.append("" if error is None else f"{error:.2g}")
    for label in LABELS:
        nonzero, flushed = of[label]["flushed"][leaf] if label in of else (0, 0)
        row.append(f"{100.0 * flushed / nonzero:.2g} %" if nonzero else "")
    flags = [title for field, title in _ERRORS.items() if _flagged(of, leaf, field)]
    return [*row, f"⚠ {', '.join(flags)}" if flags else ""]
