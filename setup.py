# SPDX-License-Identifier: Apache-2.0
"""Everything about this package is declared in pyproject.toml."""

from setuptools import setup

setup()
