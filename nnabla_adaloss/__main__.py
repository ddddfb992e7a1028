# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m nnabla_adaloss doctor`, `... analyse FILE.py:function`, `... report RUN.jsonl`.

The command `nnabla-adaloss` is the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Optional, Sequence

from nnabla_adaloss import __version__
from nnabla_adaloss.core.formats import canonical_name
from nnabla_adaloss.core.precision import PRECISIONS
from nnabla_adaloss.doctor.checks import examine
from nnabla_adaloss.doctor.findings import AREAS, area_works, as_json, as_text

_ANALYSE = """\
Runs a network on a few batches, in fp32 and with a narrow storage format (emulated, on a CPU). Reports which
scaling trains the loss (none, a constant of 65536, one measured scale, one per component), and the share of
gradients that each layer loses. Names the functions with faults that no scale can fix: forward or backward is
first not finite or beyond the format, or the gradient ends. Learning rates, labels, initial weights, weight
decay, the architecture and signs are not judged.

FILE.py contains a function without arguments that builds the network and returns its loss, a Variable of one
element, or the loss and a function that feeds the next batch:

    def network():
        x, t = nn.Variable((32, 1, 28, 28)), nn.Variable((32, 1))
        loss = F.mean(F.softmax_cross_entropy(lenet(x), t))
        nn.load_parameters("trained.h5")     # optional: weights after some training

        def feed():
            x.d, t.d = next(batches)

        return loss, feed

Without a feeder, the inputs' current data is the only batch, and the report says so. The function may also
return an updater."""

_ANALYSE_END = """\
exit codes:
  0  some way of scaling, or none, keeps the gradients of all layers, and no other fault was found
  1  a fault was found that no loss scale can fix; see the report
  2  the network could not be examined; see the message

examples:
  python -m nnabla_adaloss analyse train.py:network
  python -m nnabla_adaloss analyse train.py:network --storage fp8_hybrid -o page.html
  python -m nnabla_adaloss analyse train.py:network --json | python -c 'import json, sys
  print(json.load(sys.stdin)["verdict"])'"""

_REPORT = """\
Draw a recorded training as one HTML page: layer scales and underflow over the iterations, overflows, repeated
and lost batches, the loss scale and the loss, as pictures and tables. Given two recordings, the page compares
them, differences first.
"""
_REPORT_END = """\
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


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command; return its exit code: 0 for success, others as in its help."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, like `head`; Python must not flush again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nnabla_adaloss", description="Adaptive loss scaling for NNabla."
    )
    parser.add_argument("--version", action="version", version=f"nnabla-adaloss {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor",
        help="examine this installation",
        description="Report installed and missing parts, and how to install them. The exit code is 0 "
        "if training on the CPU works, and everything the options require.",
    )
    doctor.add_argument("--gpu", action="store_true", help="require a GPU, and test nnabla's functions on it")
    doctor.add_argument("--mpi", action="store_true", help="require distributed training")
    doctor.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    doctor.set_defaults(run=_doctor)

    analyse = commands.add_parser(
        "analyse",
        aliases=["analyze"],
        help="which scaling a network needs, and where its gradient is lost, not finite or ends",
        description=_ANALYSE,
        epilog=_ANALYSE_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    analyse.add_argument("network", metavar="FILE.py:function", help="the function that returns the network")
    analyse.add_argument(
        "--storage",
        type=canonical_name,
        default="float16",
        choices=list(PRECISIONS),
        metavar="FORMAT",
        help=f"the format to try: {', '.join(PRECISIONS)} (default: float16)",
    )
    analyse.add_argument("--batches", type=int, default=4, metavar="N", help="number of batches (default: 4)")
    analyse.add_argument("-o", "--output", metavar="PAGE.html", help="also write an HTML page")
    analyse.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    analyse.set_defaults(run=_analyse)

    report = commands.add_parser(
        "report",
        help="draw a recorded training, or compare two, as a page",
        description=_REPORT,
        epilog=_REPORT_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("recording", type=Path, metavar="RUN.jsonl", help="the file of Recorder('RUN.jsonl')")
    report.add_argument("other", type=Path, nargs="?", metavar="OTHER.jsonl", help="one to compare it with")
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PAGE.html",
        help="the page; one that is there is replaced, but no other file (default: RUN.html or "
        "RUN_and_OTHER.html)",
    )
    report.add_argument(
        "--title", help="heading of the page (default: the storage format, or the names of two recordings)"
    )
    report.set_defaults(run=_report)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    findings = examine(gpu_functions=options.gpu)
    print(as_json(findings) if options.json else as_text(findings))
    required = {"CPU": True, "GPU": options.gpu, "MPI": options.mpi}
    return 0 if all(area_works(findings, area) for area in AREAS if required[area]) else 1


def _analyse(options: argparse.Namespace) -> int:
    # Imported here, because the doctor must work without nnabla.
    from nnabla_adaloss.diagnosis.program import analyse

    return analyse(options.network, options.storage, options.batches, options.output, as_json=options.json)


def _report(options: argparse.Namespace) -> int:
    """Draw the page of one recording, or of two; return the exit code."""
    # Imported late, to keep help and other commands fast.
    from nnabla_adaloss.monitor.recording import Recording
    from nnabla_adaloss.report.page import comparison_of, page_of
    from nnabla_adaloss.state.whole_file import replace_page

    paths = [path for path in (options.recording, options.other) if path is not None]
    try:
        recordings = [Recording.load(path) for path in paths]
        for path, recording in zip(paths, recordings):
            if not recording.rows:
                raise ValueError(f"nothing was recorded in {path}: there is nothing to draw")
        if len(paths) == 1:
            page = page_of(recordings[0], paths[0].name, options.title)
        else:
            one, two = map(str, paths) if paths[0].stem == paths[1].stem else (path.stem for path in paths)
            two += ", again" if one == two else ""
            page = comparison_of(dict(zip((one, two), recordings)), options.title or f"{one} and {two}")
        output = options.output or paths[0].with_name("_and_".join(path.stem for path in paths) + ".html")
        replace_page(output, page)
    except FileNotFoundError as error:
        print(f"report: there is no file {error.filename}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(f"wrote {output} ({len(page) // 1024 + 1} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
