# SPDX-License-Identifier: Apache-2.0
"""One file that is there whole or not at all, and that nothing damaged passes for."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from nnabla_adaloss.state import FORMAT_VERSION, StateFileError, read_state, write_state

STATE = {"scale": 8.0, "layers": {"conv1": [3, 16.0, math.inf]}, "names": ["a", "b"], "flag": None}


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.floats(allow_subnormal=True), max_size=5))
@example([math.inf, -math.inf, math.nan, -0.0, 5e-324, 2.0**-24, 2.0**1023, 0.1])
def test_floats_come_back_bit_for_bit(tmp_path: Path, values: list[float]) -> None:
    path = tmp_path / "state"
    write_state(path, {"values": values})
    found = read_state(path)["values"]
    assert len(found) == len(values)
    for value, expected in zip(found, values):
        # A NaN is a NaN; nothing here tells one from another.
        assert bits(value) == bits(expected) or (math.isnan(value) and math.isnan(expected))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_any_plain_state_comes_back(tmp_path: Path, state: dict[str, Any]) -> None:
    write_state(tmp_path / "state", state)
    assert read_state(tmp_path / "state") == state


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_state(whole, STATE)
    content = whole.read_bytes()
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(StateFileError, match="cut"):
            read_state(cut)


@pytest.mark.slow
def test_a_flipped_byte_anywhere_is_noticed_or_harmless(tmp_path: Path) -> None:
    whole, flipped = tmp_path / "whole", tmp_path / "flipped"
    write_state(whole, STATE)
    content = whole.read_bytes()
    body = content.index(b"\n") + 1
    rng = np.random.default_rng(0)
    for position in range(len(content)):
        for mask in (0x01, int(rng.integers(1, 256))):
            damaged = bytearray(content)
            damaged[position] ^= mask
            flipped.write_bytes(damaged)
            try:
                found = read_state(flipped)
            except StateFileError:
                continue
            # White space in the header may change; what is loaded may not.
            assert position < body
            assert found == STATE


def rewritten(path: Path, **header: Any) -> None:
    first, body = path.read_bytes().split(b"\n", 1)
    path.write_bytes(json.dumps({**json.loads(first), **header}).encode() + b"\n" + body)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"version": FORMAT_VERSION + 1}, "update nnabla_adaloss"),
        ({"version": 0}, "damaged"),
        ({"version": None}, "damaged"),
        ({"kind": "something else"}, "no state file of nnabla_adaloss"),
        ({"sha256": "0" * 64}, "checksum does not match"),
    ],
)
def test_headers_that_cannot_be_read(tmp_path: Path, header: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "state"
    write_state(path, STATE)
    rewritten(path, **header)
    with pytest.raises(StateFileError, match=complaint):
        read_state(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"[1, 2]\n{}\n", b"\x89HDF\r\n\x1a\n\x00\x01", b"null\nnull\n"]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.h5"
    path.write_bytes(content)
    with pytest.raises(StateFileError, match=r"weights\.h5 is no state file"):
        read_state(path)
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path / "nothing")


def test_what_is_no_plain_value_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(path, STATE)
    with pytest.raises(TypeError):
        write_state(path, {"scale": np.float32(8.0)})
    assert read_state(path) == STATE
    assert os.listdir(tmp_path) == ["state"]


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "state"
    write_state(path, STATE)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            write_state(path, {"scale": 4.0})
    assert read_state(path) == STATE
    assert os.listdir(tmp_path) == ["state"]


def test_a_full_disk(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    path = tmp_path / "state"
    write_state(path, STATE)
    # The kernel refuses to let any file grow beyond 4 KiB, as a full disk or a quota does.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_state(path, {"values": [0.1] * 10_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert read_state(path) == STATE
    assert os.listdir(tmp_path) == ["state"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_state(tmp_path / "nowhere" / "state", STATE)
    assert os.listdir(tmp_path) == []


@contextmanager
def nobody() -> Iterator[None]:
    """No privileges, which the superuser has even on what is read-only."""
    privileged = os.geteuid() == 0
    if privileged:
        os.seteuid(65534)
    try:
        yield
    finally:
        if privileged:
            os.seteuid(0)


def test_a_folder_that_cannot_be_written() -> None:
    # Not in tmp_path, which only its owner may enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_state(folder / "state", STATE)
        folder.chmod(0o555)
        with nobody():
            with pytest.raises(PermissionError):
                write_state(folder / "state", {"scale": 4.0})
            assert read_state(folder / "state") == STATE
            assert os.listdir(folder) == ["state"]
        folder.chmod(0o755)


def test_a_target_that_is_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_state(tmp_path / "state", STATE)
    assert os.listdir(tmp_path) == ["state"]


def test_the_file_has_the_mode_that_any_new_file_has(tmp_path: Path) -> None:
    write_state(tmp_path / "state", STATE)
    (tmp_path / "other").write_bytes(b"")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("state", "other")}
    assert len(modes) == 1


def test_a_path_may_be_a_string_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_state("state", STATE)
    assert read_state("state") == STATE
    assert os.listdir(tmp_path) == ["state"]
