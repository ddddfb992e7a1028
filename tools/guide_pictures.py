# SPDX-License-Identifier: Apache-2.0
"""Photograph pages of the built guide with a real browser, for review."""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from tools.report_pictures import browse

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "build" / "guide"

DESCRIPTION = """\
Photographs pages of the guide that `make docs` has built, from top to bottom, on a desktop (1280 pixels wide)
and on a phone (390). Reports pages that are wider and pictures that are missing.
"""

EPILOG = """\
It needs a Chromium (Debian: apt install chromium). The exit status is 1 if there are faults.

examples:
  python -m tools.guide_pictures                        every page, to build/guide_pictures
  python -m tools.guide_pictures index recipes api/core
"""

WIDTHS = {"desktop": 1280, "phone": 390}
_TALLEST = 16000  # a Chromium takes no taller pictures

# A headless Chromium's window has at least 500 pixels: the page is in a frame of the wanted width.
_FRAME = """<!DOCTYPE html><body style="margin:0">
<iframe src="{page}" style="border:0;width:{width}px;height:{height}px"></iframe>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const missing = [...page.images].filter((image) => !image.naturalWidth).map((image) => image.src);
  document.body.dataset.found = JSON.stringify([root.scrollWidth, root.scrollHeight, missing]);
}};
</script>"""


class Look(NamedTuple):
    """Properties of a page in a browser of some width."""

    width: int
    height: int
    missing: List[str]


def photograph(page: Path, target: Path, width: int) -> Look:
    """Write a picture of a whole page in a browser of that width; return the page's properties."""
    from PIL import Image

    frame, sides = target.with_suffix(".html"), max(width, 500)
    frame.write_text(_FRAME.format(page=page.as_uri(), width=width, height=1600), "utf-8")
    shown = browse(frame, "--allow-file-access-from-files", f"--window-size={sides},1600", "--dump-dom")
    found = re.search(r'data-found="([^"]*)"', shown)
    if found is None:
        raise RuntimeError(f"the browser did not load {page}")
    look = Look(*json.loads(html.unescape(found[1])))
    height = min(look.height, _TALLEST)
    frame.write_text(_FRAME.format(page=page.as_uri(), width=width, height=height), "utf-8")
    options = f"--window-size={sides},{height}", f"--screenshot={target}"
    browse(frame, "--allow-file-access-from-files", *options)
    frame.unlink()
    picture = Image.open(target).convert("RGB")
    picture.crop((0, 0, width, picture.height)).save(target)
    return look


def faults(look: Look, width: int) -> List[str]:
    """Faults of a page, as text."""
    wide = [f"it is {look.width} pixels wide, of {width}"] if look.width > width else []
    return wide + [f"{address} is missing" for address in look.missing]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Photograph the given pages; return the exit status."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", help="pages, without suffix (default: all)")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "guide_pictures")
    options = parser.parse_args(arguments)
    names: List[str] = options.pages or sorted(
        str(path.relative_to(GUIDE).with_suffix("")) for path in GUIDE.rglob("*.html") if path.stem != "404"
    )
    options.output.mkdir(parents=True, exist_ok=True)
    status = 0
    for name in names:
        page = GUIDE / f"{name}.html"
        if not page.exists():
            parser.error(f"{page} does not exist: run `make docs`, or correct the name")
        for size, width in WIDTHS.items():
            target = options.output / f"{name.replace('/', '_')}_{size}.png"
            found = faults(photograph(page, target, width), width)
            print("; ".join([str(target), *found]))
            status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
