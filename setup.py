# SPDX-License-Identifier: Apache-2.0
"""Everything about this package is declared in pyproject.toml; a Python that cannot have nnabla is told so here.

pip as old as Python 2.7's runs this file and reads no `requires-python`, so it has to be Python 2 as well.
"""

import io
import os
import re
import sys

from setuptools import setup


def supported_minors():
    """The Pythons 3.x that pyproject.toml allows: `range(9, 11)` for 3.9 and 3.10."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pyproject.toml")
    with io.open(path, encoding="utf-8") as declared:  # noqa: UP020: Python 2's own open() knows no encoding
        first, end = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', declared.read()).groups()
    return range(int(first), int(end))


def main():
    """Build, or say which Pythons will do."""
    minors = supported_minors()
    if sys.version_info[0] != 3 or sys.version_info[1] not in minors:
        supported = " or ".join("3.%d" % minor for minor in minors)
        sys.exit(
            "nnabla-adaloss needs Python %s, for which nnabla has wheels; this is Python %d.%d. Make an environment "
            "with one of those, for example: uv venv --python 3.%d" % ((supported,) + sys.version_info[:2] + (minors[-1],))
        )
    setup()


main()
