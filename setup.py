# SPDX-License-Identifier: Apache-2.0
"""Everything about this package is declared in pyproject.toml; other Pythons than it names are told so here, and
the README is made what a package index can show.

pip as old as Python 2.7's runs this file and reads no `requires-python`, so it has to be Python 2 as well.
"""

import io
import os
import re
import sys


def supported_minors():
    """The Pythons 3.x that pyproject.toml allows: 9 and 10 for 3.9 and 3.10."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pyproject.toml")
    with io.open(path, encoding="utf-8") as declared:
        first, end = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', declared.read()).groups()
    return range(int(first), int(end))


def refuse_other_pythons():
    """Exit with the Pythons that will do, unless this is one of them."""
    supported = ["3.{}".format(minor) for minor in supported_minors()]
    this = "{}.{}".format(*sys.version_info)
    if this not in supported:
        sys.exit(
            "nnabla-adaloss needs Python {}, for which nnabla has wheels; this is Python {}. Make an environment "
            "with one of those, for example: uv venv --python {}".format(
                " or ".join(supported), this, supported[-1]
            )
        )


refuse_other_pythons()

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # pip does not run this file as a script

from setuptools import setup  # noqa: E402

from building.commands import COMMANDS, EXTENSION  # noqa: E402
from building.compiler import packaged_compiler, system_compiler  # noqa: E402
from building.long_description import declared_source, long_description  # noqa: E402


def text_of(name):
    """What is in a file beside this one."""
    with io.open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), encoding="utf-8") as file:
        return file.read()


setup(
    ext_modules=[EXTENSION],
    cmdclass=COMMANDS,
    # pip asks for this before it builds. A backend of our own could say it as well, but pip 19 would not find that.
    setup_requires=[] if system_compiler() else [packaged_compiler],
    long_description=long_description(text_of("README.md"), declared_source(text_of("pyproject.toml"))),
    long_description_content_type="text/markdown",
)
