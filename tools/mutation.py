# SPDX-License-Identifier: Apache-2.0
"""Try the tests of a folder on mutants: copies of the package with one small fault each."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutation"

DESCRIPTION = """\
Tries the tests of a folder on mutants, copies of the package with one small fault each (made by mutmut), and
lists the mutants that no test kills. Results are kept in build/mutation, by folder; a second run continues
the first, and repeats only edited functions.
"""

EPILOG = """\
examples:
  python -m tools.mutation core                          every mutant of a folder
  python -m tools.mutation core --only '*.overflow.*'    those of one module
  python -m tools.mutation updaters --share 0.3          a share of them, drawn by --seed
  python -m tools.mutation core --survivors              survivors, with the tests as they are now
  python -m tools.mutation core --survivors tests/engine tests/updaters
                                                         survivors, with other tests
  python -m tools.mutation --report                      the table, and the survivors, of all runs so far
"""


class Room(NamedTuple):
    """Modules that are mutated together, and the tests that should fail."""

    modules: Tuple[str, ...]
    tests: Tuple[str, ...]
    without: Tuple[str, ...] = ()


ROOMS = {
    "core": Room(("core/*",), ("tests/core",)),
    "state": Room(("state/*",), ("tests/state",)),
    "emulation": Room(("emulation/*",), ("tests/emulation",)),
    "engine": Room(("engine/*",), ("tests/engine",)),
    "undo": Room(("undo/*",), ("tests/undo",)),
    "updaters": Room(("updaters/*",), ("tests/updaters",), without=("updaters/exchange.py",)),
    "exchange": Room(
        ("updaters/exchange.py", "communicators/agreement.py"),
        (
            "tests/updaters/test_exchange.py",
            "tests/communicators/test_agreement.py",
        ),
    ),
}

# Exit codes of pytest under mutmut; negative: the signal that ended it. Any other counts as killed.
_OUTCOMES = {0: "survived", 1: "killed", 3: "killed", 33: "no test", 36: "timed out", -24: "timed out"}
_UNNOTICED = ("survived", "no test")
_COLUMNS = ("killed", "timed out", "crashed", *_UNNOTICED)

# The tests read documentation, samples and tools. Slow ones start processes, which mutmut cannot follow.
_COPIED = (
    "conftest.py",
    "docs",
    "samples",
    "benchmarks",
    "tools",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
_PYTEST = ("-m", "not slow and not mpi")

_SETTINGS = """
[tool.mutmut]
source_paths = ["nnabla_adaloss"]
only_mutate = {only_mutate}
do_not_mutate = {do_not_mutate}
also_copy = {also_copy}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:doctest", "-o", "addopts=--import-mode=importlib"]
pytest_add_cli_args_test_selection = {selection}
use_git_change_detection = false
timeout_constant = 5.0
timeout_multiplier = 3.0
"""


def prepare(folder: Path, room: Room, tests: Sequence[str]) -> None:
    """Make or update a copy of the repository for mutmut.

    Files keep their times, by which mutmut finds edits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("nnabla_adaloss", "tests", *_COPIED):
        source, copy = ROOT / name, folder / name
        if source.is_file():
            shutil.copy2(source, copy)
        else:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "build"))
    settings = _SETTINGS.format(
        only_mutate=_listed(room.modules),
        do_not_mutate=_listed(room.without),
        also_copy=json.dumps(list(_COPIED)),
        selection=json.dumps([*_PYTEST, *tests]),
    )
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text("utf-8") + settings, "utf-8")


def _listed(modules: Iterable[str]) -> str:
    return json.dumps([f"nnabla_adaloss/{module}" for module in modules])


def mutants_of(folder: Path) -> List[str]:
    """Names of all mutants of the modules that `folder` is prepared for."""
    from mutmut.configuration import config
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.file_utils import walk_mutatable_files
    from mutmut.utils.format_utils import get_mutant_name

    os.chdir(folder)  # mutmut reads its settings from here
    config()
    return [
        get_mutant_name(path, name)
        for path in walk_mutatable_files()
        for name in mutate_file_contents(str(path), path.read_text("utf-8")).mutant_names
    ]


def drawn(names: Iterable[str], share: float, seed: int) -> List[str]:
    """Draw a share of the names, determined by names and seed."""
    ordered = sorted(names)
    return sorted(random.Random(seed).sample(ordered, round(share * len(ordered))))


def run(folder: Path, names: Optional[Sequence[str]], jobs: int) -> None:
    """Try the tests on the named mutants; None: on all untried ones."""
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(jobs)]
    if names is None:
        subprocess.run(command, cwd=folder, check=True)
        return
    # mutmut compares each name with each mutant: a call with a thousand names would take minutes to start.
    for start in range(0, len(names), 250):
        subprocess.run([*command, *names[start : start + 250]], cwd=folder, check=True)


def outcomes(folder: Path) -> Dict[str, str]:
    """Outcome of each tried mutant, by name."""
    found = {}
    for path in sorted(folder.glob("mutants/**/*.meta")):
        for name, code in json.loads(path.read_text("utf-8"))["exit_code_by_key"].items():
            if code is not None:
                found[name] = _OUTCOMES.get(code, "crashed")
    return found


def report(folders: Iterable[Path]) -> None:
    """Print a table of the outcomes, and the survivors."""
    print(f"| {'room':<24} | tried | {' | '.join(_COLUMNS)} |")
    print(f"|{'-' * 26}|------:|{'|'.join('-' * (len(c) + 1) + ':' for c in _COLUMNS)}|")
    survivors = []
    for folder in folders:
        found = outcomes(folder)
        counts = Counter(found.values())
        cells = " | ".join(f"{counts[column]:>{len(column)}}" for column in _COLUMNS)
        print(f"| {folder.name:<24} | {len(found):>5} | {cells} |")
        survivors += [(folder, name) for name, what in found.items() if what in _UNNOTICED]
    for folder, name in survivors:
        print(f"{folder.name}: {name}")
    if survivors:
        print("\nTo show a survivor's fault: cd build/mutation/ROOM && mutmut show NAME")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rooms", nargs="*", choices=[[], *ROOMS], metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--only", metavar="PATTERN", default="*", help="mutants whose names match")
    parser.add_argument("--share", type=float, default=1.0, help="share of them to try (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time (default: 1)")
    parser.add_argument("--survivors", nargs="*", metavar="TESTS", help="only mutants that survived")
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    given = parser.parse_args()
    for name in given.rooms if not given.report else []:
        room, folder = ROOMS[name], WORK / name
        names = None
        if given.survivors is not None:
            names = [mutant for mutant, what in outcomes(folder).items() if what in _UNNOTICED]
            # mutmut drops its results when the tests change: other tests get a folder of their own.
            folder = WORK / f"{name}-others" if given.survivors else folder
        prepare(folder, room, given.survivors or room.tests)
        if given.survivors is not None:
            # mutmut would trace only new tests, and old ones may run more functions than before.
            (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
        if names is None and (given.only != "*" or given.share < 1.0):
            names = drawn(fnmatch.filter(mutants_of(folder), given.only), given.share, given.seed)
        run(folder, names, given.jobs)
    report(sorted(path for path in WORK.glob("*") if path.is_dir()))


if __name__ == "__main__":
    main()
