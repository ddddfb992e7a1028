# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of a file: at any moment the path holds the old or the new content.

The content goes to a temporary file in the same folder, which is renamed to the old one once it is on disk.
Its writer keeps it locked, and a lock ends with its process: an unlocked temporary file was left by a writer
that was killed. On network file systems without locks between machines, the temporary file of a living writer
may be removed; it then writes another.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import stat
from contextlib import suppress
from typing import Optional, Union

PathLike = Union[str, "os.PathLike[str]"]

_SUFFIX = ".adaloss.tmp"
# Characters of the file's name at the start of a temporary name: up to four bytes each, of 255.
_KEPT = 50
# One is enough unless another writer removes the temporary file before it is locked.
_ATTEMPTS = 20
_PAGE = b"<!DOCTYPE html>"  # start of every page of this package
_SPECIAL = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def special_kind(status: os.stat_result) -> Optional[str]:
    """The kind of a special file, such as `"a FIFO"`; None for a file that can hold a state."""
    return _SPECIAL.get(stat.S_IFMT(status.st_mode))


def replace_file(path: PathLike, content: bytes) -> None:
    """Write `content` to `path`, or raise OSError and leave the old file; links are followed."""
    target = os.path.realpath(os.fsdecode(path))
    if not any(_write_and_rename(target, content) for _ in range(_ATTEMPTS)):
        raise FileNotFoundError(errno.ENOENT, "something removes its temporary files: stop it", target)
    # The file is written. The rest must not raise: not every folder can be opened or synced.
    with suppress(OSError):
        # The new name is on disk once its folder is.
        descriptor = os.open(os.path.dirname(target), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _remove_left_overs(target)


def replace_page(path: PathLike, page: str) -> None:
    """Write an HTML page by `replace_file` after `check_page`."""
    check_page(path)
    replace_file(path, page.encode("utf-8", "replace"))


def check_page(path: PathLike) -> None:
    """Raise ValueError if `path` holds something other than a page, such as the recording itself."""
    name = os.fsdecode(path)
    if os.path.isfile(name):
        with open(name, "rb") as file:
            before = file.read(len(_PAGE))
        if before not in (b"", _PAGE):
            raise ValueError(f"{name} is not an HTML page and is not replaced: choose another name")


def _write_and_rename(target: str, content: bytes) -> bool:
    """Write a temporary file and rename it to `target`; False if another writer removed it before."""
    old: Optional[os.stat_result] = None
    with suppress(FileNotFoundError):
        old = os.stat(target)
    kind = old and special_kind(old)
    if kind:
        raise OSError(errno.EINVAL, f"is {kind}: give the path of a file", target)
    # os.replace needs the same folder. The mode is strict until the old file's permissions are copied.
    mode = 0o666 if old is None else 0o600
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f"{name[:_KEPT]}.{secrets.token_hex(8)}{_SUFFIX}")
    with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        try:
            # OSError: a file system without locks, or another writer that holds the lock for a moment.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(content)
            file.flush()
            if old is not None:
                with suppress(OSError):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
                with suppress(OSError):  # a file system without permissions
                    os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode) & 0o777)
            os.fsync(file.fileno())
            os.replace(temporary, target)
        except FileNotFoundError:
            return False
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    return True


def _remove_left_overs(target: str) -> None:
    """Remove temporary files of writers that were killed: those that no process keeps locked."""
    folder, name = os.path.split(target)
    start = glob.escape(os.path.join(folder, name[:_KEPT]))
    for path in glob.iglob(f"{start}.{'[0-9a-f]' * 16}{_SUFFIX}"):
        with suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                # NFS locks only files opened for reading and writing.
                with open(path, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its writer lives
                    os.unlink(path)
