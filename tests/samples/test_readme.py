# SPDX-License-Identifier: Apache-2.0
"""The README's first program: no constant loss scale trains it, this package does, and `analyse` says why."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Dict, Iterable, List, Tuple

import nnabla as nn
import numpy as np
import pytest
from numpy.typing import NDArray

from nnabla_adaloss import LossScaleWarning
from tests.pasted import in_a_fresh_process

from .test_documents import ROOT, programs_in

README = (ROOT / "README.md").read_text("utf-8")
(PROGRAM,) = programs_in(README)
ADAPTIVE = 'AdaptiveLossScalingUpdater(solver, loss, data_feeder, storage="float16")'
DYNAMIC = 'DynamicLossScalingUpdater(solver, FormatEmulation(loss, "float16"), data_feeder{})'
FIXED = "FixedLossScalingUpdater(solver, loss, data_feeder, scale={!r}, storage={!r})"


def run_with(updater: str, name: str = "__main__") -> str:
    """What the program prints with an updater, from the same initial parameters each time."""
    head = "from nnabla_adaloss import DynamicLossScalingUpdater, FixedLossScalingUpdater, FormatEmulation\n"
    nn.clear_parameters()
    nn.random.set_parameter_seed(313)
    with redirect_stdout(io.StringIO()) as out:
        exec(head + PROGRAM.replace(ADAPTIVE, updater), {"__name__": name})
    return out.getvalue().strip()


def weights_of_maxima() -> List[NDArray[np.float32]]:
    return [v.d.copy() for name, v in nn.get_parameters().items() if name.startswith("largest/")]


def what_it_does(updaters: Iterable[str]) -> Dict[str, Tuple[str, int]]:
    """What the program prints with each of these updaters, and how many weights of the maxima it trains."""
    warnings.simplefilter("ignore", LossScaleWarning)
    assert run_with(ADAPTIVE, "imported") == ""
    first = weights_of_maxima()
    done = {}
    for updater in updaters:
        printed = run_with(updater)
        done[updater] = printed, sum(not np.array_equal(*pair) for pair in zip(first, weights_of_maxima()))
    return done


def errors(printed: str) -> list[float]:
    return [float(number) for number in printed.split()]


def claimed(updater: str, scale: str) -> list[float]:
    """The numbers in the row of the table with this updater and this scale."""
    (found,) = re.findall(rf"^\| {updater}, {re.escape(scale)}.*? \| `([^`]+)`", README, re.M)
    return errors(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_constant_loss_scale_trains_both() -> None:
    assert PROGRAM.count(ADAPTIVE) == 1
    small, large = ([FIXED.format(2.0**k, "float16") for k in range(*ends)] for ends in ((19,), (19, 61)))
    fp32, dynamic, from_65536 = FIXED.format(1.0, None), DYNAMIC.format(""), DYNAMIC.format(", scale=65536")
    found = in_a_fresh_process(what_it_does, [ADAPTIVE, fp32, dynamic, from_65536, *small, *large])
    assert [trained for _, trained in found.values()] == [4, 4] + [0] * (len(found) - 2)
    printed = {updater: errors(text) for updater, (text, _) in found.items()}
    (told,) = re.findall(r"^It prints .*?`([^`]+)`", README, re.M)
    assert printed[ADAPTIVE] == printed[fp32] == errors(told)
    assert printed[fp32] == claimed("`AdaptiveLossScalingUpdater`", "measured")
    assert all(
        printed[updater] == pytest.approx(claimed("`Fixed.*`", "1 to 2^18"), abs=0.04) for updater in small
    )
    assert all(printed[updater] == claimed("`Fixed.*`", "2^19") for updater in large)
    assert printed[dynamic] == pytest.approx(claimed("`Dynamic.*`", "from 8"), abs=0.02)
    assert printed[from_65536] == pytest.approx(claimed("`Dynamic.*`", "from 65536"), abs=0.02)


@pytest.mark.slow
def test_the_default_epsilon_of_adam_swallows_scaled_gradients() -> None:
    assert PROGRAM.count(", eps=1e-30") == 1
    nn.clear_parameters()
    nn.random.set_parameter_seed(313)
    with redirect_stdout(io.StringIO()) as out:
        exec(PROGRAM.replace(", eps=1e-30", ""), {"__name__": "__main__"})
    (told,) = re.findall(r"the program above then prints `([^`]+)`", README)
    assert errors(out.getvalue()) == pytest.approx(errors(told), abs=0.02)


@pytest.mark.slow
def test_analyse_examines_it(tmp_path: Path) -> None:
    (command,) = re.findall(r"`python (-m nnabla_adaloss analyse train.py:\w+)`", README.split("## Where")[0])
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (begins,) = re.findall(r"^> (Layers .*)$", README, re.M)
    assert begins in " ".join(done.stdout.split())
    assert "0.01 0.05" not in done.stdout, "nothing is trained"
