# SPDX-License-Identifier: Apache-2.0
"""What is looked at before anything is tried."""

from __future__ import annotations

import platform

import pytest

from nnabla_adaloss.doctor import Status, checks
from nnabla_adaloss.doctor.checks import examine_cpu, python_without_nnabla


@pytest.mark.parametrize("version", ["3.8.20", "3.11.2", "3.12.0rc1", "3.13.5"])
def test_a_python_without_wheels_comes_first_and_its_cure_is_another_python(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: version)
    monkeypatch.setattr(checks, "namespace_folders", lambda package: [])
    first, *others = examine_cpu()
    assert first.status is Status.MISSING
    assert version in first.subject
    assert "python3.10 -m venv" in first.cure
    assert [finding.status for finding in others] == [Status.NOT_TRIED]


@pytest.mark.parametrize(("version", "there"), [("3.9.1", False), ("3.10.14", False), ("3.12.1", True)])
def test_a_python_that_can_have_nnabla_or_has_it_is_no_finding(version: str, there: bool) -> None:
    assert python_without_nnabla(version, there) is None
