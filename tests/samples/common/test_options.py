# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from common import options

from tests.mpirun import ENVIRONMENT


def start(*arguments: str) -> Any:
    return options.start(options.parser("A sample.", iterations=10, batch_size=4, lr=0.1), arguments)


def test_storage_is_emulated_where_the_context_is_float() -> None:
    assert start().storage == "float16"
    assert start("--storage", "fp8_hybrid").storage == "fp8_hybrid"
    assert start("--storage", "none").storage is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume: say which file to resume from with --checkpoint FILE"),
        (["--iterations", "0"], "--iterations: 0 is not 1 or more"),
        (["--lr", "nan"], "--lr: nan is not positive and finite"),
        (
            ["--storage", "float15"],
            "--storage: storage='float15' is unknown; choose one of float16, bfloat16",
        ),
        (["-c", "no_such_extension"], "doctor --gpu"),
    ],
)
def test_errors_name_the_fault(arguments: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        start(*arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


ORDER = """
import sys
from common import options, ranks

def extension_context(*_, **__):
    raise RuntimeError(f"MPI is loaded: {'mpi4py.MPI' in sys.modules}")

options.get_extension_context = extension_context
parser = options.parser("A sample.", iterations=1, batch_size=1, lr=1.0)
ranks.add_option(parser)
options.start(parser, sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_mpi_is_loaded_before_nnablas_extension() -> None:
    samples = Path(__file__).parents[3] / "samples"
    paths = [str(samples), *sys.path]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    for option, loaded in ((["--distributed"], True), ([], False)):
        command = [sys.executable, "-c", ORDER, "-c", "cudnn", *option]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert f"MPI is loaded: {loaded}" in done.stderr


def test_learning_rates_fall_to_zero() -> None:
    rate = options.cosine(0.2, 10)
    assert [rate(0), rate(5), rate(10)] == pytest.approx([0.2, 0.1, 0.0])
