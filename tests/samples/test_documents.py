# SPDX-License-Identifier: Apache-2.0
"""The programs in the documentation run, one after another, as a reader would try them.

One that cannot run here has a line `<!-- not run: why -->` just before it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import nnabla as nn
import pytest

from tests.pasted import in_a_fresh_process

from .test_imports import DOCUMENTS, ROOT, programs_in

RECIPES = ROOT / "docs" / "recipes.md"
# A page that says so, and no other, goes on from the first program of the recipes.
GOES_ON = "recipes.md#the-network"


NOT_RUN = re.compile(r"^ *<!-- not run: [^\n]+ -->\n *```python\n.*?^ *```\n", re.M | re.S)


def programs_to_run(document: str) -> List[str]:
    """The programs of a document but for those that are marked."""
    return programs_in(NOT_RUN.sub("", document))


WITH_PROGRAMS = [path for path in DOCUMENTS if programs_to_run(path.read_text("utf-8"))]


def run_programs(programs: List[Tuple[str, str]], folder: Path) -> None:
    """Run programs, each with its name, one after another as a reader would paste them."""
    os.chdir(folder)
    names: Dict[str, Any] = {"__name__": "__main__"}
    for title, program in programs:
        if "set_parameters" in program and "import nnabla" in program:  # it has a network of its own
            nn.clear_parameters()
        exec(compile(program, title, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=lambda path: path.name)
def test_programs_run(path: Path, tmp_path: Path) -> None:
    text = path.read_text("utf-8")
    before = programs_in(RECIPES.read_text("utf-8"))[:1] if GOES_ON in text else []
    programs = [*before, *programs_to_run(text)]
    titles = [f"{path.name}, program {number - len(before)}" for number in range(len(programs))]
    in_a_fresh_process(run_programs, list(zip(titles, programs)), tmp_path)


WITH_OUTPUT = re.compile(r"^```python\n((?:(?!```).)*?)```\n\n```text\n(.*?)```", re.M | re.S)
NUMBER = re.compile(r"\d+\.?\d*")


@pytest.mark.slow
def test_what_follows_a_program_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = [pair for path in DOCUMENTS for pair in WITH_OUTPUT.findall(path.read_text("utf-8"))]
    assert found
    for program, output in found:
        capsys.readouterr()
        exec(compile(program, "program", "exec"), {})
        printed = capsys.readouterr().out
        assert NUMBER.sub("0", printed).split() == NUMBER.sub("0", output).split()
        # Sums may be a little different on another processor.
        for a, b in zip(NUMBER.findall(printed), NUMBER.findall(output)):
            assert float(a) == pytest.approx(float(b), rel=0.01, abs=0.05)


def test_what_is_not_run_says_why() -> None:
    document = "<!-- not run: needs a GPU -->\n```python\nimport a\n```\n\n```python\nb()\n```\n"
    assert programs_to_run(document) == ["b()\n"]
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        assert len(NOT_RUN.findall(text)) == len(re.findall("^ *<!-- not run", text, re.M)), path.name
    assert {"README.md", "recipes.md", "functions.md"} <= {path.name for path in WITH_PROGRAMS}


def test_commands_of_the_readme_need_only_what_it_installs() -> None:
    text, makefile = (ROOT / "README.md").read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")
    assert set(re.findall(r"python -m (\w+)", text)) <= {"venv", "nnabla_adaloss"}
    targets = set(re.findall(r"`make (\w+)", text))
    assert targets <= set(re.findall(r"^(\w+):", makefile, re.M)), "the Makefile sets up what each needs"


@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=lambda path: path.name)
def test_programs_fit_the_column_of_the_guide(path: Path) -> None:
    """At 1400 pixels the column holds 88 characters."""
    lines = [line for program in programs_in(path.read_text("utf-8")) for line in program.splitlines()]
    assert [line for line in lines if len(line) > 88] == []
