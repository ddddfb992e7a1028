# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Dict

import pytest

ROOT = Path(__file__).parent.parent.parent

ASK = """
from unittest.mock import patch
from building import backend
with patch.object(backend.build_meta, "get_requires_for_build_wheel", lambda settings: []):
    print(backend.get_requires_for_build_wheel(), backend.get_requires_for_build_editable())
"""


def needed(environment: Dict[str, str]) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


@pytest.mark.slow
def test_a_compiler_is_asked_for_only_where_there_is_none(tmp_path: Path) -> None:
    assert needed({"PATH": str(tmp_path), "CC": "gcc"}) == "[] []"
    assert needed({"PATH": str(tmp_path)}) == "['ziglang>=0.13'] ['ziglang>=0.13']"


def test_old_pythons_can_read_it() -> None:
    text = (ROOT / "building" / "backend.py").read_text("ascii")
    text += (ROOT / "building" / "__init__.py").read_text("ascii")
    assert "annotations" not in text
    assert "->" not in text
