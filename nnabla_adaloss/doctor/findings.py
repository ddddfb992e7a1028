# SPDX-License-Identifier: Apache-2.0
"""What an examination found, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from enum import Enum
from itertools import groupby
from operator import attrgetter
from typing import List, NamedTuple, Sequence


class Area(str, Enum):
    """A way to use the package; each works or fails on its own."""

    CPU = "CPU"
    GPU = "GPU"
    MPI = "MPI"


class Status(str, Enum):
    """How an examined part is."""

    WORKS = "works"
    MISSING = "missing"
    BROKEN = "broken"
    NOT_TRIED = "not tried"


class Finding(NamedTuple):
    """One examined part.

    Attributes:
        area: what the part is needed for.
        status: how it is.
        subject: the part, by the name its users know it by.
        detail: version, place, or what is wrong, in plain words.
        cure: what to do about it; empty where there is nothing to do.
    """

    area: Area
    status: Status
    subject: str
    detail: str = ""
    cure: str = ""


def area_works(findings: Sequence[Finding], area: Area) -> bool:
    """Whether every part that an area needs works."""
    return all(finding.status is Status.WORKS for finding in findings if finding.area is area)


def as_json(findings: Sequence[Finding]) -> str:
    """For programs: a JSON object with `works`, a boolean per area, and `findings`, a list of objects."""
    works = {area.value: area_works(findings, area) for area in Area}
    return json.dumps({"works": works, "findings": [finding._asdict() for finding in findings]}, indent=2)


def as_text(findings: Sequence[Finding]) -> str:
    """For people: by area, a verdict, a line per part, and below it, or below all that share it, the cure."""
    lines: List[str] = []
    for area in Area:
        verdict = "works" if area_works(findings, area) else "does not work"
        lines += ["", f"{area.value}: {verdict}"]
        for cure, sharing_it in groupby((f for f in findings if f.area is area), key=attrgetter("cure")):
            for finding in sharing_it:
                lines += _paragraph(finding)
            if cure:  # may hold a command: not wrapped, so that it can be copied
                lines.append(f"{'':<{_MARGIN}}-> {cure}")
    return "\n".join(lines[1:])


_MARGIN = max(len(status.value) for status in Status) + 4


def _paragraph(finding: Finding) -> List[str]:
    statement = f"{finding.subject}: {finding.detail}" if finding.detail else finding.subject
    return textwrap.wrap(
        statement,
        110,
        initial_indent=f"  {finding.status.value}".ljust(_MARGIN),
        subsequent_indent=" " * _MARGIN,
        break_on_hyphens=False,
    )
