# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m nnabla_adaloss doctor`, `python -m nnabla_adaloss report`."""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from nnabla_adaloss import report
from nnabla_adaloss.doctor import Area, area_works, as_json, as_text, examine


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command.

    Args:
        arguments: what follows the program's name; default: `sys.argv[1:]`.

    Returns:
        Exit code: 0 when everything that was asked for works, or was done, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m nnabla_adaloss", description="Adaptive loss scaling for NNabla."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="examine this installation",
        description="Say what is installed, what is missing and what to do about it. The exit code is 0 when "
        "training on the CPU works, and whatever else the options ask for.",
    )
    doctor.add_argument("--gpu", action="store_true", help="the GPU must work, too")
    doctor.add_argument("--mpi", action="store_true", help="distributed training must work, too")
    doctor.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    doctor.set_defaults(run=_examine)
    page = commands.add_parser(
        "report",
        help="draw a recorded training as a page",
        description=report.DESCRIPTION,
        epilog=report.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_arguments(page)
    page.set_defaults(run=report.run)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


def _examine(options: argparse.Namespace) -> int:
    findings = examine()
    print(as_json(findings) if options.json else as_text(findings))
    asked = {Area.CPU: True, Area.GPU: options.gpu, Area.MPI: options.mpi}
    return 0 if all(area_works(findings, area) for area in Area if asked[area]) else 1


if __name__ == "__main__":
    sys.exit(main())
