# SPDX-License-Identifier: Apache-2.0
"""Photographs pages of the built guide with a real browser, to be looked at."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import List, Optional, Sequence

from tools.report_pictures import browser

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "build" / "guide"

DESCRIPTION = """\
Photographs pages of the guide that `make docs` has built, as they look on a desktop (1280 pixels wide) and on
a phone (390).
"""

EPILOG = """\
It needs a Chromium (Debian: apt install chromium).

examples:
  python -m tools.guide_pictures                        every page, to build/guide_pictures
  python -m tools.guide_pictures index recipes api/core
"""

SIZES = {"desktop": (1280, 1600), "phone": (390, 1600)}


def photograph(page: Path, target: Path, width: int, height: int) -> None:
    """Write a picture of a page as a browser of that size shows it.

    A headless Chromium has a window of 500 pixels at least: the page stands in a frame of the width.
    """
    frame = target.with_suffix(".html")
    frame.write_text(
        f'<!DOCTYPE html><body style="margin:0"><iframe src="{page.as_uri()}" '
        f'style="border:0;width:{width}px;height:{height}px"></iframe>',
        "utf-8",
    )
    command = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--virtual-time-budget=3000", "--allow-file-access-from-files"]
    command += [f"--window-size={max(width, 500)},{height}", f"--screenshot={target}", frame.as_uri()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
    frame.unlink()
    _cut(target, width)


def _cut(path: Path, width: int) -> None:
    from PIL import Image

    picture = Image.open(path).convert("RGB")
    picture.crop((0, 0, width, picture.height)).save(path)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Photograph what is asked for."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", help="pages without their ending; all if not given")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "guide_pictures")
    options = parser.parse_args(arguments)
    names: List[str] = options.pages or sorted(
        str(path.relative_to(GUIDE).with_suffix("")) for path in GUIDE.rglob("*.html") if path.stem != "404"
    )
    options.output.mkdir(parents=True, exist_ok=True)
    for name in names:
        page = GUIDE / f"{name}.html"
        if not page.exists():
            parser.error(f"{page} is not there: run `make docs`, or is its name another?")
        for size, (width, height) in SIZES.items():
            target = options.output / f"{name.replace('/', '_')}_{size}.png"
            photograph(page, target, width, height)
            print(target)


if __name__ == "__main__":
    main()
