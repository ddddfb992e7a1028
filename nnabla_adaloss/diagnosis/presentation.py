# SPDX-License-Identifier: Apache-2.0
"""Diagnosis, the result of an examination: as text, as a self-contained page, and as data."""

from __future__ import annotations

import math
import os
import textwrap
from datetime import datetime
from functools import partial
from typing import Any, Dict, Iterator, Sequence, Tuple, Union

from ..core.power_of_two import scale_text
from ..report.pieces import bullets, document, paragraph, table
from ..state.whole_file import replace_page
from ..updaters.notifications import installed_version
from .passes import StorageEffect, Way
from .verdicts import NetworkNumbers, Verdict, verdict_of

Cells = Sequence[str]

_wrapped = partial(textwrap.wrap, width=110, break_on_hyphens=False, break_long_words=False)
_SHARES = "Shares and errors, layer by layer"
_NOT_JUDGED = (
    "Not judged, as numbers do not show them: learning rates beyond a solver's first steps, labels, initial "
    "weights, architecture, signs, a loss term far smaller than another in the same layers."
)


class Diagnosis:
    """Effect of a narrow storage format on the gradients of a network; `print` it.

    Args:
        numbers: the measurements.

    Attributes:
        numbers: all measurements, per layer.
        verdict: the conclusion: a headline, the least scaling needed, faults that no loss scale can fix, a
            line per layer, the needs of each format.
    """

    def __init__(self, numbers: NetworkNumbers) -> None:
        self.numbers: NetworkNumbers = numbers
        self.verdict: Verdict = verdict_of(numbers)

    def __str__(self) -> str:
        """Verdict, unfixable faults, tables of formats and layers, and a line for each layer."""
        network, verdict = self.numbers, self.verdict
        lines = [f"{network.storage} beside fp32, {_facts(network)}", "", *_wrapped(verdict.line)]
        for more in (*verdict.causes[1:], *network.notes):
            lines += _wrapped(f"- {more}", subsequent_indent="  ")
        for title, head, rows, has_sentences in _tables(network, verdict):
            lines.append("")
            if has_sentences:
                width = max(len(row[0]) for row in (head, *rows))
                for name, text in rows:
                    lines += _wrapped(f"{name:{width}}  {text}", subsequent_indent=" " * (width + 2))
                continue
            # "lost" and "error" stand in a line of their own, each above its half of the columns.
            every = [[name.rpartition(", ")[2] for name in head], *rows]
            first, *widths = (max(map(len, column)) for column in zip(*every))
            if title == _SHARES:
                half = sum(width + 2 for width in widths[:-1]) // 2
                lines.append(f"{'':{first}}  {'lost':^{half}}{'error':^{half}}".rstrip())
            for name, *cells in every:
                padded = (f"  {cell:>{width}}" for cell, width in zip(cells, widths))
                lines.append(f"{name:{first}}{''.join(padded)}".rstrip())
        return "\n".join([*lines, "", *_wrapped(_NOT_JUDGED)])

    def as_dict(self) -> Dict[str, Any]:
        """Numbers and verdicts as plain dicts, lists, strings and numbers; None for nonfinite ones."""
        numbers, verdict = self.numbers, self.verdict
        return {
            "verdict": verdict.line,
            "needs": None if verdict.needs is None else verdict.needs.value,
            "causes": [
                {**cause._asdict(), "spoils": [*cause.spoils], "parameters": [*cause.parameters]}
                for cause in verdict.causes
            ],
            "formats": {name: None if way is None else way.value for name, way in verdict.formats.items()},
            "storage": numbers.storage,
            "batches": numbers.batches,
            "notes": [note.in_full() for note in numbers.notes],
            "loss": _plain(numbers.loss),
            "stored_loss": _plain(numbers.stored_loss),
            "scales": {way.value: scale for way, scale in numbers.scales.items()},
            "layers": [
                {
                    "name": layer.name,
                    "type": layer.type_name,
                    "largest_gradient": _plain(layer.amax),
                    "nonzero_elements": layer.nonzero,
                    "error_with_gradients_in_fp32": _plain(layer.floor),
                    "right_scale": judged.right_scale,
                    "verdict": judged.line,
                    "ways": {
                        way.value: {name: _plain(value) for name, value in effect._asdict().items()}
                        for way, effect in layer.effects.items()
                    },
                }
                for layer, judged in zip(numbers.layers, verdict.layers)
            ],
        }

    def write_html(self, path: Union[str, os.PathLike[str]], name: str = "") -> None:
        """Write a self-contained page.

        Args:
            path: the file.
            name: the network's name on the page.

        Raises:
            ValueError: `path` exists and is not a page; it stays unchanged.
            OSError: the file cannot be written.
        """
        network, verdict = self.numbers, self.verdict
        # The headline is the first cause, or else the first sentence of the verdict.
        headline, end, rest = verdict.scaling.partition(". ")
        headline, text = f"{headline}{end}".rstrip(), paragraph(rest, "finding")
        if verdict.causes:
            cause, *others = verdict.causes
            headline = f"{cause.function}: {cause.what}"
            text = paragraph(f"{cause.remedy[0].upper()}{cause.remedy[1:]}.", "finding")
            text += paragraph(verdict.scaling) + bullets(map(str, others)) * bool(others)
        text += "".join(map(paragraph, map(str, network.notes)))
        about = [name] * bool(name) + [f"{network.storage} beside fp32", *_facts(network).split("; ")]
        about += [f"{datetime.now():%Y-%m-%d %H:%M}", f"nnabla_adaloss {installed_version()}"]
        every = _tables(network, verdict)
        tables = (table(title, head, rows, words=words) for title, head, rows, words in every)
        replace_page(path, document(headline, about, text, *tables, paragraph(_NOT_JUDGED)))


def _tables(network: NetworkNumbers, verdict: Verdict) -> Iterator[Tuple[str, Cells, Sequence[Cells], bool]]:
    """Title, head and rows of each table, and True if its cells contain sentences."""
    if not network.layers:
        return
    formats = [
        (name, *(_trains([one[way] for one in layers.values()], way in verdict.trains[name]) for way in Way))
        for name, layers in network.formats.items()
    ]
    what = "Whether each way of scaling trains the loss, and the largest error of a layer's gradient"
    yield what, ("format", *(way.value for way in Way)), formats, False
    one = scale_text(network.scales[Way.ONE])
    rows = []
    for layer, judged in zip(network.layers, verdict.layers):
        effects = [layer.effects[way] for way in Way]
        cells = [_share(one.underflow) for one in effects]
        cells += [f"inf {_share(one.overflow)}" if one.overflow else _share(one.error) for one in effects]
        cells = cells if layer.is_judged else ["-"] * len(cells)
        scale = "-" if judged.right_scale is None else scale_text(judged.right_scale)
        rows.append((layer.name, *cells, scale))
    ways = ("none", "65536", f"one {one}", "adaptive")
    head = [f"{what}, {way}" for what in ("lost", "error") for way in ways]
    yield _SHARES, ("layer", *head, "right scale"), rows, False
    meanings = [
        ("yes, no", "all layers train this way, and no fault above stops it; the largest error of gradients"),
        ("lost", "elements of a layer's gradients that are 0 as stored but not in fp32"),
        ("error", "of the weight gradient, relative to fp32; inf: the share that overflows"),
        ("none", "without scaling"),
        ("65536", "a constant scale"),
        ("one", f"one measured scale, {one} for these batches"),
        ("adaptive", "one measured scale per component: AdaptiveLossScalingUpdater at its defaults"),
        ("right scale", "the largest power of two that leaves two bits of headroom"),
    ]
    yield "What the words mean", ("word", "meaning"), meanings, True
    yield "Layer by layer", ("layer", "verdict"), [(one.name, one.line) for one in verdict.layers], True


def _facts(network: NetworkNumbers) -> str:
    """Number of batches, and the loss if it has been computed."""
    losses = f"; loss {network.stored_loss:.6g} (fp32: {network.loss:.6g})"
    return f"{network.batches} batch{'es' * (network.batches != 1)}{losses * (not math.isnan(network.loss))}"


def _trains(effects: Sequence[StorageEffect], trains: bool) -> str:
    """Cell of the table of formats: whether a way trains, and the largest error of all layers' `effects`."""
    if any(one.overflow for one in effects):
        return "no, overflows"
    worst, answer = max((one.error for one in effects), default=0.0), "yes" if trains else "no"
    return f"{answer}, {_share(worst)}" if trains or worst else answer


def _share(value: float) -> str:
    """Write a share in percent, a small one so that it does not look like zero."""
    if math.isinf(value):  # without an overflow, gradients are NaN
        return "NaN"
    if 0.0 < value < 0.0005:
        return "<0.1%"
    return f"{value:.1%}" if value < 10.0 else ">1000%"


def _plain(value: float) -> Any:
    return value if math.isfinite(value) else None
