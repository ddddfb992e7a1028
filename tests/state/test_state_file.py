# SPDX-License-Identifier: Apache-2.0
"""One file that is there whole or not at all, and that nothing damaged passes for."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import pprint
import signal
import socket
import stat
from pathlib import Path
from typing import Any, Callable, List, Optional

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from nnabla_adaloss import StateFileError
from nnabla_adaloss.state import state_file, whole_file
from nnabla_adaloss.state.state_file import FORMAT_VERSION, read_state, write_state
from tests.worlds.children import end_of, in_a_child

STATE = {"scale": 8.0, "layers": {"conv1": [3, 16.0, math.inf]}, "names": ["a", "b"], "flag": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a state, alone in its folder."""
    write_state(tmp_path / "state", STATE)
    return tmp_path / "state"


def assert_alone(path: Path, state: Any = STATE) -> None:
    """Assert that the file holds this state, and that nothing is beside it."""
    assert read_state(path) == state
    assert os.listdir(path.parent) == [path.name]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refuse(number: int) -> Callable[..., None]:
    """What the system calls instead do that are not allowed."""

    def call(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=True) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
EXTREMES = [math.inf, -math.inf, math.nan, -0.0, 5e-324, 2.0**-24, 2.0**1023, 0.1]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.text(), JSON, max_size=3))
@example({"values": EXTREMES})
def test_any_plain_state_comes_back_bit_for_bit(tmp_path: Path, state: dict[str, Any]) -> None:
    write_state(tmp_path / "state", state)
    # Floats are written with all their digits, and the sign of a zero.
    assert pprint.pformat(read_state(tmp_path / "state")) == pprint.pformat(state)


def content_of(body: bytes = json.dumps(STATE).encode(), more: bytes = b"", **header: Any) -> bytes:
    """What a file would hold with this body, and with other entries in the header."""
    kind, checksum = "nnabla_adaloss state", hashlib.sha256(body).hexdigest()
    first = {"kind": kind, "version": FORMAT_VERSION, "sha256": checksum, **header}
    return json.dumps(first).encode() + b"\n" + body + b"\n" + more


def nested(depth: int) -> bytes:
    return b'{"a": ' + b"[" * depth + b"]" * depth + b"}"


NO_STATE = "state is not a state file"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            content_of(version=FORMAT_VERSION + 1),
            "format version 2, not 1: update nnabla_adaloss, or use an earlier checkpoint$",
        ),
        (content_of(version=0), "format version 0, not 1"),
        (content_of(version=None), "format version None, not 1"),
        (content_of(kind="something else"), f"{NO_STATE} of nnabla_adaloss$"),
        (content_of(sha256="0" * 64), "damaged: its checksum does not match; use an earlier checkpoint$"),
        (content_of(more=b"more\n"), "damaged: its checksum does not match; use an earlier checkpoint$"),
        (content_of(b"[1, 2]"), "state is damaged: it does not hold a state$"),
        (content_of(nested(2_000)), "state is damaged"),
        (content_of(nested(1_000_000)), "state is damaged"),
        (nested(1_000_000), NO_STATE),
        (b"", NO_STATE),
        (b"\n\n", NO_STATE),
        (b"[1, 2]\n{}\n", NO_STATE),
        (b"\x89HDF\r\n\x1a\n\x00\x01", NO_STATE),
        (b"null\nnull\n", NO_STATE),
    ],
    ids=range(15),
)
def test_faults_of_a_file_have_different_errors(path: Path, content: bytes, complaint: str) -> None:
    path.write_bytes(content)
    with pytest.raises(StateFileError, match=complaint):
        read_state(path)


def test_a_file_cut_off_anywhere_is_refused(path: Path) -> None:
    content = path.read_bytes()
    assert content == content_of(json.dumps(STATE, sort_keys=True).encode())
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(StateFileError, match="state"):
            read_state(path)


def test_a_huge_file_is_refused_without_reading_it(path: Path) -> None:
    os.truncate(path, 2**41)  # of holes
    with pytest.raises(StateFileError, match=r"damaged: it has 2199023255552 bytes.* earlier checkpoint$"):
        read_state(path)
    os.truncate(path, 0)
    os.truncate(path, 2**41)
    with pytest.raises(StateFileError, match=NO_STATE):
        read_state(path)


def test_paths_that_are_missing_or_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "far").symlink_to(tmp_path / "nowhere" / "state")
    (tmp_path / "folder").mkdir()
    for name, error in (("far", FileNotFoundError), ("circle", OSError), ("folder", IsADirectoryError)):
        with pytest.raises(error):
            write_state(tmp_path / name, STATE)
    assert sorted(os.listdir(tmp_path)) == ["circle", "far", "folder"]
    assert (tmp_path / "circle").is_symlink()


def test_values_that_json_cannot_hold_are_refused_before_writing(path: Path) -> None:
    with pytest.raises(TypeError):
        write_state(path, {"scale": np.float32(8.0)})
    assert_alone(path)


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            write_state(path, {"scale": 4.0})
        assert_alone(path)
        # It says why even where nothing can be tidied up.
        patch.setattr(os, "unlink", refuse(errno.EROFS))
        with pytest.raises(OSError, match="No space left"):
            write_state(path, {"scale": 4.0})
    assert read_state(path) == STATE


def test_attributes_that_a_file_system_refuses_are_left_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync
    asked = []

    def fsync(descriptor: int) -> None:
        asked.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        (refuse(errno.EIO) if asked[-1] else sync)(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for call in ("fchmod", "fchown", "listdir"):
            patch.setattr(os, call, refuse(errno.EPERM))
        write_state(path, {"scale": 4.0})
    assert asked == [False, True]
    assert_alone(path, {"scale": 4.0})


@pytest.mark.parametrize("there", [True, False])
def test_links_are_followed_and_kept(tmp_path: Path, there: bool) -> None:
    (tmp_path / "folder").mkdir()
    relative, target = tmp_path / "relative", tmp_path / "folder" / "state"
    relative.symlink_to(Path("folder", "state"))
    outer = tmp_path / "outer"
    outer.symlink_to(relative)
    if there:
        write_state(target, STATE)
        target.chmod(0o640)
    write_state(outer, {"scale": 4.0})
    assert outer.is_symlink()
    assert relative.is_symlink()
    assert not there or mode(target) == 0o640
    assert_alone(target, {"scale": 4.0})


def killed_while_saving(path: Path) -> None:
    """Write, and die of SIGKILL before the new file gets its name."""

    def action() -> None:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_state(path, {"scale": 4.0})

    assert end_of(in_a_child(action)) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["s" * 255, "\u5b66" * 85, "\U0001f600" * 63], ids=len)
def test_a_file_may_have_the_longest_name_there_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    killed_while_saving(path)
    assert len(os.listdir(tmp_path)) == 1
    write_state(path, STATE)
    assert_alone(path)


def test_files_of_killed_writers_are_removed_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "state [1]"
    write_state(path, STATE)
    killed_while_saving(path)
    assert read_state(path) == STATE
    (left,) = tmp_path.glob("*.tmp")
    token = left.name[len("state [1].") :]
    (tmp_path / f"state [1].0{token[1:]}").touch()  # killed before anything was written
    removed = set(tmp_path.glob("*.tmp"))
    for name in (
        f"state [1].{token[:16]}.tmp",
        f"state [1].backup.{token}",
        f"state [1].{token.upper()}",
        f"state [1].{token}.bak",
        f"state 1.{token}",
        f"astate [1].{token}",
        f"other.{token}",  # of another path
    ):
        (tmp_path / name).touch()
    zeros = f"state [1].{'0' * 16}.adaloss.tmp"
    (tmp_path / zeros.replace("0", "2")).mkdir()
    (tmp_path / zeros.replace("0", "3")).symlink_to(f"other.{token}")
    os.mkfifo(tmp_path / zeros.replace("0", "4"))
    before = set(tmp_path.iterdir())
    write_state(path, {"scale": 4.0})
    assert before - set(tmp_path.iterdir()) == removed
    assert read_state(path) == {"scale": 4.0}


@pytest.mark.parametrize("number", [None, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_writer_that_lives_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Optional[int]
) -> None:
    path = tmp_path / "state"
    ours, theirs = socket.socketpair()
    if number is not None:  # a file system without locks
        monkeypatch.setattr(fcntl, "flock", refuse(number))

    def slow() -> None:
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                theirs.sendall(b".")
                theirs.recv(1)
            sync(descriptor)

        ours.close()
        os.fsync = fsync  # type: ignore[assignment]
        whole_file._ATTEMPTS = 1  # one that loses its temporary file does not begin again
        write_state(path, {"scale": 2.0})

    pid = in_a_child(slow)
    theirs.close()
    ours.settimeout(60.0)
    assert ours.recv(1) == b"."
    write_state(path, {"scale": 4.0})
    assert read_state(path) == {"scale": 4.0}
    assert len(os.listdir(tmp_path)) == 2
    ours.close()
    assert end_of(pid) == 0
    assert read_state(path) == {"scale": 2.0}
    assert os.listdir(tmp_path) == ["state"]


def test_a_writer_whose_temporary_file_is_taken_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    sync = os.fsync
    taken: List[str] = []

    def fsync(descriptor: int) -> None:
        for found in tmp_path.glob("*.tmp"):
            if len(taken) < limit:
                taken.append(found.name)
                found.unlink()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    limit = 3
    write_state(path, STATE)
    assert len(set(taken)) == 3
    assert read_state(path) == STATE
    limit = 1000
    with pytest.raises(FileNotFoundError, match=": stop it") as caught:
        write_state(path, {"scale": 4.0})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, os.fspath(path))
    assert_alone(path)


def test_irregular_files_are_neither_read_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    for name, kind in (("fifo", "a FIFO"), ("socket", "a socket"), ("link", "a character device")):
        path = tmp_path / name
        before = path.stat()
        with pytest.raises(StateFileError, match=f"{name} is {kind}, not a state file"):
            read_state(path)
        with pytest.raises(OSError, match=f"is {kind}: give the path of a file") as caught:
            write_state(path, STATE)
        assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, os.path.realpath(path))
        assert path.stat() == before
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link", "socket"]


def test_states_too_large_to_be_read_are_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "_LARGEST", path.stat().st_size)
    write_state(path, STATE)
    assert read_state(path) == STATE
    with pytest.raises(ValueError, match="state takes .* bytes, more than .* file of their own$"):
        write_state(path, {**STATE, "more": 1})
    assert_alone(path)


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_the_mode_that_any_new_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int, expected: int
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(mask)
    try:
        write_state("state", STATE)
    finally:
        os.umask(before)
    assert_alone(tmp_path / "state")
    assert mode(tmp_path / "state") == expected


@pytest.mark.parametrize("kept", [0o600, 0o664, 0o444])
def test_a_file_that_is_replaced_keeps_its_mode(
    path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    path.chmod(kept)
    before = []
    change = os.fchmod

    def watched(descriptor: int, mode: int) -> None:
        before.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        change(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", watched)
    write_state(path, {"scale": 4.0})
    assert mode(path) == kept
    assert before == [0o600]  # nobody else reads it on the way
    assert read_state(path) == {"scale": 4.0}


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
def test_a_file_that_is_replaced_keeps_its_owner(path: Path) -> None:
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    write_state(path, {"scale": 4.0})
    assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (65534, 65534, 0o600)
