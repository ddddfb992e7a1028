# SPDX-License-Identifier: Apache-2.0
"""Everything there is to check and to measure on a machine with an NVIDIA GPU, in one command.

    pip install '.[cuda120,samples,test]'
    python benchmarks/gpu_all.py                    all of it; build/gpu/index.md grows step by step
    python benchmarks/gpu_all.py --only training    the steps whose names hold "training"
    python benchmarks/gpu_all.py --dry-run          what it would run

First what tells most: the doctor, the kernels against float64, their speed, what scaling costs in a training,
what it saves; then the samples in half precision, and the package's tests on the device.

Each step is a process of its own with a time limit, so that a step that dies or hangs ends no other. What it
prints goes to build/gpu/STEP.log, what it measured to build/gpu/STEP.json. After each step all of it is put
together in results.json and index.md there. Run it again to go on: a step that succeeded with the same
command and the same commit is not repeated; --again repeats it.

Without a GPU, to see that it works: python benchmarks/gpu_all.py --context cpu:half --quick
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]


class Step(NamedTuple):
    """One thing to run."""

    name: str
    limit: float  # seconds after which it is ended
    arguments: List[str]  # of Python
    writes_json: bool = False  # its command takes `--json FILE`


def steps(context: str, quick: bool) -> Iterator[Step]:
    """All there is to run, first what tells most."""
    extension = context.partition(":")[0]
    on_gpu = extension != "cpu"
    yield Step("doctor", 300, ["-m", "nnabla_adaloss", "doctor", *["--gpu"] * on_gpu])
    if on_gpu:
        kernels = ["benchmarks/gpu_kernels.py", "--largest-gib"]
        yield Step("kernel-checks", 600, [*kernels, "0", "--checks-only"])
        yield Step("kernels", 900, [*kernels, "0" if quick else "9"], True)
    yield from trainings(context, quick)
    accuracy = ["benchmarks/gpu_accuracy.py", "--context", context if on_gpu else "cpu:float"]
    yield Step("accuracy", 1800, [*accuracy, "--iterations", "3" if quick else "300"], True)
    yield from samples(*context.split(":"), quick)
    tests = ["-m", "pytest", "-n", "1" if quick else "4", "--timeout", "120", "--tb", "short"]
    if not quick:
        yield Step("tests-float", 3600, [*tests, f"--context={extension}:float", "tests"])
    yield Step("tests-half", 1800, [*tests, f"--context={context}", "-m", "any_context", "tests"])


def trainings(context: str, quick: bool) -> Iterator[Step]:
    """What scaling costs."""
    script = ["benchmarks/gpu_training.py", "--context"]
    if quick:
        yield Step("training-quick", 600, [*script, context, "--network", "transformer", "--quick"], True)
        return
    yield Step("training-resnet50-64", 600, [*script, context], True)
    yield Step("training-resnet50-256", 900, [*script, context, "--batch", "256"], True)
    yield Step("training-transformer", 600, [*script, context, "--network", "transformer"], True)
    mixed = context.partition(":")[0] + ":mixed_half"
    yield Step("training-resnet50-64-mixed", 600, [*script, mixed], True)


def samples(extension: str, type_config: str, quick: bool) -> Iterator[Step]:
    """The programs of samples/ that take a context."""
    for program in sorted((ROOT / "samples").glob("*.py")):
        if "common_options.start(" not in program.read_text(encoding="utf-8"):
            continue
        if quick and program.stem != "gan":
            continue  # the quickest: cpu:half takes minutes for a convolution net
        small = ["--iterations", "6", "--batch-size", "8"] if quick else []
        command = [f"samples/{program.name}", "-c", extension, "-t", type_config, *small]
        yield Step(f"sample-{program.stem}", 900, command)


def run(step: Step, folder: Path, commit: str) -> Dict[str, Any]:
    """Run a step; returns what became of it."""
    command = [sys.executable, *step.arguments]
    if step.writes_json:
        written = folder / f"{step.name}.json"
        written.unlink(missing_ok=True)  # of an earlier run: this one may end before it writes
        command += ["--json", str(written)]
    # Not the package that is installed, but the one beside this script.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("CUDA_MODULE_LOADING", "LAZY")  # CUDA 12.0 loads all of every library otherwise
    start = time.monotonic()
    with open(folder / f"{step.name}.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = f"exit code {process.wait(step.limit)}"
        except subprocess.TimeoutExpired:
            status = f"ended after {step.limit:.0f} s"
        finally:
            end_group(process)
    return {
        "step": step.name,
        "command": step.arguments,
        "commit": commit,
        "status": "works" if status == "exit code 0" else status,
        "seconds": round(time.monotonic() - start, 1),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a step with the processes that it started: they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_json(path: Path) -> Optional[Any]:
    """What a file holds; None where there is none, or only a part of one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_page(folder: Path, outcomes: List[Dict[str, Any]]) -> None:
    """Put everything together: results.json and index.md."""
    results = [{**one, "result": read_json(folder / f"{one['step']}.json")} for one in outcomes]
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    lines = ["# nnabla_adaloss on this machine", ""]
    lines += ["| step | outcome | seconds | commit |", "|---|---|---|---|"]
    lines += [
        f"| [{one['step']}]({one['step']}.log) | {one['status']} | {one['seconds']} | {one['commit']} |"
        for one in outcomes
    ]
    for one in outcomes:
        printed = (folder / f"{one['step']}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        lines += ["", f"## {one['step']}", "", f"`python {' '.join(one['command'])}`, {one['date']}", ""]
        lines += ["```text", *printed[-40:], "```"]
    (folder / "index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def commit_of_checkout() -> str:
    """The commit, with a + where files were changed since; the version where git does not tell."""
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--context", default="cudnn:half", metavar="EXT:TYPE", help="(default: cudnn:half)")
    add("--only", default="", metavar="TEXT", help="steps whose names hold this")
    add("--quick", action="store_true", help="tiny networks: to see that it works")
    add("--again", action="store_true", help="repeat what succeeded before, too")
    add("--dry-run", action="store_true", help="print the commands")
    add("--out", type=Path, default=ROOT / "build/gpu", metavar="FOLDER", help="(default: build/gpu)")
    options = parser.parse_args()
    if ":" not in options.context:
        parser.error(f"--context {options.context}: write extension and type, such as cudnn:half")
    chosen = [step for step in steps(options.context, options.quick) if options.only in step.name]
    if options.dry_run:
        for step in chosen:
            print(f"{step.name:28} up to {step.limit:5.0f} s   python {' '.join(step.arguments)}")
        return 0
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    commit, outcomes = commit_of_checkout(), {}
    for one in read_json(folder / "results.json") or []:
        outcomes[one["step"]] = {key: value for key, value in one.items() if key != "result"}
    for step in chosen:
        before = outcomes.get(step.name, {})
        known = before.get("command") == step.arguments and before.get("commit") == commit
        if known and before["status"] == "works" and not options.again:
            print(f"{step.name:28} works, since {before['date']}", flush=True)
            continue
        print(f"{step.name:28} ", end="", flush=True)
        outcomes[step.name] = run(step, folder, commit)
        print(f"{outcomes[step.name]['status']}, {outcomes[step.name]['seconds']:.0f} s", flush=True)
        write_page(folder, list(outcomes.values()))
    print(f"{folder / 'index.md'}")
    return 0 if all(outcomes[step.name]["status"] == "works" for step in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
