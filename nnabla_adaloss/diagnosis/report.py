# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as text, for a terminal, and as a page that needs nothing else."""

from __future__ import annotations

import math
import textwrap
from html import escape
from typing import List, Optional, Sequence, Tuple

from .causes import Cause
from .numbers import Kept, LayerNumbers, NetworkNumbers, Way
from .verdicts import LayerVerdict, Verdict, power

_WIDTH = 110

# The ways that are worth a column.
_COLUMNS = (Way.NONE, Way.START, Way.END, Way.ADAPTIVE)

# Blue and orange: told apart whatever one's colour vision; marks say the same without colour.
_STYLE = """
:root { color-scheme: light; --good: #1f6fb4; --bad: #b45309; --line: #d4d4d4; --bar: #f2a65a; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
  max-width: 76rem; padding: 1.5rem; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.sub { color: #555; margin: 0 0 1rem; }
.verdict { border-left: .4rem solid var(--good); background: #f2f7fb;
  padding: .75rem 1rem; font-size: 1.15rem; overflow-wrap: anywhere; }
.verdict.bad { border-color: var(--bad); background: #fdf4ea; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; min-width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th[scope=row], td.words { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
th.group { text-align: center; } th.group, .first { border-left: 2px solid var(--line); }
.cell { position: relative; } .cell i { position: absolute; left: 0; bottom: 0; height: 4px;
  background: var(--bar); border-right: 3px solid #fff; box-sizing: border-box; }
.fails { color: var(--bad); font-weight: 600; } .fails::after { content: " ✗"; }
.keeps::after { content: " ✓"; color: var(--good); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt { font-weight: 600; } dd { margin: 0; }
@media print { body { padding: 0; font-size: 10pt; max-width: none; } .scroll { overflow: visible; }
  table { font-size: 7.5pt; } th, td { padding: .15rem .3rem; }
  tr { break-inside: avoid; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def as_text(network: NetworkNumbers, verdict: Verdict) -> str:
    """The verdict, what is wrong, a table of numbers, and a line for each layer."""
    loss = f"loss {network.stored_loss:.6g} (fp32: {network.loss:.6g})"
    lines = [f"{network.storage} beside fp32, {_batches(network)}; {loss}", ""]
    lines += [*_paragraph(network.note), *_paragraph(verdict.line)]
    for cause in _other_causes(verdict):
        lines += _paragraph(f"- {cause}", "  ")
    if not network.layers:
        return "\n".join(lines)
    lines += ["", *_text_table(network, verdict), ""]
    lines += [f"{word:>12}: {meaning}" for word, meaning in _legend(network)]
    lines.append("")
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


def _text_table(network: NetworkNumbers, verdict: Verdict) -> List[str]:
    headings = _cells([_heading(way, network) for way in _COLUMNS])
    first = max([len("layer"), *(len(layer.name) for layer in network.layers)])
    group = len(headings)
    lines = [
        f"{'':{first}} {'underflow':^{group}}   {'error':^{group}}  right",
        f"{'layer':{first}} {headings}   {headings}  scale",
    ]
    for layer, judged in zip(network.layers, verdict.layers):
        lost = _cells([_share(layer.kept[way].underflow) for way in _COLUMNS])
        errors = _cells([_error(layer.kept[way]) for way in _COLUMNS])
        lines.append(f"{layer.name:{first}} {lost}   {errors}  {_scale(judged.right_scale)}")
    return lines


def _cells(texts: Sequence[str]) -> str:
    return " ".join(f"{text:>9}" for text in texts)


def as_page(network: NetworkNumbers, verdict: Verdict) -> str:
    """The page, as HTML."""
    loss = f"loss {network.stored_loss:.6g} as stored, {network.loss:.6g} in fp32"
    title = f"Gradients in {network.storage}, beside fp32"
    bad = " bad" if verdict.needs is None else ""
    causes = "".join(f"<li>{escape(str(cause))}</li>" for cause in _other_causes(verdict))
    listed = f"<h2>What else was found</h2><ul>{causes}</ul>" if causes else ""
    words = [*_legend(network), ("✓ ✗", "whether the gradient is good enough to train with")]
    explained = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in words)
    heads = ""
    for way in _COLUMNS:
        name = ("scale " if way in (Way.START, Way.END) else "") + _heading(way, network)
        heads += f'<th scope="col" class="{_group(way)}">{escape(name)}</th>'
    rows = "".join(map(_row, network.layers, verdict.layers))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="sub">{escape(f"{_batches(network)}; {loss}")}</p>'
        f'<p>{escape(network.note)}</p><p class="verdict{bad}">{escape(verdict.line)}</p>{listed}'
        '<h2>Layer by layer</h2><div class="scroll" tabindex="0" role="region" aria-label="Layers">'
        '<table><thead><tr><th scope="col" rowspan="2">layer</th><th scope="col" rowspan="2">verdict</th>'
        '<th scope="col" rowspan="2">right scale</th>'
        f'<th class="group" scope="colgroup" colspan="{len(_COLUMNS)}">underflow</th>'
        f'<th class="group" scope="colgroup" colspan="{len(_COLUMNS)}">error of the weight gradient</th>'
        f"</tr><tr>{heads * 2}</tr></thead><tbody>{rows}</tbody></table></div><dl>{explained}</dl>"
        "</main></body></html>\n"
    )


def _row(layer: LayerNumbers, judged: LayerVerdict) -> str:
    cells = (
        f'<th scope="row">{escape(layer.name)}</th><td class="words">{escape(judged.line)}</td>'
        f"<td>{escape(_scale(judged.right_scale))}</td>"
    )
    for way in _COLUMNS:
        lost = layer.kept[way].underflow
        bar = f'<i style="width:{100.0 * lost:.1f}%"></i>'
        cells += f'<td class="cell {_group(way)}">{escape(_share(lost))}{bar}</td>'
    for way in _COLUMNS:
        mark = "keeps" if way in judged.serves else "fails"
        cells += f'<td class="{mark} {_group(way)}">{escape(_error(layer.kept[way]))}</td>'
    return f"<tr>{cells}</tr>"


def _group(way: Way) -> str:
    """The class of a cell: the first of each group stands apart."""
    return "first" if way is _COLUMNS[0] else "inner"


# What both say.


def _batches(network: NetworkNumbers) -> str:
    return f"{network.batches} batch{'es' if network.batches != 1 else ''}"


def _other_causes(verdict: Verdict) -> Sequence[Cause]:
    """Causes that the verdict does not mention."""
    return [cause for cause in verdict.causes if str(cause) not in verdict.line]


def _heading(way: Way, network: NetworkNumbers) -> str:
    """What a column is called: the scale, or the name of the way."""
    return power(network.scales[way]) if way in (Way.START, Way.END) else str(way.value)


def _legend(network: NetworkNumbers) -> Sequence[Tuple[str, str]]:
    """What the words of the table mean."""
    return [
        ("underflow", "elements of a layer's gradients that are 0 as stored but not in fp32"),
        ("error", "of the weight gradient, relative to fp32; inf: the share that overflows"),
        ("right scale", "the largest power of two that leaves two bits of headroom"),
        ("none", "without scaling"),
        (_heading(Way.START, network), "the scale that nnabla's DynamicLossScalingUpdater starts with"),
        (_heading(Way.END, network), "the largest scale without overflow, where it would end"),
        ("adaptive", "AdaptiveLossScalingUpdater at its defaults"),
        ("not checked", "whether labels are right, and whether the loss says what is to be learned"),
    ]


def _share(value: float) -> str:
    """A share in percent; what is not zero does not look like zero."""
    if not math.isfinite(value):
        return "-"
    if 0.0 < value < 0.0005:
        return "<0.1%"
    return f"{value:.1%}" if value < 10.0 else ">1000%"


def _error(kept: Kept) -> str:
    """The error, or the share of elements that overflow."""
    return f"inf {_share(kept.overflow)}" if kept.overflow else _share(kept.error)


def _scale(scale: Optional[float]) -> str:
    return "-" if scale is None else power(scale)
