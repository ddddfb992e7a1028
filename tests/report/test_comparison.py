# SPDX-License-Identifier: Apache-2.0
"""The page of two recordings shows what differs first, and takes no name for markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, List

import pytest

from nnabla_adaloss import BatchThrownAway, LayerRow, Recording, UpdateEnded
from nnabla_adaloss.__main__ import main
from nnabla_adaloss.report.comparison import comparison_of
from nnabla_adaloss.report.page import page_of

from .test_page import EVIL, Parsed


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
    parsed = compared(recording(8.0, 0, only="x"), recording(4096.0, 30, lost=2))
    text = " ".join(parsed.text)
    differs, same = text.split("Same", 1)
    for fact in ("batches lost 0 2: 2 overflow", "loss scale S0 at the end 8 2¹²", "layers recorded 3 2"):
        assert fact in differs
    assert "loss at the end 0.25 0.25" in same
    body = text.split("one underflow at worst, two ", 1)[1].split(" Loss scale S0 ")[0]
    # Layer, alpha, S and underflow at worst, of one run and the other.
    rows = re.findall(r"(\w) (\S+) (\S+) (\S+) (\S+) (\d+ %|–) (\d+ %|–)", body)
    assert rows == [
        ("x", "2", "–", "16", "–", "0 %", "–"),
        ("b", "2", "2", "16", "2¹³", "0 %", "30 %"),
        ("a", "2", "2", "16", "2¹³", "0 %", "0 %"),
    ]


def test_both_runs_are_in_each_picture() -> None:
    parsed = compared(recording(8.0, 0), recording(4096.0, 30))
    told = [picture["aria-label"] for picture in parsed.of("svg") if picture.get("class") == "curve"]
    assert told[0] == "one: 8 at first, 8 at the end; two: 2¹² at first, 2¹² at the end; from 8 to 2¹²"
    assert [tag for tag, _ in parsed.elements].count("path") == 2 * (2 + 2)  # lines and their samples
    strips = [image["alt"] or "" for image in parsed.of("img")]
    assert [alt.split(":")[0] for alt in strips if "worst" in alt] == ["b, one", "b, two", "a, one", "a, two"]


def test_two_runs_alike() -> None:
    parsed = compared(recording(8.0, 1), recording(8.0, 1))
    assert "Differs" not in parsed.text
    assert "Same" in parsed.text


def test_one_line_alone_is_drawn_as_before() -> None:
    assert len(re.findall("<path d=", page_of(recording(8.0, 0), "run"))) == 2  # loss scale, loss


def test_names_are_no_markup() -> None:
    row = UpdateEnded(1, True, "updated", 8.0, 0, 0.5)
    parsed = Parsed(comparison_of({EVIL: Recording([row]), "b": Recording([row])}, EVIL))
    assert not parsed.of("script")
    assert EVIL in parsed.text


def test_an_empty_recording_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="nothing was recorded in two"):
        comparison_of({"one": recording(8.0, 0), "two": Recording()}, "title")


@pytest.mark.parametrize(
    ("second", "page", "heading"),
    [
        ("b.jsonl", "a_and_b.html", "a and b"),
        ("other/a.jsonl", "a_and_a.html", "{0}/a.jsonl and {0}/other/a.jsonl"),
    ],
)
def test_the_command(second: str, page: str, heading: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for name, scale in (("a.jsonl", 8.0), (second, 16.0)):
        recording(scale, 0).to_json_lines(tmp_path / name)
    assert main(["report", str(tmp_path / "a.jsonl"), str(tmp_path / second)]) == 0
    assert f"<h1>{heading.format(tmp_path)}</h1>" in (tmp_path / page).read_text("utf-8")
