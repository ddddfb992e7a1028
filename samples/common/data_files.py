# SPDX-License-Identifier: Apache-2.0
"""Files of data that may be missing, cut short, or of another kind."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path


class DataError(SystemExit):
    """A file is not what it should be; a program that does not catch this ends with its message."""


def read(path: Path, what: str) -> bytes:
    """What is in a file, or in one of that name and `.gz`, which is packed.

    Args:
        path: the file.
        what: what it holds, for the message.

    Raises:
        DataError: it is not there, cannot be read, or is not packed as it should be.
    """
    packed = path.with_name(path.name + ".gz")
    try:
        return (
            path.read_bytes()
            if path.exists() or not packed.exists()
            else gzip.decompress(packed.read_bytes())
        )
    except FileNotFoundError:
        raise DataError(f"{path} is missing: it holds {what}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{packed} is no whole gzip file ({error}): fetch it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
