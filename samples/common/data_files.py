# SPDX-License-Identifier: Apache-2.0
"""Files of data that may be missing, truncated, or of another kind."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path


class DataError(SystemExit):
    """A data file is missing or wrong; a program that does not catch this ends with the message."""


def read(path: Path, what: str) -> bytes:
    """Read a file, or unpack the one with `.gz` after its name.

    Args:
        path: the file.
        what: its contents, for the message.

    Raises:
        DataError: it is missing, cannot be read, or is not a gzip file.
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
