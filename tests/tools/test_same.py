# SPDX-License-Identifier: Apache-2.0
"""The same checkout comes to the same hashes, a checkout with another margin to others."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from tools.same import differences, main
from tools.same_programs import PARTS, PROGRAMS, Program, numbers

ROOT = Path(__file__).parents[2]
THREE = "*[dpv]/float16/amax/[gh]*/[hk]*"


def test_each_pair_of_options_occurs() -> None:
    of = [{program[index] for program in PROGRAMS.values()} for index in range(len(Program._fields))]
    for (i, first), (j, second) in itertools.combinations(enumerate(of), 2):
        pairs = {(program[i], program[j]) for program in PROGRAMS.values()}
        missing = set(itertools.product(first, second)) - pairs
        without_config = {"fixed", "loss_scaler", "baseline"}
        assert not {pair for pair in missing if pair[1] not in without_config}, Program._fields[i]


def test_state_counts_whatever_its_keys_are_called() -> None:
    before = {"version": 6, "settings": {"N": 9}, "scale": {"scale": 8.0, "left": 1}, "amax": [[3, 0.5]]}
    after = {"version": 7, "chosen": [5], "s0": 8.0, "windows": {"amax": [3, 0.5]}}
    assert sorted(numbers(before)) == sorted(numbers(after)) == [0.5, 3.0, 8.0]


def test_differences_name_the_parts() -> None:
    before = {"a": "1 2 3 4 5", "b": "1 2 3 4 5", "c": "1 2 3 4 5"}
    now = {"a": "1 2 3 4 5", "b": "1 0 3 4 0", "c": "ValueError: 'no'"}
    assert differences(now, before) == [
        f"b  {PARTS[1]} {PARTS[4]}",
        "c  1 2 3 4 5 -> ValueError: 'no'",
    ]


def test_no_such_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(ROOT), "--only", "vgg/*"])
    assert "--only='vgg/*' matches no program, such as " in capsys.readouterr().err


@pytest.mark.slow
def test_another_margin_comes_to_other_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(ROOT), "--only", THREE])
    (tmp_path / "before.txt").write_text("# a comment\n" + capsys.readouterr().out, encoding="utf-8")
    again = ["--only", THREE, "--against", str(tmp_path / "before.txt")]
    with pytest.raises(SystemExit) as ended:
        main([str(ROOT), *again])
    assert capsys.readouterr().out == "0 of 3 programs differ\n"
    assert not ended.value.code

    shutil.copytree(ROOT / "nnabla_adaloss", tmp_path / "nnabla_adaloss")
    history = tmp_path / "nnabla_adaloss/core/scale_history.py"
    text = history.read_text(encoding="utf-8")
    assert "margin: float = 4.0" in text
    history.write_text(text.replace("margin: float = 4.0", "margin: float = 8.0"), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *again])
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 3 programs differ"
    assert ended.value.code
