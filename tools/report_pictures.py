# SPDX-License-Identifier: Apache-2.0
"""Photograph the page of `python -m nnabla_adaloss report` for the documentation, with a real browser."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Optional, Sequence

ROOT = Path(__file__).resolve().parent.parent

DESCRIPTION = """\
Trains a small network with faults of several kinds, records it, renders the page, and photographs its top on
a desktop (1280 pixels wide), and all of it on a phone (390) and on paper.
"""

EPILOG = """\
It needs a Chromium (`chromium`, `chromium-browser` or `google-chrome`; Debian: apt install chromium) and, for
the picture of the paper, pdftoppm (apt install poppler-utils); and Pillow, which the extra `samples` brings.

examples:
  python -m tools.report_pictures                     the pictures in docs/images
  python -m tools.report_pictures --output /tmp/look  another folder, also for page and recording
"""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The desktop's first screen, and the whole page on a phone: Chromium's limit of height.
SIZES = {"desktop": (1280, 1370), "phone": (390, 16000)}


def record(path: Path) -> None:
    """Train with a single scale that has to grow first, on partly bad data."""
    import nnabla as nn
    import nnabla.functions as F
    import nnabla.parametric_functions as PF
    import nnabla.solvers as S
    import numpy as np

    from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, Recorder

    random = np.random.default_rng(0)
    nn.clear_parameters()
    nn.seed(0)
    x, t = nn.Variable((64, 1, 12, 12)), nn.Variable((64, 1))
    # A convolutional branch of little weight: its gradients are tiny.
    branch = F.max_pooling(F.tanh(PF.convolution(x, 8, (3, 3), pad=(1, 1), name="conv1")), (2, 2))
    branch = PF.affine(F.tanh(PF.convolution(branch, 16, (3, 3), pad=(1, 1), name="conv2")), 48, name="join")
    h = F.tanh(PF.affine(x, 48, name="fc0") + branch * 2.0**-22)
    for index in range(1, 5):
        h = F.tanh(PF.affine(h, 48, name=f"fc{index}"))
    loss = F.mean(F.softmax_cross_entropy(PF.affine(h, 10, name="head"), t)) * 1e-3
    solver = S.Momentum(30.0, 0.9)
    solver.set_parameters(nn.get_parameters())
    patterns = random.standard_normal((10, 1, 12, 12))
    batches = [0]

    def feed() -> None:
        t.d = random.integers(0, 10, t.shape)
        x.d = patterns[t.d.astype(int).ravel()] + 1.5 * random.standard_normal(x.shape)
        batches[0] += 1
        if batches[0] in (150, 151, 333):
            x.d[0] = np.nan

    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        feed,
        N=12,
        # The picture should show underflow.
        config=AdaLossConfig(loss_scale_method="approx_range"),
        storage="float16",
        global_scale="dynamic",
        on_nonfinite_loss="skip",
        on_nonfinite_forward="skip",
        monitors=[Recorder(path, limit=1)],
    )
    for _ in range(400):
        updater.update()


def browser() -> str:
    """Find the first installed browser."""
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    sys.exit(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: apt install chromium)")


def browse(page: Path, *options: str) -> str:
    """Open a page in a headless browser; return its output."""
    command = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--virtual-time-budget=3000", *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=120).stdout


def photograph(page: Path, folder: Path) -> List[Path]:
    """Write the pictures of a page; return their paths."""
    made = []
    for name, (width, height) in SIZES.items():
        made.append(folder / f"report_{name}.png")
        browse(page, f"--window-size={width},{height}", f"--screenshot={made[-1]}")
    if not shutil.which("pdftoppm"):
        sys.exit("no pdftoppm for the picture of the paper (Debian: apt install poppler-utils)")
    paper = folder / "report.pdf"
    browse(page, "--no-pdf-header-footer", f"--print-to-pdf={paper}")
    command = ["pdftoppm", "-png", "-r", "60", str(paper), str(folder / "sheet")]
    subprocess.run(command, check=True, timeout=120)
    sheets = sorted(folder.glob("sheet-*.png"))
    made.append(_side_by_side(sheets, folder / "report_print.png"))
    for path in (paper, *sheets):
        path.unlink()
    return made


def _side_by_side(sheets: Sequence[Path], target: Path) -> Path:
    from PIL import Image

    pictures = [Image.open(sheet) for sheet in sheets]
    gap = 8
    width = sum(p.width for p in pictures) + gap * (len(pictures) + 1)
    whole = Image.new("RGB", (width, max(p.height for p in pictures) + 2 * gap), "#8a949e")
    left = gap
    for picture in pictures:
        whole.paste(picture, (left, gap))
        left += picture.width + gap
    whole.save(target)
    return target


def make_small(path: Path) -> None:
    """Crop the empty end of a picture, and reduce it to 200 colours, which is not visible."""
    from PIL import Image, ImageChops

    picture = Image.open(path).convert("RGB")
    box = ImageChops.difference(picture, Image.new("RGB", picture.size, "#ffffff")).getbbox()
    if box is not None:
        picture = picture.crop((0, 0, picture.width, min(box[3] + 24, picture.height)))
    picture.quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.report_pictures",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="folder for the pictures, the page and the recording")
    options = parser.parse_args(arguments)
    browser()  # fails before the training if there is none
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.output or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        recording, page = folder / "run.jsonl", folder / "run.html"
        recording.unlink(missing_ok=True)
        record(recording)
        title = "A small net in fp16, one scale that has to grow"
        command = [sys.executable, "-m", "nnabla_adaloss", "report", str(recording), "--title", title]
        subprocess.run(command, check=True, cwd=ROOT)
        for picture in photograph(page, folder):
            make_small(picture)
            target = (options.output or ROOT / "docs" / "images") / picture.name
            if picture.resolve() != target.resolve():
                shutil.copy(picture, target)
            print(f"{target}: {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
