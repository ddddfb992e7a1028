# SPDX-License-Identifier: Apache-2.0
"""Processes that each run a checkout of the package and answer requests.

A request and its answer are a JSON object on a line each, on standard input and output; libraries print to
standard error. A request that fails is answered by `{"error": "..."}`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, Callable, Dict

HERE = Path(__file__).resolve().parent

Message = Dict[str, Any]


class Worker:
    """Process of one thread that runs a script of this folder with a checkout, until it is closed."""

    def __init__(self, checkout: Path, script: str) -> None:
        self._checkout = checkout
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script)],
            cwd=checkout,
            env=environment,
            stdin=pipe,
            stdout=pipe,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def ask(self, request: Message) -> Message:
        """Send a request and return its answer.

        Raises:
            RuntimeError: the request failed, or the package was imported from elsewhere.
        """
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline() if self._process.stdout else ""
        except BrokenPipeError:
            line = ""
        answer: Message = json.loads(line or '{"error": "it ended"}')
        if "error" in answer:
            raise RuntimeError(f"{self._checkout}: {request}: {answer['error']}")
        package = Path(answer["package"]).resolve().parent.parent
        if package != self._checkout:
            raise RuntimeError(f"{self._checkout}: the package was imported from {package}")
        return answer


def serve(answer: Callable[[Message], Message]) -> None:
    """Answer the requests of a `Worker` until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import nnabla_adaloss

    for line in sys.stdin:
        try:
            found = {"package": nnabla_adaloss.__file__, **answer(json.loads(line))}
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


def checkout(text: str) -> Path:
    """Return the folder if it holds the package; argparse calls this."""
    path = Path(text).resolve()
    if not (path / "nnabla_adaloss" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} holds no nnabla_adaloss: give the root of a checkout")
    return path
