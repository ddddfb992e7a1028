# SPDX-License-Identifier: Apache-2.0
"""All checks and measurements on a machine with an NVIDIA GPU, in one command.

    pip install '.[cuda120,samples,test]'
    python benchmarks/gpu_all.py                    all of it; build/gpu/index.md grows step by step
    python benchmarks/gpu_all.py --only doctor      this step; or the steps whose names hold the word
    python benchmarks/gpu_all.py --dry-run          what it would run

The most important come first: the doctor, the kernels against float64, their speed, cost and benefit of
scaling in a training; then the samples in half precision, and the package's tests on the device.

Each step is a process of its own that ends after ten minutes at most, so that a step that crashes or hangs
does not stop the others. The output of the current one goes to build/gpu/running.log. After each step, all
output and measurements are written to results.json and index.md there. Run it again to continue: a step that
succeeded with the same command and commit is not repeated, except with --again.

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
# Last characters of a step's output that are kept.
_MOST_PRINTED = 50_000


class Step(NamedTuple):
    """Step to run."""

    name: str
    limit: float  # seconds after which it is ended
    arguments: List[str]  # for Python
    writes_json: bool = False  # its command takes `--json FILE`


def steps(context: str, quick: bool) -> Iterator[Step]:
    """List all steps, the most important first."""
    extension = context.partition(":")[0]
    on_gpu = extension != "cpu"
    yield Step("doctor", 300, ["-m", "nnabla_adaloss", "doctor", *["--gpu"] * on_gpu])
    if on_gpu:
        kernels = ["benchmarks/gpu_kernels.py", "--largest-gib"]
        yield Step("kernel-checks", 600, [*kernels, "0", "--checks-only"])
        yield Step("kernels", 600, [*kernels, "0" if quick else "9"], True)
    yield from trainings(context, quick)
    accuracy = ["benchmarks/gpu_accuracy.py", "--context", context if on_gpu else "cpu:float"]
    yield Step("accuracy", 600, [*accuracy, "--iterations", "3" if quick else "300"], True)
    yield from samples(*context.split(":"), quick)
    tests = ["-m", "pytest", "-n", "1" if quick else "4", "--timeout", "120", "--tb", "short"]
    if not quick:
        for folder in sorted({path.parent for path in (ROOT / "tests").glob("*/test_*.py")}):
            command = [*tests, f"--context={extension}:float", f"tests/{folder.name}"]
            yield Step(f"tests-float-{folder.name}", 600, command)
    yield Step("tests-half", 600, [*tests, f"--context={context}", "-m", "any_context", "tests"])


def trainings(context: str, quick: bool) -> Iterator[Step]:
    """List the trainings that measure the cost of scaling."""
    script = ["benchmarks/gpu_training.py", "--context"]
    if quick:
        yield Step("training-quick", 600, [*script, context, "--network", "transformer", "--quick"], True)
        return
    yield Step("training-resnet50-64", 600, [*script, context], True)
    yield Step("training-resnet50-256", 600, [*script, context, "--batch", "256"], True)
    yield Step("training-transformer", 600, [*script, context, "--network", "transformer"], True)


def samples(extension: str, type_config: str, quick: bool) -> Iterator[Step]:
    """List the programs of samples/ that take a context."""
    for program in sorted((ROOT / "samples").glob("*.py")):
        if "common_options.start(" not in program.read_text(encoding="utf-8"):
            continue
        if quick and program.stem != "gan":
            continue  # the quickest: cpu:half takes minutes for a convolution net
        small = ["--iterations", "6", "--batch-size", "8"] if quick else []
        command = [f"samples/{program.name}", "-c", extension, "-t", type_config, *small]
        yield Step(f"sample-{program.stem}", 600, command)


def run(step: Step, folder: Path, commit: str) -> Dict[str, Any]:
    """Run a step; return its outcome."""
    command, written = [sys.executable, *step.arguments], folder / "running.json"
    log_file = folder / "running.log"
    if step.writes_json:
        command += ["--json", str(written)]
    # Import the package beside this script, not an installed one; other paths stay.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("CUDA_MODULE_LOADING", "LAZY")  # CUDA 12.0 loads all of every library otherwise
    start = time.monotonic()
    with open(log_file, "wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = f"exit code {process.wait(step.limit)}"
        except subprocess.TimeoutExpired:
            status = f"ended after {step.limit:.0f} s"
        finally:
            end_group(process)
    printed, result = log_file.read_text(encoding="utf-8", errors="replace"), read_json(written)
    for path in (log_file, written):
        path.unlink(missing_ok=True)
    return {
        "step": step.name,
        "command": step.arguments,
        "commit": commit,
        "status": "works" if status == "exit code 0" else status,
        "seconds": round(time.monotonic() - start, 1),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "printed": printed[-_MOST_PRINTED:],
        "result": result,
    }


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a step with its processes, which form a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_json(path: Path) -> Optional[Any]:
    """Read a JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_page(folder: Path, outcomes: List[Dict[str, Any]]) -> None:
    """Write all outcomes to results.json and index.md."""
    (folder / "results.json").write_text(json.dumps(outcomes, indent=2) + "\n", encoding="utf-8")
    lines = ["# nnabla_adaloss on this machine", ""]
    lines += ["| step | outcome | seconds | commit |", "|---|---|---|---|"]
    lines += [
        f"| [{one['step']}](#{one['step']}) | {one['status']} | {one['seconds']} | {one['commit']} |"
        for one in outcomes
    ]
    for one in outcomes:
        lines += ["", f"## {one['step']}", "", f"`python {' '.join(one['command'])}`, {one['date']}", ""]
        lines += ["```text", *one["printed"].splitlines()[-40:], "```"]
    (folder / "index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def commit_of_checkout() -> str:
    """Return the commit, with a + if files have changed since; the version without git."""
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
    add("--only", default="", metavar="TEXT", help="only steps whose names contain this")
    add("--quick", action="store_true", help="tiny networks, as a smoke test")
    add("--again", action="store_true", help="also repeat steps that succeeded before")
    add("--dry-run", action="store_true", help="print the commands")
    add("--out", type=Path, default=ROOT / "build/gpu", metavar="FOLDER", help="(default: build/gpu)")
    options = parser.parse_args()
    if ":" not in options.context:
        parser.error(f"--context {options.context}: write extension and type, such as cudnn:half")
    known = list(steps(options.context, options.quick))
    chosen = [step for step in known if step.name == options.only]
    chosen = chosen or [step for step in known if options.only in step.name]
    if options.dry_run:
        for step in chosen:
            print(f"{step.name:28} up to {step.limit:5.0f} s   python {' '.join(step.arguments)}")
        return 0
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    commit, outcomes = commit_of_checkout(), {}
    for one in read_json(folder / "results.json") or []:
        outcomes[one["step"]] = one
    for step in chosen:
        before = outcomes.get(step.name, {})
        same = before.get("command") == step.arguments and before.get("commit") == commit
        if same and before["status"] == "works" and not options.again:
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
