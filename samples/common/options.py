# SPDX-License-Identifier: Apache-2.0
"""Common options of the samples."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Callable, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
from nnabla.ext_utils import get_extension_context
from option_values import positive, positive_number

from nnabla_adaloss import FormatEmulation


def parser(head: Optional[str], *, iterations: int, batch_size: int, lr: float) -> argparse.ArgumentParser:
    """Make a parser with the options of every sample.

    Args:
        head: the docstring of the sample, which --help prints.
        iterations: default of --iterations.
        batch_size: default of --batch-size.
        lr: default of --lr.
    """
    made = argparse.ArgumentParser(description=head, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument_group("options of every sample").add_argument
    add(
        "--iterations",
        type=positive,
        default=iterations,
        metavar="N",
        help=f"updates (default: {iterations})",
    )
    add("--batch-size", type=positive, default=batch_size, metavar="N", help=f"(default: {batch_size})")
    add("--lr", type=positive_number, default=lr, metavar="RATE", help=f"learning rate (default: {lr:g})")
    add("--seed", type=int, default=0, help="decides initial weights and batches (default: 0)")
    add(
        "--storage",
        default="float16",
        metavar="FORMAT",
        help="format that a float context emulates: bfloat16, fp8_hybrid, ..., or none (default: float16)",
    )
    add("-c", "--context", default="cpu", metavar="EXT", help="cpu, cudnn, ... (default: cpu)")
    add(
        "-t",
        "--type-config",
        default="float",
        metavar="TYPE",
        help="float, half, ... (default: float; with -c cpu, half is real and hundreds of times slower)",
    )
    add("-d", "--device-id", default="0", metavar="ID", help="which GPU (default: 0)")
    add("--checkpoint", type=Path, metavar="FILE", help="save periodically and at the end")
    add("--checkpoint-every", type=positive, default=100, metavar="N", help="(default: 100 iterations)")
    add("--resume", action="store_true", help="resume from that file, if it is there")
    return made


def start(made: argparse.ArgumentParser, arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the options, choose the context, and seed nnabla; exit with a message if an option is wrong.

    Returns:
        The options; `storage` is None without emulation.
    """
    options = made.parse_args(arguments)
    if options.resume and options.checkpoint is None:
        made.error("--resume: say which file to resume from with --checkpoint FILE")
    if options.storage == "none" or options.type_config != "float":
        options.storage = None
    else:
        _check_storage(made, options.storage)
    if options.context != "cpu" and getattr(options, "distributed", False):
        from mpi4py import MPI  # noqa: F401  nnabla's extension finds Open MPI only where it is loaded already
    if (options.context, options.type_config) != ("cpu", "float"):  # nnabla's default
        try:
            nn.set_default_context(
                get_extension_context(
                    options.context, type_config=options.type_config, device_id=options.device_id
                )
            )
        except Exception as error:  # the extension's errors for a missing library, driver or device
            made.error(
                f"-c {options.context} -t {options.type_config} cannot be used here: {error}\n"
                "`python -m nnabla_adaloss doctor --gpu` says what is missing"
            )
    nn.seed(options.seed)
    return options


def single(options: argparse.Namespace) -> nn.Context:
    """Float context of the device in the options."""
    return get_extension_context(options.context, type_config="float", device_id=options.device_id)


def _check_storage(made: argparse.ArgumentParser, storage: str) -> None:
    try:
        FormatEmulation(F.sum(nn.Variable((2,), need_grad=True)), storage)
    except ValueError as error:
        made.error(f"--storage: {error}, or none")


def cosine(lr: float, iterations: int) -> Callable[[int], float]:
    """Make learning rates that fall from `lr` to zero along half a cosine."""
    return lambda iteration: 0.5 * lr * (1.0 + math.cos(math.pi * iteration / iterations))
