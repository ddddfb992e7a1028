# SPDX-License-Identifier: Apache-2.0
"""Writes the files that `tests/updaters/test_saved_files.py` loads, with a checkout of an older version.

PYTHONPATH=../before:. python tests/saved/write.py tests/saved/ec556a95
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nnabla_adaloss
from tests.saved.trainings import TRAININGS, Saved

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    print(f"written by {nnabla_adaloss.__file__}")
    lines = []
    for name in TRAININGS:
        saved = Saved(folder, name)
        saved.write()
        lines.append(f"{json.dumps(name)}: {json.dumps(saved.go_on(from_states=False))}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (folder / "outcomes.json").write_text(text, encoding="utf-8")
