# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as text, as a dict, and as a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import Diagnosis, diagnose

from .healthy import mlp
from .nets import Built
from .troubles_of_data import nan_in_data
from .troubles_of_layers import branches_apart, vanishing_sigmoid

BUILDS: Dict[str, Callable[[], Built]] = {
    "nan": lambda: nan_in_data.build(False),
    "vanishing": lambda: vanishing_sigmoid.build(False),
    "apart": lambda: branches_apart.build(False),
    "healthy": mlp,
}


def diagnosis_of(name: str) -> Diagnosis:
    loss, feed = BUILDS[name]()
    return diagnose(loss, feeder=feed, batches=1)


@pytest.mark.parametrize("name", ["nan", "apart", "healthy"])
def test_a_dict_is_plain_json(name: str) -> None:
    found = diagnosis_of(name).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["layers"][0]["ways"]["none"].keys() == {"underflow", "overflow", "error"}


def test_text_fits_a_terminal_and_names_every_layer() -> None:
    diagnosis = diagnosis_of("vanishing")
    lines = str(diagnosis).splitlines()
    assert max(map(len, lines)) <= 130
    assert "residual connections" in str(diagnosis)
    for layer in diagnosis.numbers.layers:
        assert sum(line.startswith(layer.name + " ") for line in lines) == 2


def test_layers_that_cannot_be_judged_share_a_line() -> None:
    x = nn.Variable.from_numpy_array(np.full((4, 3), np.nan))
    h = x
    for index in range(12):
        h = F.tanh(PF.affine(h, 3, name=f"fc{index}"))
    diagnosis = diagnose(F.mean(h))
    lines = str(diagnosis).splitlines()
    assert sum("cannot be judged" in line for line in lines) == 1
    assert lines[-1] == "the other layers: cannot be judged until this is fixed: fc0/affine"
    # A dict and a page have a line for each.
    assert sum("cannot be judged" in layer["verdict"] for layer in diagnosis.as_dict()["layers"]) == 11


class Reader(HTMLParser):
    """Notes what a page refers to, and that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: List[str] = []
        self.links: List[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Any]]) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", ["nan", "vanishing", "healthy"])
def test_a_page_needs_nothing_else(name: str, tmp_path: Path) -> None:
    diagnosis = diagnosis_of(name)
    path = tmp_path / "page.html"
    diagnosis.write_html(path)
    reader = Reader()
    reader.feed(path.read_text("utf-8"))
    assert reader.links == []
    assert reader.open == []
    assert diagnosis.verdict.line in reader.text
    # A cause that is the verdict is not told again.
    assert ("What else was found" in reader.text) == (name == "vanishing")
    assert all(layer.name in reader.text for layer in diagnosis.numbers.layers)


def test_the_documentation_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parents[2] / "docs/diagnosing.md").read_text("utf-8")
    program, printed = re.findall(r"```(?:python|text)\n(.*?)```", document, re.S)[:2]
    exec(program, {})
    shown, said = printed.strip().splitlines(), capsys.readouterr().out.splitlines()
    assert len(shown) == len(said)
    # Numbers may differ in their last digits from machine to machine; the verdict does not.
    assert shown[2:4] == said[2:4]
