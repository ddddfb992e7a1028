# SPDX-License-Identifier: Apache-2.0
"""The command `python -m nnabla_adaloss report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Draw a recorded training as one HTML page: layer scales and underflow over the iterations, overflows, repeated
and lost batches, the loss scale and the loss, as pictures and tables. Given two recordings, the page compares
them, differences first.
"""

_EPILOG = """\
How to record one:
  from nnabla_adaloss import AdaptiveLossScalingUpdater, Recorder
  updater = AdaptiveLossScalingUpdater(solver, loss, feed, monitors=[Recorder("run.jsonl", every=10)])

The recording can be read during the training, and after it was killed. The page is one file without scripts
and needs no network.

examples:
  python -m nnabla_adaloss report run.jsonl                     writes run.html
  python -m nnabla_adaloss report run.jsonl -o page.html        another name
  python -m nnabla_adaloss report run.jsonl --title 'LeNet, fp16, weight 1e-6'
  python -m nnabla_adaloss report fp16.jsonl bf16.jsonl         writes fp16_and_bf16.html

The exit code is 0 if the page was written, 1 if there is nothing to draw, and 2 if there is no such file.
"""


def add_command(commands: Any) -> None:
    """Add the command to those of a parser."""
    parser = commands.add_parser(
        "report",
        help="draw a recorded training, or compare two, as a page",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path, metavar="RUN.jsonl", help="what Recorder('RUN.jsonl') wrote")
    parser.add_argument(
        "other", type=Path, nargs="?", metavar="OTHER.jsonl", help="a second recording, to compare it with"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PAGE.html",
        help="the page; one that is there is replaced, but no other file (default: RUN.html or "
        "RUN_and_OTHER.html)",
    )
    parser.add_argument("--title", help="heading of the page (default: the names of the recordings)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    # Here, so that what only asks for help or for another command does not wait for it.
    from ..monitor import Recording
    from ..state.whole_file import replace_page
    from .comparison import comparison_of
    from .page import page_of

    paths = [path for path in (options.recording, options.other) if path is not None]
    output = options.output or paths[0].with_name("_and_".join(path.stem for path in paths) + ".html")
    try:
        recordings = [Recording.load(path) for path in paths]
        for path, recording in zip(paths, recordings):
            if not recording.rows:
                raise ValueError(f"nothing was recorded in {path}: there is nothing to draw")
        if len(paths) == 1:
            page = page_of(recordings[0], options.title or paths[0].name)
        else:
            one, two = map(str, paths) if paths[0].stem == paths[1].stem else (path.stem for path in paths)
            two += ", again" if one == two else ""
            page = comparison_of(dict(zip((one, two), recordings)), options.title or f"{one} and {two}")
        replace_page(output, page)
    except FileNotFoundError as error:
        print(f"report: there is no file {error.filename}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(f"wrote {output} ({len(page) // 1024 + 1} KiB)")
    return 0
