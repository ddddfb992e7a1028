# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as text, for a terminal."""

from __future__ import annotations

import math
import textwrap
from typing import List, Optional, Sequence, Tuple

from .causes import Cause
from .numbers import Kept, NetworkNumbers, Way
from .verdicts import Verdict, power

_WIDTH = 110
_CELL = 9


COLUMNS = (Way.NONE, Way.START, Way.END, Way.ADAPTIVE)
"""The ways that are worth a column."""


def other_causes(verdict: Verdict) -> Sequence[Cause]:
    """Causes that the verdict does not mention."""
    return [cause for cause in verdict.causes if str(cause) not in verdict.line]


def heading(way: Way, network: NetworkNumbers) -> str:
    """What a column is called: the scale, or the name of the way."""
    if way in (Way.START, Way.END):
        return power(network.scales[way])
    return str(way.value)


def legend(network: NetworkNumbers) -> Sequence[Tuple[str, str]]:
    """What the words of the table mean."""
    return [
        ("underflow", "elements of a layer's gradients that are 0 as stored but not in fp32"),
        (
            "error",
            "of the weight gradient, relative to fp32; inf: the share that overflows",
        ),
        ("right scale", "the largest power of two that leaves two bits of headroom"),
        ("none", "without scaling"),
        (heading(Way.START, network), "the scale that nnabla's DynamicLossScalingUpdater starts with"),
        (heading(Way.END, network), "the largest scale without overflow, where it would end"),
        ("adaptive", "AdaptiveLossScalingUpdater at its defaults"),
    ]


def share(value: float) -> str:
    """A share in percent; what is not zero does not look like zero."""
    if not math.isfinite(value):
        return "-"
    if 0.0 < value < 0.0005:
        return "<0.1%"
    return f"{value:.1%}" if value < 10.0 else ">1000%"


def scale_text(scale: Optional[float]) -> str:
    """A scale, or a dash."""
    return "-" if scale is None else power(scale)


def as_text(network: NetworkNumbers, verdict: Verdict) -> str:
    """The verdict, what is wrong, a table of numbers, and a line for each layer."""
    batches = f"{network.batches} batch{'es' if network.batches != 1 else ''}"
    head = (
        f"{network.storage} beside fp32, {batches}; loss {network.stored_loss:.6g} (fp32: {network.loss:.6g})"
    )
    lines = [head, "", *_paragraph(verdict.line)]
    for cause in other_causes(verdict):
        lines += _paragraph(f"- {cause}", "  ")
    lines += ["", *_table(network, verdict), ""]
    width = max((len(layer.name) for layer in verdict.layers), default=0)
    judged = [layer for layer in verdict.layers if layer.judged]
    for layer in judged:
        lines += _paragraph(f"{layer.name:{width}}  {layer.line}", " " * (width + 2))
    others = [layer for layer in verdict.layers if not layer.judged]
    if others:
        which = "the layers" if not judged else "the other layers" if len(others) > 1 else others[0].name
        lines += _paragraph(f"{which}: {others[0].line}", "  ")
    return "\n".join(lines)


def _paragraph(text: str, indent: str = "") -> List[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def error_text(kept: Kept) -> str:
    """The error, or the share of elements that overflow."""
    return f"inf {share(kept.overflow)}" if kept.overflow else share(kept.error)


def _table(network: NetworkNumbers, verdict: Verdict) -> List[str]:
    ways = COLUMNS
    headings = _cells([heading(way, network) for way in ways])
    first = max([len("layer"), *(len(layer.name) for layer in network.layers)])
    group = len(headings)
    lines = [
        f"{'':{first}} {'underflow':^{group}}   {'error':^{group}}  right",
        f"{'layer':{first}} {headings}   {headings}  scale",
    ]
    for layer, judged in zip(network.layers, verdict.layers):
        lost = _cells([share(layer.kept[way].underflow) for way in ways])
        errors = _cells([error_text(layer.kept[way]) for way in ways])
        lines.append(f"{layer.name:{first}} {lost}   {errors}  {scale_text(judged.right_scale)}")
    lines.append("")
    lines += [f"{word:>12}: {meaning}" for word, meaning in legend(network)]
    return lines


def _cells(texts: Sequence[str]) -> str:
    return " ".join(f"{text:>{_CELL}}" for text in texts)
