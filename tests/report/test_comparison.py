# SPDX-License-Identifier: Apache-2.0
"""The page of two recordings shows what differs first, and takes no name for markup."""

from __future__ import annotations

import re
from typing import Any, List

from nnabla_adaloss import BatchThrownAway, LayerRow, Recording, UpdateEnded
from nnabla_adaloss.report.page import comparison_of, page_of

from .parsed import EVIL, Parsed
from .test_page import BEGAN


def recording(scale: float, underflowed: int, lost: int = 0, only: str = "") -> Recording:
    """Two layers, of which `b` loses something, and another that only this recording has."""
    rows: List[Any] = []
    for i in range(1, 5):
        for name, gone in (("a", 0), ("b", underflowed), *([(only, 0)] if only else [])):
            rows.append(LayerRow(i, 0, name, 2.0, 2.0 * scale, "method", 100, gone, 0, gone, 0, 0))
        rows.append(UpdateEnded(i, True, "updated", scale, 0, 1 / i))
    return Recording(rows + [BatchThrownAway(4, "overflow", (), lost)] * bool(lost))


def compared(first: Recording, second: Recording) -> Parsed:
    return Parsed(comparison_of({"one": first, "two": second}, "one and two"))


def test_differences_come_first() -> None:
    page = compared(recording(8.0, 0, only="x"), recording(4096.0, 30, lost=2))
    differ = {row[0]: row[1:] for row in page.tables["Results that differ"]}
    assert differ["result"] == ["one", "two"]
    assert differ["lost batches"] == ["0", "2 (2 overflow)"]
    assert differ["loss scale S0 at the end"] == ["8", "2^12"]
    assert differ["layers recorded"] == ["3", "2"]
    assert ["loss at the end", "0.25", "0.25"] in page.tables["Results that are the same"]
    assert page.folded == ["Results that are the same"]
    assert page.texts("h2")[:3] == ["Differences", "Loss scale S0", "Loss"]
    head, *rows = page.tables["The layers"]
    assert head[1:] == [
        f"{what}, {run}" for what in ("alpha", "S", "worst underflow") for run in ("one", "two")
    ]
    assert rows == [
        ["x", "2", "–", "16", "–", "0 %", "–"],
        ["b", "2", "2", "16", "2^13", "0 %", "30 %"],
        ["a", "2", "2", "16", "2^13", "0 %", "0 %"],
    ]
    assert compared(recording(8.0, 1), recording(8.0, 1)).tables.keys().isdisjoint(["Results that differ"])


def test_settings_that_differ_come_first_and_equal_ones_are_folded() -> None:
    later = BEGAN._replace(date="2026-02-03T04:05:06+00:00", settings={**BEGAN.settings, "hysteresis": "2"})
    page = compared(*(Recording([began, *recording(8.0, 0).rows]) for began in (BEGAN, later)))
    assert page.tables["Settings that differ"] == [["setting", "one", "two"], ["hysteresis", "–", "2"]]
    assert ["N", "2000", "2000"] in page.tables["Settings that are the same"]
    assert page.folded == ["Settings that are the same", "Results that are the same"]
    # A date is no setting.
    assert page.texts("li")[:2] == ["one: 2026-01-02 03:04", "two: 2026-02-03 04:05"]


def test_uncounted_overflows_are_not_zero_overflows() -> None:
    unknown = [row._replace(underflowed=None) for row in recording(8.0, 0).of(LayerRow)]
    tables = compared(recording(8.0, 0), Recording(unknown)).tables
    assert ["worst underflow", "0 %, b", "not counted"] in tables["Results that differ"]
    assert ["a", "2", "2", "16", "16", "0 %", "not counted"] in tables["The layers"]


def test_both_runs_are_in_each_picture() -> None:
    parsed = compared(recording(8.0, 0), recording(4096.0, 30))
    told = [picture["aria-label"] for picture in parsed.of("svg") if picture.get("class") == "curve"]
    assert told[0] == "one: 8 at first, 8 at the end; two: 2^12 at first, 2^12 at the end; from 8 to 2^12"
    assert len(parsed.of("path")) == 2 * (2 + 2)  # lines and their samples
    strips = [picture["aria-label"] or "" for picture in parsed.of("div") if picture.get("class") == "strip"]
    assert [told.split(":")[0] for told in strips if "%" in told] == ["b, one", "b, two", "a, one", "a, two"]
    assert "iterations 1 to 4: one: 8; two: 2^12" in parsed.words
    # One line alone needs no sample.
    assert len(re.findall("<path d=", page_of(recording(8.0, 0), "run"))) == 2


def test_a_run_without_losses_leaves_the_other_its_colour() -> None:
    parsed = compared(Recording(recording(8.0, 0).of(LayerRow)), recording(8.0, 0))
    lines = [path["d"] for path in parsed.of("path") if "vector-effect" in path]
    assert [bool(line) for line in lines] == [False, True] * 2
    told = [picture["aria-label"] for picture in parsed.of("svg") if picture.get("class") == "curve"]
    assert told[1] == "two: 1 at first, 0.25 at the end; from 0.25 to 1"


def test_names_are_no_markup() -> None:
    run = Recording([UpdateEnded(1, True, "updated", 8.0, 0, 0.5)])
    parsed = Parsed(comparison_of({EVIL: run, "b": run}, EVIL))
    assert not parsed.of("script")
    assert EVIL in parsed.words
