# SPDX-License-Identifier: Apache-2.0
"""The README as a package index shows it: there, files that lie beside it are not at hand.

setup.py calls this while it builds; it needs nothing but Python.
"""

from __future__ import annotations

import re
from typing import Optional

_NOTE = "*Files that are named here, such as `{example}`, are in the source distribution.*\n"
_FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]*)\)")


def declared_source(pyproject: str) -> Optional[str]:
    """The address that a pyproject.toml declares as `Source` in `[project.urls]`; None when there is none.

    Example:
        >>> declared_source('[project.urls]\\nSource = "https://example.org/us/it"\\n')
        'https://example.org/us/it'
    """
    found = re.search(r'^\[project\.urls\]\n(?:(?!\[).*\n)*?Source = "([^"]*?)/?"$', pyproject, re.M)
    return found and found[1]


def long_description(readme: str, source: Optional[str] = None) -> str:
    """A README in Markdown whose links and pictures lead somewhere from anywhere.

    Args:
        readme: the text, with links to files beside it.
        source: where the repository is; links become absolute, as GitHub and GitLab spell them. None: links
            become names of files, and so do pictures, with what they show.

    Example:
        >>> print(long_description("![A cat](cat.png) [Why?](docs/why.md#cats) [NNabla](https://nnabla.org)"))
        *A cat (`cat.png`)* Why? (`docs/why.md`) [NNabla](https://nnabla.org)
        <BLANKLINE>
        *Files that are named here, such as `cat.png`, are in the source distribution.*
        <BLANKLINE>
        >>> long_description("![A cat](cat.png) [Why?](why.md#cats)", "https://example.org/us/it")
        '![A cat](https://example.org/us/it/raw/HEAD/cat.png) [Why?](https://example.org/us/it/blob/HEAD/why.md#cats)'
    """
    named = []

    def changed(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        path = target.partition("#")[0]
        if re.match(r"[a-z]+:", target) or not path:
            return link[0]
        if source is not None:
            kind = "raw" if picture else "blob"
            return f"{picture}[{text}]({source}/{kind}/HEAD/{target})"
        named.append(path)
        name = f"{text} (`{path}`)"
        return f"*{name}*" if picture else name

    parts = _FENCED.split(readme)  # every other one is a program
    text = "".join(part if number % 2 else _LINK.sub(changed, part) for number, part in enumerate(parts))
    return f"{text.rstrip()}\n\n{_NOTE.format(example=named[0])}" if named else text
