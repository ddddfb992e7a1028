# SPDX-License-Identifier: Apache-2.0
"""What pip calls to build the package: setuptools, and a C compiler for machines that have none.

Read by pip as old as Python 2.7's, to whose users setup.py says which Pythons will do.
"""

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings=None):
    """The packages that are needed to build."""
    needed = build_meta.get_requires_for_build_wheel(config_settings)  # runs setup.py: other Pythons end here
    from .compiler import packaged_compiler, system_compiler

    return needed if system_compiler() else [*needed, packaged_compiler]


get_requires_for_build_editable = get_requires_for_build_wheel
