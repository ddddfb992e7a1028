# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as a dict, as text, and as a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from nnabla_adaloss import Diagnosis, diagnose
from tests.report.parsed import Parsed

from .healthy import mlp
from .nets import Built, branches_apart, vanishing_sigmoid
from .troubles import dead_branch, nan_in_data

BUILDS: Dict[str, Callable[[], Built]] = {
    "nan": lambda: nan_in_data.build(False),
    "vanishing": vanishing_sigmoid,
    "apart": branches_apart,
    "branch": lambda: dead_branch.build(False),
    "healthy": mlp,
}


def diagnosis_of(name: str) -> Diagnosis:
    loss, feed = BUILDS[name]()
    return diagnose(loss, feeder=feed, batches=1)


@pytest.mark.parametrize("name", ["nan", "apart", "healthy"])
def test_a_dict_is_plain_json(name: str) -> None:
    found = diagnosis_of(name).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    if name != "nan":
        assert found["layers"][0]["ways"]["none"].keys() == {
            "underflow",
            "overflow",
            "error",
            "lost_units",
        }
        assert found["formats"].keys() == {"float16", "bfloat16", "fp8_hybrid"}


def test_text_fits_a_terminal_and_names_every_layer() -> None:
    diagnosis = diagnosis_of("vanishing")
    lines = str(diagnosis).splitlines()
    assert max(map(len, lines)) <= 130
    assert lines[-2].startswith("Not judged, as numbers do not show them: learning rates beyond")
    for layer in diagnosis.numbers.layers:
        assert sum(line.startswith(layer.name + " ") for line in lines) == 2


@pytest.mark.parametrize("name", ["nan", "vanishing", "branch", "healthy"])
def test_a_page_needs_nothing_else(name: str, tmp_path: Path) -> None:
    diagnosis = diagnosis_of(name)
    path = tmp_path / "page.html"
    diagnosis.write_html(path, "the net")
    page = Parsed(path.read_text("utf-8"))
    about = page.texts("li")
    assert about[:3] == ["the net", "float16 beside fp32", "1 batch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", about[-2])
    assert about[-1].startswith("nnabla_adaloss ")
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.elements)
    # The cause, or else the first sentence, is the heading; what to do stands below it.
    causes, (heading,), said = diagnosis.verdict.causes, page.texts("h1"), page.texts("p")
    if causes:
        assert heading == f"{causes[0].function}: {causes[0].what}"
        assert said[0].lower() == f"{causes[0].remedy}.".lower()
        assert diagnosis.verdict.scaling in said
    else:
        assert " ".join([heading, *page.texts("p", "finding")]) == diagnosis.verdict.scaling
    assert page.text.count(causes[0].what if causes else heading) == 2  # the title of the window, too
    assert "Not judged" in page.text
    assert all(layer.name in page.text for layer in diagnosis.numbers.layers)


def test_the_documentation_shows_the_printed_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = (Path(__file__).parents[2] / "docs/diagnosing.md").read_text("utf-8")
    program, printed, uses = re.findall(r"```(?:python|text)\n(.*?)```", document, re.S)[:3]
    monkeypatch.chdir(tmp_path)
    names: Dict[str, Any] = {}
    exec(program, names)
    shown, said = printed.strip().splitlines(), capsys.readouterr().out.splitlines()
    assert len(shown) == len(said)
    # Numbers may differ in their last digits from machine to machine; the verdict does not.
    assert shown[2:4] == said[2:4]
    exec(uses, names)
    assert (tmp_path / "diagnosis.html").exists()
