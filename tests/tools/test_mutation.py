# SPDX-License-Identifier: Apache-2.0
"""The runner of the mutation tests: what it tries, and what it reports. mutmut need not be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.mutation import ROOMS, ROOT, drawn, outcomes, prepare


@pytest.mark.parametrize("room", ROOMS)
def test_modules_and_tests_of_every_room_are_there(room: str) -> None:
    for pattern in (*ROOMS[room].modules, *ROOMS[room].without):
        assert list((ROOT / "nnabla_adaloss").glob(pattern)), pattern
    for path in ROOMS[room].tests:
        assert (ROOT / path).exists(), path


def test_a_draw_is_repeated_by_its_seed_and_does_not_depend_on_the_order() -> None:
    names = [f"mutant {number}" for number in range(40)]
    share = drawn(names, 0.25, seed=1)
    assert len(share) == len(set(share)) == 10
    assert share == drawn(reversed(names), 0.25, seed=1) != drawn(names, 0.25, seed=2)
    assert drawn(names, 1.0, seed=3) == sorted(names)


def test_the_copy_has_settings_of_its_own_and_deleted_files_are_gone(tmp_path: Path) -> None:
    prepare(tmp_path, ROOMS["state"], ["tests/state/test_state_file.py"])
    source, copy = (folder / "nnabla_adaloss" / "state" / "state_file.py" for folder in (ROOT, tmp_path))
    assert copy.read_bytes() == source.read_bytes()
    # By the time, mutmut sees what was edited.
    assert copy.stat().st_mtime == pytest.approx(source.stat().st_mtime)
    settings = (tmp_path / "pyproject.toml").read_text("utf-8")
    assert settings.startswith((ROOT / "pyproject.toml").read_text("utf-8"))
    assert '"nnabla_adaloss/state/*"' in settings
    assert '"tests/state/test_state_file.py"' in settings

    (tmp_path / "tests" / "gone.py").touch()
    prepare(tmp_path, ROOMS["state"], ["tests/state"])
    assert not (tmp_path / "tests" / "gone.py").exists()


def test_the_fate_of_each_mutant(tmp_path: Path) -> None:
    notes = tmp_path / "mutants" / "nnabla_adaloss" / "core"
    notes.mkdir(parents=True)
    tried = ({"a": 0, "b": 1, "c": 33, "d": None}, {"e": -24, "f": -11, "g": 1})
    for module, codes in zip(("one", "two"), tried):
        (notes / f"{module}.py.meta").write_text(json.dumps({"exit_code_by_key": codes}), "utf-8")
    killed = dict.fromkeys("bg", "killed")
    others = {"a": "survived", "c": "no test", "e": "timed out", "f": "crashed"}
    assert outcomes(tmp_path) == {**killed, **others}
