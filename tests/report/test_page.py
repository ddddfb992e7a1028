# SPDX-License-Identifier: Apache-2.0
"""A page is one file, says in words what it shows in pictures, and takes no name for markup."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any, Dict, List, Optional, Tuple

import pytest

from nnabla_adaloss import (
    BatchRepeated,
    BatchThrownAway,
    LayerRow,
    Overflowed,
    Recording,
    ScaleChanged,
    UpdateEnded,
)
from nnabla_adaloss.report.layers import advice, why
from nnabla_adaloss.report.page import page_of

VOID = {"meta", "img", "path", "br"}
EVIL = '<script>alert("1")</script>&'


class Parsed(HTMLParser):
    """The elements of a page; fails where tags are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: List[str] = []
        self.elements: List[Tuple[str, Dict[str, Optional[str]]]] = []
        self.text: List[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data)

    def of(self, tag: str) -> List[Dict[str, Optional[str]]]:
        return [attributes for name, attributes in self.elements if name == tag]


def layer(iteration: int, name: str = "conv/conv", **fields: Any) -> LayerRow:
    known: Dict[str, Any] = {
        "elements": 100,
        "zeros": 10,
        "underflowed": 5,
        "overflowed": 0,
        "subnormals": 2,
        "nonfinite": 0,
    }
    return LayerRow(
        iteration, 0, name, 2.0 ** (iteration % 8), 8.0, "method", **{**known, "headroom": 3.0, **fields}
    )


def recording() -> Recording:
    rows: List[Any] = []
    for i in range(1, 9):
        rows += [
            layer(i, "head/affine", underflowed=0),
            layer(i),
            UpdateEnded(i, True, "updated", 8.0, 0, 1 / i),
        ]
    rows += [
        BatchRepeated(9, 0, "overflow", ("conv/conv",)),
        Overflowed(9, 0, "overflow", ("conv/conv",), None, 8.0),
        BatchThrownAway(9, "nonfinite_loss", ("head/affine",), 2, "conv reads NaN"),
        ScaleChanged(9, 8.0, 4.0),
        UpdateEnded(9, False, "nonfinite_loss", 4.0, 1, math.nan),
    ]
    return Recording(rows)


def test_one_file_and_nothing_else() -> None:
    page = page_of(recording(), "run.jsonl")
    pictures = r"data:image/png;base64,[\w+/=]+"
    assert not re.search(r"//|@import|url\(", re.sub(pictures, "", page))
    parsed = Parsed(page)
    assert not parsed.of("script")
    assert not parsed.of("link")
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in parsed.of("img"))


def test_pictures_are_told_in_words() -> None:
    parsed = Parsed(page_of(recording(), "run.jsonl"))
    assert parsed.of("html") == [{"lang": "en"}]
    assert parsed.of("img")
    assert all(image["alt"] for image in parsed.of("img"))
    for picture in parsed.of("svg"):
        assert picture.get("aria-label") or "x" in picture  # a mark is told of by its line
    assert len(parsed.of("caption")) == len(parsed.of("table")) == 4
    assert all(cell.get("scope") in ("col", "row") for cell in parsed.of("th"))
    assert all(region["aria-label"] for region in parsed.of("div") if region.get("role") == "region")
    headings = [tag for tag, _ in parsed.elements if re.fullmatch(r"h\d", tag)]
    assert headings == ["h1"] + ["h2"] * 7


def test_what_it_says() -> None:
    text = " ".join(" ".join(Parsed(page_of(recording(), "run.jsonl")).text).split())
    assert "1 to 9 iterations recorded" in text
    assert "2 batches lost: 2 non-finite loss" in text
    assert (
        "5.26 % of the gradient of conv/conv underflowed at worst, since iteration 1: more than 1 % in 100 %"
        in text
    )
    assert "9 2 batches lost non-finite loss head/affine conv reads NaN" in text
    assert "9 batch repeated overflow conv/conv" in text


def test_each_cell_of_a_wide_table_knows_its_column() -> None:
    """On a phone the head of the table is not seen."""
    page = page_of(recording(), "run.jsonl")
    assert '<td data-head="first bad layer">conv/conv</td>' in page
    assert '<table class="words many">' in page
    assert ".many thead" in page


def test_why_a_layer_has_its_scale_is_what_was_last_measured() -> None:
    def rows(*reasons: str) -> List[LayerRow]:
        return [layer(i)._replace(reason=reason) for i, reason in enumerate(reasons)]

    assert why(rows("method", "accumulated bound", "held")) == "accumulated bound"
    assert why(rows("held", "held")) is None
    assert '<td data-head="why this alpha">method</td>' in page_of(Recording(rows("method", "held")), "run")
    assert '<td data-head="why this alpha">not recorded</td>' in page_of(Recording(rows("held")), "run")


@pytest.mark.parametrize(
    ("reason", "headroom", "said"),
    [
        ("scale bound", 9.0, "9 bits of headroom are unused. Raise AdaLossConfig(scale_upper_b"),
        ("accumulated bound", 9.0, "Raise AdaLossConfig(accum_upper_bound=...)."),
        ("method", 9.0, 'Try AdaLossConfig(loss_scale_method="amax_history")'),
        (
            "room",
            9.0,
            "Other gradients share its scale and need that room: store gradients in a wider format",
        ),
        ("level", 9.0, "Other gradients share its scale"),
        ("meeting of branches", 9.0, "Other gradients share its scale"),
        ("weight range", 9.0, "The scaled copy of its weight would overflow: store weights in a wider"),
        ("method", 1.0, "no scale keeps both. Store gradients in a wider format, such as bfloat16."),
    ],
)
def test_advice_for_a_layer_that_is_mostly_subnormal(reason: str, headroom: float, said: str) -> None:
    row = layer(1, subnormals=87, headroom=headroom)._replace(reason=reason)
    found = advice([row]) or ""
    assert found.startswith("conv/conv: 96.7 % of the nonzero elements are subnormal")
    assert said in found
    assert found in " ".join(Parsed(page_of(Recording([row]), "run")).text)


def test_no_advice_for_other_layers() -> None:
    assert advice([layer(1, subnormals=44)]) is None
    assert advice([layer(1, zeros=100, subnormals=0)]) is None
    assert advice([layer(1, subnormals=None)]) is None


def test_the_page_says_which_layers_are_there() -> None:
    assert "not the first one, which reads the data" in page_of(recording(), "run.jsonl")


def test_names_are_no_markup() -> None:
    rows = [layer(1, EVIL), BatchThrownAway(1, EVIL, (EVIL,), 1, EVIL), layer(2, EVIL)]
    parsed = Parsed(page_of(Recording(rows), EVIL))
    assert not parsed.of("script")
    assert EVIL in parsed.text


@pytest.mark.parametrize(
    "rows",
    [
        [ScaleChanged(3, 8.0, 16.0)],
        [UpdateEnded(1, True, "updated", 8.0, 0, math.nan)],
        [UpdateEnded(1, True, "updated", 8.0, 0, -1.0), UpdateEnded(2, True, "updated", 8.0, 0, 0.0)],
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
            rows.append(UpdateEnded(50 * i, True, "updated", 2.0 ** (i % 9), 0, 1.0 + i % 7))
        return len(page_of(Recording(rows), "run"))

    assert pages_size(20_000) < 2 * pages_size(1_000) < 400_000
