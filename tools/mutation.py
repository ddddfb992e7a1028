# SPDX-License-Identifier: Apache-2.0
"""Tries the tests of a room on mutants: copies of the package with one small fault each."""

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
Tries the tests of a room on mutants, copies of the package with one small fault each (mutmut makes them), and
lists the mutants that no test notices. What is found is kept in build/mutation, by room; a second run goes on
where the first stopped, and tries anew only what was edited since.
"""

EPILOG = """\
examples:
  python -m tools.mutation core                          every mutant of a room
  python -m tools.mutation core --only '*.overflow.*'    those of one module
  python -m tools.mutation updaters --share 0.3          a share of them, drawn by --seed
  python -m tools.mutation core --survivors              those that survived, on the tests as they are now
  python -m tools.mutation core --survivors tests/engine tests/updaters
                                                         those that survived, on other tests
  python -m tools.mutation --report                      the table, and what survived, of all runs so far
"""


class Room(NamedTuple):
    """Which modules are mutated together, and the tests that are to notice."""

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

# Exit codes of pytest under mutmut; a minus: the signal that ended it. Any other death is noticed, too.
_OUTCOMES = {0: "survived", 1: "killed", 3: "killed", 33: "no test", 36: "timed out", -24: "timed out"}
_UNNOTICED = ("survived", "no test")
_COLUMNS = ("killed", "timed out", "crashed", *_UNNOTICED)

# The tests read documentation, samples and tools. Slow ones start processes, in which mutmut sees nothing.
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
    """Make a copy of the repository that mutmut can work in, or bring it up to date.

    Files keep their times, by which mutmut knows what was edited.
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
    """The names of all mutants of the modules that `folder` is prepared for."""
    from mutmut.configuration import config
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.file_utils import walk_mutatable_files
    from mutmut.utils.format_utils import get_mutant_name

    os.chdir(folder)  # where mutmut looks for its settings
    config()
    return [
        get_mutant_name(path, name)
        for path in walk_mutatable_files()
        for name in mutate_file_contents(str(path), path.read_text("utf-8")).mutant_names
    ]


def drawn(names: Iterable[str], share: float, seed: int) -> List[str]:
    """A share of the names, the same whenever names and seed are the same."""
    ordered = sorted(names)
    return sorted(random.Random(seed).sample(ordered, round(share * len(ordered))))


def run(folder: Path, names: Optional[Sequence[str]], jobs: int) -> None:
    """Try the tests on the named mutants; None: on all that were not tried yet."""
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(jobs)]
    if names is None:
        subprocess.run(command, cwd=folder, check=True)
        return
    # mutmut compares each name with each mutant, so a call with a thousand names would take minutes to begin.
    for start in range(0, len(names), 250):
        subprocess.run([*command, *names[start : start + 250]], cwd=folder, check=True)


def outcomes(folder: Path) -> Dict[str, str]:
    """By name of a mutant that was tried, what became of it."""
    found = {}
    for path in sorted(folder.glob("mutants/**/*.meta")):
        for name, code in json.loads(path.read_text("utf-8"))["exit_code_by_key"].items():
            if code is not None:
                found[name] = _OUTCOMES.get(code, "crashed")
    return found


def report(folders: Iterable[Path]) -> None:
    """Print a table of what became of the mutants, and the survivors."""
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
        print("\nA survivor's fault is shown by: cd build/mutation/ROOM && mutmut show NAME")


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
    parser.add_argument("--share", type=float, default=1.0, help="how much of them (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at a time (default: 1)")
    parser.add_argument("--survivors", nargs="*", metavar="TESTS", help="only mutants that survived")
    parser.add_argument("--report", action="store_true", help="only print what was found so far")
    given = parser.parse_args()
    for name in given.rooms if not given.report else []:
        room, folder = ROOMS[name], WORK / name
        names = None
        if given.survivors is not None:
            names = [mutant for mutant, what in outcomes(folder).items() if what in _UNNOTICED]
            # mutmut forgets what it knows when the tests are others: they get a folder of their own.
            folder = WORK / f"{name}-others" if given.survivors else folder
        prepare(folder, room, given.survivors or room.tests)
        if given.survivors is not None:
            # mutmut would ask only new tests which functions they run, and old ones may run more than before.
            (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
        if names is None and (given.only != "*" or given.share < 1.0):
            names = drawn(fnmatch.filter(mutants_of(folder), given.only), given.share, given.seed)
        run(folder, names, given.jobs)
    report(sorted(path for path in WORK.glob("*") if path.is_dir()))


if __name__ == "__main__":
    main()
