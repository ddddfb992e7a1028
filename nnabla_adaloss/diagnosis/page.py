# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as a page that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import List, Sequence

from .numbers import LayerNumbers, NetworkNumbers, Way
from .text import COLUMNS, error_text, heading, legend, other_causes, scale_text, share
from .verdicts import LayerVerdict, Verdict

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
th[scope=row], td.words, th.words { text-align: left; } td.words { white-space: normal; }
th[scope=row] { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
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


def as_page(network: NetworkNumbers, verdict: Verdict) -> str:
    """The page, as HTML."""
    batches = f"{network.batches} batch{'es' if network.batches != 1 else ''}"
    subtitle = f"{batches}; loss {network.stored_loss:.6g} as stored, {network.loss:.6g} in fp32"
    title = f"Gradients in {network.storage}, beside fp32"
    bad = " bad" if verdict.needs is None else ""
    causes = "".join(f"<li>{escape(str(cause))}</li>" for cause in other_causes(verdict))
    listed = f"<h2>What else was found</h2><ul>{causes}</ul>" if causes else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>'
        f'<p class="verdict{bad}">{escape(verdict.line)}</p>{listed}'
        f"<h2>Layer by layer</h2>{_sentences(verdict)}"
        f"<h2>What was measured</h2>{_table(network, verdict)}{_legend(network)}"
        "</main></body></html>\n"
    )


def _sentences(verdict: Verdict) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(layer.name)}</th><td>{escape(scale_text(layer.right_scale))}</td>'
        f'<td class="words">{escape(layer.line)}</td></tr>'
        for layer in verdict.layers
    )
    return (
        '<table><thead><tr><th scope="col" class="words">layer</th><th scope="col">right scale</th>'
        f'<th scope="col" class="words">verdict</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _table(network: NetworkNumbers, verdict: Verdict) -> str:
    ways = COLUMNS
    names = [_column(way, network) for way in ways] * 2
    heads = "".join(
        f'<th scope="col" class="{_group(index, len(ways))}">{escape(name)}</th>'
        for index, name in enumerate(names)
    )
    rows = "".join(_row(layer, judged, ways) for layer, judged in zip(network.layers, verdict.layers))
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Layers"><table><thead><tr>'
        '<th scope="col" rowspan="2" class="words">layer</th>'
        f'<th class="group" scope="colgroup" colspan="{len(ways)}">underflow</th>'
        f'<th class="group" scope="colgroup" colspan="{len(ways)}">error of the weight gradient</th>'
        f"</tr><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _column(way: Way, network: NetworkNumbers) -> str:
    name = heading(way, network)
    return f"scale {name}" if way in (Way.START, Way.END) else name


def _row(layer: LayerNumbers, judged: LayerVerdict, ways: Sequence[Way]) -> str:
    cells: List[str] = [f'<th scope="row">{escape(layer.name)}</th>']
    for index, way in enumerate(ways):
        lost = layer.kept[way].underflow
        cells.append(
            f'<td class="cell {_group(index, len(ways))}">{escape(share(lost))}'
            f'<i style="width:{100.0 * lost:.1f}%"></i></td>'
        )
    for index, way in enumerate(ways):
        mark = "keeps" if way in judged.serves else "fails"
        text = escape(error_text(layer.kept[way]))
        cells.append(f'<td class="{mark} {_group(index, len(ways))}">{text}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _group(index: int, count: int) -> str:
    """The class of a cell: the first of each group stands apart."""
    return "inner" if index % count else "first"


def _legend(network: NetworkNumbers) -> str:
    entries = "".join(
        f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in legend(network)
    )
    return f"<dl>{entries}<dt>✓ ✗</dt><dd>whether the gradient is good enough to train with</dd></dl>"
