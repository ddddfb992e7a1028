# SPDX-License-Identifier: Apache-2.0
"""What `python -m nnabla_adaloss analyse` does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Optional

from .examination import diagnose
from .program import ProgramError, load_program


def analyse(place: str, storage: str, batches: int, page: Optional[str], *, as_json: bool) -> int:
    """Diagnose the network that a function of a file returns, and print what was found.

    Args:
        place: `FILE.py:function`.
        storage: name of the format that is tried.
        batches: how many batches are looked at.
        page: where a page is written to; None: nowhere.
        as_json: print a JSON object instead of text.

    Returns:
        The exit code: 0 when a way of scaling, or none at all, keeps all gradients; 1 when no loss scale
        helps; 2 when the network could not be examined.
    """
    if page is not None and not Path(page).resolve().parent.is_dir():
        print(f"error: there is no folder {Path(page).parent} to write {Path(page).name} to", file=sys.stderr)
        return 2
    try:
        program = load_program(place)
        diagnosis = diagnose(program.loss, storage, program.feeder, batches)
        if page is not None:
            diagnosis.write_html(page)
    except (ProgramError, TypeError, ValueError, OSError) as error:
        message = str(error) if isinstance(error, ProgramError) else f"{place}: {error}"
        print(f"error: {message}", file=sys.stderr)
        return 2
    print(json.dumps(diagnosis.as_dict(), indent=2, allow_nan=False) if as_json else diagnosis)
    return 0 if diagnosis.verdict.needs is not None else 1
