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


def test_what_differs_comes_first() -> None:
    text = compared(recording(8.0, 0, only="x"), recording(4096.0, 30, lost=2)).text
    differs, same = text.split("What is the same", 1)
    for fact in ("batches lost 0 2: 2 overflow", "loss scale S0 at the end 8 2¹²", "layers recorded 3 2"):
        assert fact in differs
    assert "loss at the end 0.25 0.25" in same
    order = [text.index(title) for title in ("Results that differ", " Loss scale S0 ", "What is the same")]
    assert order == sorted(order), "curves stand above what is the same"
    body = text.split("one underflow at worst, two ", 1)[1].split(" Accumulated scale S ")[0]
    # Layer, alpha, S and underflow at worst, of one run and the other.
    rows = re.findall(r"(\w) (\S+) (\S+) (\S+) (\S+) (\d+ %|–) (\d+ %|–)", body)
    assert rows == [
        ("x", "2", "–", "16", "–", "0 %", "–"),
        ("b", "2", "2", "16", "2¹³", "0 %", "30 %"),
        ("a", "2", "2", "16", "2¹³", "0 %", "0 %"),
    ]
    alike = compared(recording(8.0, 1), recording(8.0, 1)).words
    assert "Results that differ" not in alike
    assert "Results that are the same" in alike


def test_the_settings_that_differ_come_first() -> None:
    runs = [
        Recording([BEGAN._replace(settings={**BEGAN.settings, **own}), *recording(8.0, 0).rows])
        for own in ({}, {"storage": "bfloat16", "hysteresis": "2"})
    ]
    text = compared(*runs).text
    differ, rest = text.split("What is the same", 1)
    assert "Settings that differ setting one two storage float16 bfloat16 hysteresis – 2" in differ
    assert "Settings that are the same" in rest
    assert "N 2000 2000" in rest


def test_what_was_not_counted_is_not_none() -> None:
    unknown = [row._replace(underflowed=None) for row in recording(8.0, 0).of(LayerRow)]
    text = compared(recording(8.0, 0), Recording(unknown)).text
    assert "worst underflow 0 %, b not counted" in text
    assert "a 2 2 16 16 0 % not counted" in text


def test_both_runs_are_in_each_picture() -> None:
    parsed = compared(recording(8.0, 0), recording(4096.0, 30))
    told = [picture["aria-label"] for picture in parsed.of("svg") if picture.get("class") == "curve"]
    assert told[0] == "one: 8 at first, 8 at the end; two: 2¹² at first, 2¹² at the end; from 8 to 2¹²"
    assert len(parsed.of("path")) == 2 * (2 + 2)  # lines and their samples
    strips = [picture["aria-label"] or "" for picture in parsed.of("div") if picture.get("class") == "strip"]
    assert [told.split(":")[0] for told in strips if "%" in told] == ["b, one", "b, two", "a, one", "a, two"]
    assert "iterations 1 to 4: one: 8; two: 2¹²" in parsed.words
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
