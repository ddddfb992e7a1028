# SPDX-License-Identifier: Apache-2.0
"""What a sample needs: it says so in one sentence, or needs nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from common import NEEDED

from tests.samples.running import ROOT, run

# Python imports `sitecustomize` before it runs anything.
ABSENT = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == "sklearn" else find(name, *rest))
"""


def test_what_samples_need_is_the_extra_of_the_package() -> None:
    (extra,) = re.findall(r"^samples = \[(.*)\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert sorted(NEEDED.values()) == sorted(re.findall(r'"([\w-]+)', extra))


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["gan", "demo", "compare", "distributed"])
def test_without_it_a_sample_says_what_to_install(sample: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    done = run(sample, path=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "The samples need scikit-learn: python -m pip install scikit-learn"
    assert "Traceback" not in done.stderr
