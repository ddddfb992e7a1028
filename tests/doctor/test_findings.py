# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from nnabla_adaloss.doctor.findings import Area, Finding, Status, area_works, as_json, as_text

FINDINGS = [
    Finding(Area.CPU, Status.WORKS, "Python 3.10", "with everything"),
    Finding(Area.GPU, Status.WORKS, "driver", "/usr/lib/libcuda.so.1"),
    Finding(Area.GPU, Status.MISSING, "libcufft.so.11", "not installed", "pip install 'something'"),
    Finding(Area.GPU, Status.MISSING, "libcudnn.so.8", "not installed", "pip install 'something'"),
    Finding(Area.GPU, Status.NOT_TRIED, "CuPy"),
]


@pytest.mark.parametrize("status", [Status.MISSING, Status.BROKEN, Status.NOT_TRIED])
def test_an_area_works_when_all_of_it_does(status: Status) -> None:
    works = Finding(Area.GPU, Status.WORKS, "one part")
    assert area_works([works], Area.GPU)
    assert not area_works([works, Finding(Area.GPU, status, "another part")], Area.GPU)
    assert area_works([works, Finding(Area.MPI, status, "part of another area")], Area.GPU)


def test_text_has_verdicts_and_each_cure_once() -> None:
    assert as_text(FINDINGS).splitlines() == [
        "CPU: works",
        "  works      Python 3.10: with everything",
        "",
        "GPU: does not work",
        "  works      driver: /usr/lib/libcuda.so.1",
        "  missing    libcufft.so.11: not installed",
        "  missing    libcudnn.so.8: not installed",
        "             -> pip install 'something'",
        "  not tried  CuPy",
        "",
        "MPI: works",
    ]


def test_long_details_are_wrapped_and_commands_are_not() -> None:
    finding = Finding(Area.CPU, Status.BROKEN, "part", "word " * 60, "command " * 60)
    *detail, cure = as_text([finding]).split("\n\n")[0].splitlines()[1:]
    assert max(map(len, detail)) <= 110
    assert " ".join(" ".join(detail).split()) == "broken part: " + " ".join(["word"] * 60)
    assert cure.count("command") == 60


def test_json_is_for_programs() -> None:
    report = json.loads(as_json(FINDINGS))
    assert report["works"] == {"CPU": True, "GPU": False, "MPI": True}
    assert report["findings"][3] == {
        "area": "GPU",
        "status": "missing",
        "subject": "libcudnn.so.8",
        "detail": "not installed",
        "cure": "pip install 'something'",
    }
