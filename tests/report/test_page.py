# SPDX-License-Identifier: Apache-2.0
"""A page is one file, says in words what it shows in pictures, and takes no name for markup."""

from __future__ import annotations

import math
import re
from typing import Any, List, Tuple

import pytest

from nnabla_adaloss import (
    BatchRepeated,
    BatchThrownAway,
    LayerRow,
    Overflowed,
    Recording,
    ScaleChanged,
    TrainingBegan,
    UpdateEnded,
)
from nnabla_adaloss.report.page import page_of

from .parsed import EVIL, Parsed


def layer(iteration: int, name: str = "conv/conv", **fields: Any) -> LayerRow:
    known = {"elements": 100, "zeros": 10, "underflowed": 5, "overflowed": 0, "subnormals": 2, "nonfinite": 0}
    known |= {"headroom": 3, **fields}
    return LayerRow(iteration, 0, name, 2.0 ** (iteration % 8), 8.0, "method", **known)


def ended(iteration: int, loss: float, scale: float = 8.0) -> UpdateEnded:
    return UpdateEnded(iteration, True, "updated", scale, 0, loss)


BEGAN = TrainingBegan(1, "2026-01-02T03:04:05+00:00", "0.2.0", {"storage": "float16", "N": "2000"})


def recording() -> Recording:
    rows: List[Any] = []
    for i in range(1, 9):
        rows += [layer(i, "head/affine", underflowed=0), layer(i), ended(i, 1 / i)]
    rows += [
        BatchRepeated(9, 0, "overflow", ("conv/conv",)),
        Overflowed(9, 0, "overflow", ("conv/conv",), "", 8.0),
        BatchThrownAway(9, "nonfinite_loss", ("head/affine",), 2, "conv reads NaN"),
        ScaleChanged(9, 8.0, 4.0),
        UpdateEnded(9, False, "nonfinite_loss", 4.0, 1, math.nan),
    ]
    return Recording(rows)


def test_one_file_that_tells_its_pictures_in_words() -> None:
    page = page_of(recording(), "run.jsonl")
    assert not re.search(r"//|@import|url\(", page)
    parsed = Parsed(page)
    assert not parsed.of("script") + parsed.of("link") + parsed.of("img")
    assert parsed.of("html") == [{"lang": "en"}]
    strips = [picture for picture in parsed.of("div") if picture.get("class") == "strip"]
    # S is constant; alpha and underflow have two layers each, and a key.
    assert [bool(picture["aria-label"]) for picture in strips] == [True] * 6
    for picture in parsed.of("svg"):
        # A mark is told of by its line, and a value where the mouse is by its row.
        assert picture.get("aria-label") or "x" in picture or picture["aria-hidden"] == "true"
    assert [p["aria-label"] for p in parsed.of("svg") if p.get("class") == "curve"] == [
        "S0: 8 at first, 4 at the end; from 4 to 8",
        "loss: 1 at first, nan at the end; from 0.125 to 1",
    ]
    assert len(parsed.of("caption")) == len(parsed.of("table")) == 3
    assert all(cell.get("scope") in ("col", "row") for cell in parsed.of("th"))
    assert all(region["aria-label"] for region in parsed.of("div") if region.get("role") == "region")
    assert [tag for tag, _ in parsed.elements if re.fullmatch(r"h\d", tag)] == ["h1"] + ["h2"] * 7
    assert parsed.texts("h2")[:3] == ["Underflow", "Loss scale S0", "Loss"], "curves before scales"
    # On a phone the head of the table is not seen.
    assert '<td data-head="first bad layer">conv/conv</td>' in page
    assert '<table class="words many">' in page
    assert ".many thead" in page


def test_output_of_the_command() -> None:
    page = Parsed(page_of(recording(), "run.jsonl"))
    (finding,) = page.texts("p", "finding")
    assert finding.startswith(
        "conv/conv lost up to 5.26 % of its gradient to underflow, more than 1 % in 8 of 8 "
    )
    told = ("recorded iterations", "lost batches", "repeated batches")
    assert [page.definitions[name] for name in told] == ["1 to 9", "2 (2 non-finite loss)", "1"]
    assert page.tables["Repeated and lost batches: 2"][1:] == [
        ["9", "batch repeated", "overflow", "conv/conv", ""],
        ["9", "2 batches lost", "non-finite loss", "head/affine", "conv reads NaN"],
    ]
    assert page.texts("summary") == ["Where S0 changed: 1 time after the first"]
    assert "Equal heights are equal ratios" not in page.text


def test_the_file_date_and_version_stand_above_the_title() -> None:
    page = Parsed(page_of(Recording([BEGAN, *recording().rows]), "run.jsonl"))
    assert page.texts("li")[:3] == ["run.jsonl", "2026-01-02 03:04", "nnabla_adaloss 0.2.0"]
    assert page.texts("h1") == ["Training in float16"]
    half = BEGAN._replace(settings={"storage": "None", "context": "cudnn:half"})
    assert Parsed(page_of(Recording([half, ended(1, 1.0)]), "run")).texts("h1") == ["Training in cudnn:half"]
    assert Parsed(page_of(recording(), "run")).texts("h1") == ["Training"]
    assert Parsed(page_of(recording(), "run", "LeNet")).texts("h1") == ["LeNet"]


@pytest.mark.parametrize(
    ("values", "heights"),
    [
        ((8.0,), ["16", "8", "4"]),
        ((8.0, 16.0), ["2^5", "16", "8"]),
        ((2.0**40, 2.0**44), ["2^44", "2^42", "2^40"]),
        ((2.0**1023,), ["2^1023", "2^1023", "2^1022"]),
    ],
)
def test_the_axis_of_the_scale_has_powers_of_two(values: Tuple[float, ...], heights: List[str]) -> None:
    rows = [ScaleChanged(i, 1.0, value) for i, value in enumerate(values)]
    page = Parsed(page_of(Recording(rows), "run"))
    assert page.texts("div", "name heights") == [" ".join(heights)]


def test_values_are_shown_where_the_mouse_is() -> None:
    page = Parsed(page_of(recording(), "run.jsonl"))
    for told in (
        "iteration 3: 8",  # alpha of conv, which changes each iteration, and of head
        "iterations 1 to 8: 8",  # S of both
        "iterations 1 to 8: 5.26 %",
        "iteration 9: not recorded",
        "iteration 9: 4",  # S0
        "iteration 4: 0.25",
    ):
        assert told in page.words, told
    long = Parsed(page_of(Recording([ended(i, float(i)) for i in range(1, 2001)]), "run"))
    assert "iterations 43 to 84: 43 to 84" in long.words
    assert len(long.of("rect")) == 1 + 48


def test_long_tables_show_the_end() -> None:
    rows: List[Any] = [ended(i, i / 99, 2.0 ** (i % 5)) for i in range(1, 100)]
    rows += [BatchRepeated(i, 0, "overflow", ()) for i in range(1, 100)]
    page = Parsed(page_of(Recording(rows), "run"))
    incidents = page.tables["Repeated and lost batches: 99, of which these are the last 60"]
    assert [row[0] for row in incidents[1:]] == [str(i) for i in range(40, 100)]
    assert page.texts("summary") == ["Where S0 changed: 98 times after the first; these are the last 10"]
    changes = page.tables["S0 from these iterations on"]
    assert changes[1:4] == [["90", "1"], ["91", "2"], ["92", "4"]]
    assert len(changes) == 11


def test_the_settings_stand_at_the_end() -> None:
    rows = [BEGAN._replace(settings={"storage": "before it was resumed"}), BEGAN, *recording().rows]
    page = Parsed(page_of(Recording(rows), "run.jsonl"))
    assert page.texts("h2")[-1] == "Settings"
    assert list(page.definitions.items())[-3:] == [
        ("nnabla_adaloss", "0.2.0"),
        ("storage", "float16"),
        ("N", "2000"),
    ]


@pytest.mark.parametrize(
    ("rows", "drawn"),
    [
        ([ended(1, 0.01), ended(2, 1.0), ended(3, 100.0)], "Equal heights are equal ratios"),
        ([ended(1, 0.01), ended(2, 1.0), ended(3, 100.0)], "M0.0 100.0L500.0 50.0L1000.0 0.0"),
        (
            [ended(1, 0.5, 8.0), ScaleChanged(2, 8.0, 16.0), ended(3, 0.5, 16.0)],
            "M0.0 100.0H500.0V50.0H1000.0V50.0H1000",
        ),
        ([ended(1, 0.5)], 'h2>Loss</h2>.*d="M0.0 50.0H1000"'),
        (
            [ended(i, {4003: 0.5, 4006: 2.0}.get(i, 1.0)) for i in range(10_000)],
            r"L400\.\d 100\.0L400\.\d 0\.0",
        ),
    ],
    ids=["by their ratios", "several decades", "a scale holds", "a single point", "a single peak"],
)
def test_curves(rows: List[Any], drawn: str) -> None:
    assert re.search(drawn, page_of(Recording(rows), "run"), re.DOTALL)


def test_names_are_no_markup() -> None:
    rows = [layer(1, EVIL), BatchThrownAway(1, EVIL, (EVIL,), 1, EVIL), layer(2, EVIL)]
    parsed = Parsed(page_of(Recording(rows), EVIL))
    assert not parsed.of("script")
    assert EVIL in parsed.words


@pytest.mark.parametrize(
    "rows",
    [
        [ScaleChanged(3, 8.0, 16.0)],
        [ended(1, math.nan)],
        [ended(1, -1.0), ended(2, 0.0)],
        [layer(1)],
        [layer(1, underflowed=None, elements=None, zeros=None, subnormals=None, headroom=None)],
        [layer(i, nonfinite=3) for i in range(1000)],
    ],
    ids=["a scale", "no loss", "losses below zero", "one iteration", "nothing known", "many"],
)
def test_recordings_of_all_kinds(rows: List[Any]) -> None:
    Parsed(page_of(Recording(rows), "run"))


def test_a_page_does_not_grow_with_the_training() -> None:
    def pages_size(iterations: int) -> int:
        rows: List[Any] = []
        for i in range(iterations):
            rows += [layer(i % 50 + 50 * i)._replace(alpha=2.0), BatchRepeated(50 * i, 0, "overflow", ())]
            rows.append(ended(50 * i, 1.0 + i % 7, 2.0 ** (i % 9)))
        return len(page_of(Recording(rows), "run"))

    assert pages_size(20_000) < 2 * pages_size(1_000) < 400_000
