# SPDX-License-Identifier: Apache-2.0
"""The programs in the documentation run, one after another, as a reader would try them; what changes by diff
trains. They and samples import nothing deeper than `nnabla_adaloss`, and no name but the public ones.

A program that cannot run here has a line `<!-- not run: why -->` just before it.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.ext_utils import get_extension_context
from numpy.random import RandomState

import nnabla_adaloss
from nnabla_adaloss import AdaptiveLossScalingUpdater, LossScaleWarning
from tests.pasted import in_a_fresh_process

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "samples").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = ROOT / "docs" / "recipes.md"
# A page that says so, and no other, goes on from the first program of the recipes.
GOES_ON = "recipes.md#the-network"


def programs_in(document: str) -> List[str]:
    """The code between ```python and ```, also that of a list's item."""
    return [dedent(code) for _, code in re.findall(r"^( *)```python\n(.*?)^\1```", document, re.M | re.S)]


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
def test_the_block_after_a_program_is_its_output(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_programs_that_are_not_run_say_why() -> None:
    document = "<!-- not run: needs a GPU -->\n```python\nimport a\n```\n\n```python\nb()\n```\n"
    assert programs_to_run(document) == ["b()\n"]
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        assert len(NOT_RUN.findall(text)) == len(re.findall("^ *<!-- not run", text, re.M)), path.name
    assert {"README.md", "recipes.md", "functions.md"} <= {path.name for path in WITH_PROGRAMS}


def test_commands_of_the_readme_need_only_installed_packages() -> None:
    text, makefile = (ROOT / "README.md").read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")
    assert set(re.findall(r"python -m (\w+)", text)) <= {"venv", "nnabla_adaloss"}
    targets = set(re.findall(r"`make (\w+)", text))
    assert targets <= set(re.findall(r"^(\w+):", makefile, re.M)), "the Makefile sets up what each needs"


@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=lambda path: path.name)
def test_programs_fit_the_column_of_the_guide(path: Path) -> None:
    """At 1400 pixels the column holds 88 characters."""
    lines = [line for program in programs_in(path.read_text("utf-8")) for line in program.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


def too_deep(program: str) -> List[str]:
    """What a program imports of the package, wherever the statement stands, that is no public name of it."""
    found: List[str] = []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}:{alias.name}" for alias in node.names]
    public = {"nnabla_adaloss", *(f"nnabla_adaloss:{name}" for name in nnabla_adaloss.__all__)}
    return [name for name in found if re.match(r"nnabla_adaloss\b", name) and name not in public]


@pytest.mark.parametrize("path", [*SAMPLES, *DOCUMENTS], ids=lambda path: path.name)
def test_public_names_alone_are_imported(path: Path) -> None:
    text = path.read_text("utf-8")
    programs = [text] if path.suffix == ".py" else programs_in(text)
    assert [name for program in programs for name in too_deep(program)] == []


def test_programs_are_found_in_documents() -> None:
    for document in ("README.md", "docs/functions.md", "docs/recipes.md", "docs/installing.md"):
        text = (ROOT / document).read_text("utf-8")
        assert len(programs_in(text)) == text.count("```python"), document


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import nnabla_adaloss", []),
        ("from nnabla_adaloss import (\n    AdaLoss,\n    branch,\n)", []),
        ("import os, nnabla_adaloss.core", ["nnabla_adaloss.core"]),
        ("from nnabla_adaloss.core import AdaLoss", ["nnabla_adaloss.core:AdaLoss"]),
        ("from nnabla_adaloss import *", ["nnabla_adaloss:*"]),
    ],
)
def test_files_that_are_nested_too_deeply(line: str, found: List[str]) -> None:
    assert too_deep(f"def late():\n{indent(line, '    ')}") == found


DIFFS = [
    diff
    for page in ("README.md", "docs/coming_from.md")
    for diff in re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
]
ITERATIONS = 30


class Batches:
    """An nnabla data iterator over random points of three classes."""

    def __init__(self) -> None:
        self._random = RandomState(0)

    def next(self) -> Any:
        x = self._random.standard_normal((16, 8))
        return x, x[:, :3].argmax(1, keepdims=True)


def a_script() -> Dict[str, Any]:
    """The names that the scripts have given to things before their loops."""
    nn.clear_parameters()
    nn.seed(0)
    image, label = nn.Variable((16, 8)), nn.Variable((16, 1))

    def logits(x: nn.Variable) -> nn.Variable:
        return PF.affine(F.tanh(PF.affine(x, 32, name="a")), 3, name="b")

    pred = logits(image)
    pred.persistent = True
    loss = F.mean(F.softmax_cross_entropy(pred, label)).apply(persistent=True)
    error = F.mean(F.top_n_error(pred, label, axis=1)).apply(persistent=True)
    solver = S.Adam(0.02)
    solver.set_parameters(nn.get_parameters())
    args = SimpleNamespace(batch_size=16, max_iter=ITERATIONS, epochs=1, weight_decay=1e-4)
    batches = Batches()

    def feed() -> None:
        image.d, label.d = batches.next()

    script: Dict[str, Any] = {"np": np, "RandomState": RandomState, "ctx": get_extension_context("cpu")}
    script.update(args=args, start_point=0, solver=solver, image=image, label=label, pred=pred, loss=loss)
    script.update(data_iterator_mnist=lambda *args, **keywords: Batches())
    script.update(image_train=image, label_train=label, loss_error_train=F.sink(loss, error), tdata=Batches())
    script.update(max_iter=ITERATIONS, data_feeder=feed, data=batches)
    script.update(network=lambda x, t: F.mean(F.softmax_cross_entropy(logits(x), t)).apply(persistent=True))
    script.update(AdaptiveLossScalingUpdater=AdaptiveLossScalingUpdater)  # the README imports it once
    script.update(comm=None, n_devices=1, iter_per_epoch=ITERATIONS)
    return script


def new_side(diff: str) -> str:
    """The program that a diff leads to, its hunks at the left margin."""
    hunks = re.split(r"^@@\n", diff, flags=re.M)
    kept = (re.sub(r"^-.*\n", "", hunk, flags=re.M) for hunk in hunks)
    return "".join(dedent(re.sub(r"^[ +]", "", hunk, flags=re.M)) for hunk in kept)


def train(program: str) -> Tuple[float, float, int, Dict[str, int]]:
    """The loss before and after a program, the updates, and the batches lost."""
    warnings.simplefilter("ignore", LossScaleWarning)
    script = a_script()
    script["image"].d, script["label"].d = Batches().next()
    script["loss"].forward()
    before = float(script["loss"].d)
    exec(compile(program, "diff", "exec"), script)
    counters = script["updater"].counters
    return before, float(script["loss"].d), counters.updates, counters.lost


@pytest.mark.parametrize("diff", DIFFS, ids=["updater", "mnist", "cifar"])
def test_a_migrated_loop_trains(diff: str) -> None:
    # The README's sets the default context: nnabla's own half precision on a CPU does for a GPU's.
    program = new_side(diff).replace('"cudnn"', '"cpu"').replace("S.Adam(1e-3)", "S.Adam(0.02)")
    before, after, updates, lost = in_a_fresh_process(train, program)
    assert (updates, lost) == (ITERATIONS, {})
    assert after < 0.6 * before
