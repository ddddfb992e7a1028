# SPDX-License-Identifier: Apache-2.0
"""Commands of setuptools that differ for this package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Dict, Tuple

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from .native import LIBRARY, NATIVE, build_library

EXTENSION = Extension(
    f"nnabla_adaloss.kernels.native.{LIBRARY.stem}",
    [str(path.relative_to(NATIVE.parents[2])) for path in sorted(NATIVE.rglob("*.c"))],
)


class BuildLibrary(build_ext):
    """Builds a library that Python opens but that does not use Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without the version of Python."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile the library beside its sources, and copy it to the place that setuptools expects.

        Python started in a checkout imports the package from it, even if it is installed elsewhere.
        """
        build_library(LIBRARY)
        wanted = Path(self.get_ext_fullpath(ext.name)).absolute()
        if wanted != LIBRARY:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(LIBRARY, wanted)


COMMANDS: Dict[str, Any] = {"build_ext": BuildLibrary}

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # an old setuptools: good enough for build_ext
    pass
else:

    class WheelForEveryPython(bdist_wheel):
        """Tags the wheel with the library's platform, for every version of Python."""

        def get_tag(self) -> Tuple[str, str, str]:
            """The tag of the wheel, such as py3-none-linux_x86_64."""
            return "py3", "none", super().get_tag()[2]

    COMMANDS["bdist_wheel"] = WheelForEveryPython
