# SPDX-License-Identifier: Apache-2.0
"""How a page looks: on a screen, on a phone, on paper; and colours that are distinct for everybody."""

from __future__ import annotations

from itertools import groupby
from typing import Optional, Sequence

import numpy as np

STYLE = """\
:root { color-scheme: light; --ink: #1b2733; --faint: #4b5a69; --rule: #c9d1d9; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 70rem; background: #fff; color: var(--ink);
  font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 48rem; }
section > p, caption { color: var(--faint); }
section > ul { padding-left: 1.25rem; max-width: 48rem; overflow-wrap: anywhere; }
.facts { list-style: none; margin: 1rem 0; padding: 0; display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.facts li { border: 1px solid var(--rule); border-radius: .4rem; padding: .5rem .75rem; }
.facts b { display: block; font-size: 1.25rem; overflow-wrap: anywhere; }
.line { display: grid; grid-template-columns: 13rem 1fr; gap: .75rem; align-items: center; }
.name { font-size: .85rem; line-height: 1.2; text-align: right; overflow-wrap: anywhere; }
.strip { height: 1.35rem;
  background: var(--colours), repeating-linear-gradient(135deg, #fff 0 4px, #d4d9de 4px 5px); }
.plot > .line { margin-bottom: 2px; }
.line > div { position: relative; }
.tips { position: absolute; inset: 0; width: 100%; height: 100%; }
.tips rect { fill: transparent; }
.tips rect:hover { fill: #fff6; stroke: var(--ink); vector-effect: non-scaling-stroke; }
.curve { display: block; width: 100%; height: 11rem; border: solid var(--rule); border-width: 0 0 1px 1px; }
.curve path, .sample path { fill: none; stroke: #26547c; stroke-width: 1.75; stroke-linejoin: round; }
.curve path + path, .lines li + li path { stroke: #b4540a; stroke-dasharray: 5 3; }
.lines { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; padding: 0; }
.sample { width: 28px; height: 8px; }
.heights { align-self: stretch; display: flex; flex-direction: column; justify-content: space-between; }
.marks { display: block; width: 100%; height: 1.6rem; overflow: visible;
  border-bottom: 1px solid var(--rule); }
.marks path { fill: none; stroke-width: 2; }
.triangle path { fill: #b4540a; stroke: #b4540a; }
.ring path { stroke: #26547c; }
.cross path { stroke: #8c1d4f; stroke-width: 2.5; }
.ticks { display: flex; justify-content: space-between; gap: .5rem; font-size: .8rem; color: var(--faint);
  font-variant-numeric: tabular-nums; }
.axis { color: var(--faint); }
.key { margin: .75rem 0 0 13.75rem; max-width: 22rem; }
.key .strip { height: .7rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
.wide:focus-visible { outline: 2px solid #26547c; outline-offset: 2px; }
table { border-collapse: collapse; min-width: min(24rem, 100%); font-size: .85rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .35rem; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap; vertical-align: top; }
th:first-child, .words th, .words td { text-align: left; }
.words td:last-child { white-space: normal; min-width: 14rem; }
thead th { border-bottom: 1px solid var(--ink); white-space: normal; vertical-align: bottom; }
tbody th { font-weight: normal; }
tbody tr { border-bottom: 1px solid var(--rule); }
footer { margin-top: 3rem; font-size: .85rem; color: var(--faint); }
@media (max-width: 40rem) {
  body { padding: 1rem .9rem 3rem; }
  .line { grid-template-columns: 1fr; gap: .1rem; }
  .plot > .line { margin-bottom: .5rem; }
  .name { text-align: left; }
  .heights { flex-direction: row; }
  .heights span:first-child:not(:only-child)::before { content: "highest: "; }
  .heights span + span::before { content: "lowest: "; }
  .axis .name { display: none; }
  .key { margin-left: 0; }
  .many thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .many, .many caption, .many tbody, .many tr, .many th, .many td { display: block; }
  .many tr { padding: .4rem 0; }
  .many tbody :is(th, td) { display: flex; justify-content: space-between; gap: 1rem; padding: .05rem 0;
    white-space: normal; text-align: right; overflow-wrap: anywhere; min-width: 0; }
  .many :is(th, td)[data-head]::before { content: attr(data-head); color: var(--faint); text-align: left;
    flex: none; max-width: 55%; }
  .many tbody th { font-weight: bold; }
  .many :is(th, td):empty { display: none; }
}
@media print {
  @page { margin: 14mm; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  h2, section > p { break-after: avoid; }
  .line, .plot, tr, .facts li { break-inside: avoid; }
  .line { grid-template-columns: 9.5rem 1fr; }
  .key { margin-left: 10.25rem; }
  .curve { height: 7rem; }
  .wide { overflow: visible; }
  th, td { white-space: normal; padding-right: .5rem; }
}
"""

# Viridis at 17 places (S. van der Walt and N. Smith, CC0): its lightness rises evenly, also for those who
# see few colours, and in print without any.
_VIRIDIS = bytes.fromhex(
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c "
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
)


def viridis(value: Optional[float]) -> str:
    """The colour of a value between 0 (dark) and 1 (light); None is clear."""
    if value is None:
        return "#0000"
    parts = (np.interp(16.0 * value, range(17), list(_VIRIDIS[part::3])) for part in range(3))
    return "#" + "".join(f"{round(float(part)):02x}" for part in parts)


def strip(values: Sequence[Optional[float]]) -> str:
    """Colours side by side, one for each value, as a picture of CSS."""
    stops, end = [], 0.0
    for colour, run in groupby(map(viridis, values)):
        start, end = end, end + 100.0 * len(list(run)) / len(values)
        stops.append(f"{colour} {start:.4g}%,{colour} {end:.4g}%")
    return f"linear-gradient(90deg,{','.join(stops)})"
