# SPDX-License-Identifier: Apache-2.0
"""A file that grows by whole pieces."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import Union

from ..state.whole_file import special_kind

PathLike = Union[str, "os.PathLike[str]"]


class AppendedFile:
    """Appends to a file, which is made when it is not there. A piece is given to the operating system at
    once, so that it outlives the process; of one that does not fit on the disk nothing stays behind.
    ValueError for a FIFO, a device or a socket.
    """

    def __init__(self, path: PathLike) -> None:
        self.name = os.fsdecode(path)
        if os.path.exists(self.name):
            kind = special_kind(os.stat(self.name))
            if kind:  # which one might wait for
                raise ValueError(f"{self.name} is {kind}: give the path of a file")
        self._file = io.FileIO(self.name, "a+")

    def append(self, piece: bytes) -> None:
        """Write all of it, or raise OSError; ValueError when the file is closed."""
        if self._file.closed:
            raise ValueError(f"{self.name} is closed: nothing can be recorded to it any more")
        size, rest = os.fstat(self.fileno()).st_size, piece
        try:
            while rest:  # a disk that is nearly full takes the beginning; then the rest tells what is wrong
                rest = rest[self._file.write(rest) :]
        except BaseException:
            with suppress(OSError):
                self._file.truncate(size)
            raise

    def fileno(self) -> int:
        """The descriptor, for what locks it."""
        return self._file.fileno()

    def truncate(self, size: int) -> None:
        """Take away what is behind the first `size` bytes."""
        self._file.truncate(size)

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        self._file.close()
