# SPDX-License-Identifier: Apache-2.0
"""README for a package index, where the files that it links to are not available.

setup.py calls this during a build; it needs only Python.
"""

from __future__ import annotations

import re

_FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]*)\)")


def declared_source(pyproject: str) -> str:
    """Read the address that a pyproject.toml declares as `Source` in `[project.urls]`.

    Example:
        >>> declared_source('[project.urls]\\nSource = "https://example.org/us/it"\\n')
        'https://example.org/us/it'
    """
    found = re.search(r'^\[project\.urls\]\n(?:(?!\[).*\n)*?Source = "([^"]*?)/?"$', pyproject, re.M)
    if found is None:
        raise ValueError("pyproject.toml declares no Source in [project.urls]: the README's links need it")
    return found[1]


def long_description(readme: str, source: str) -> str:
    """Make the links and pictures of a README in Markdown absolute: they lead to the repository at `source`,
    in the form of GitHub and GitLab.

    Example:
        >>> long_description("![A cat](cat.png) [Why?](why.md#cats)", "https://example.org/us/it")
        '![A cat](https://example.org/us/it/raw/HEAD/cat.png) [Why?](https://example.org/us/it/blob/HEAD/why.md#cats)'
    """

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        kind = "raw" if picture else "blob"
        return f"{picture}[{text}]({source}/{kind}/HEAD/{target})"

    parts = _FENCED.split(readme)  # every other part is a program
    return "".join(part if number % 2 else _LINK.sub(absolute, part) for number, part in enumerate(parts))
