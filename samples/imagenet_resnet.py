# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 and -50 (He et al. 2016) on a folder of images by class, ImageNet's usual layout.

It expects train/CLASS/*.jpg and val/CLASS/*.jpg. Without --data-dir it writes scikit-learn's digits in that
layout to build/digits, for which a quarter of the maps and 32x32 pixels are enough.

  python samples/imagenet_resnet.py                                        ResNet-18 on digits, half a minute
  python samples/imagenet_resnet.py --network resnet50 --iterations 30     ResNet-50
  python samples/imagenet_resnet.py --data-dir imagenet --network resnet50 --iterations 450000 \\
      --batch-size 256 --lr 0.1 --checkpoint build/resnet50.checkpoint -c cudnn -t half              one GPU
  mpirun -n 8 python samples/imagenet_resnet.py --distributed ...                         eight GPUs (NCCL)
  mpirun -n 2 python samples/imagenet_resnet.py --distributed                             two CPU ranks

The first one printed, in emulated fp16 on one CPU core (not tested with ImageNet's images):

  resnet18: 92.2% of the test images correct
  loss scale 32768 at the end, 8 batches repeated, 0 lost

With -c cudnn -t half, on an H100: 91.9%.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
from common import image_folder
from common import options as common_options
from common import ranks as common_ranks
from common.feeder import Feeder, in_epochs
from common.resnet import BLOCKS, resnet
from common.scores import accuracy_of_batches, print_result, whole_batches
from common.session import run
from option_values import positive

from nnabla_adaloss import AdaptiveLossScalingUpdater


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test; return the exit status."""
    parser = common_options.parser(__doc__, iterations=100, batch_size=32, lr=0.05)
    add = parser.add_argument
    add("--network", choices=tuple(BLOCKS), default="resnet18", help="(default: resnet18)")
    add("--data-dir", type=Path, metavar="FOLDER", help="with train and val (default: made from digits)")
    add("--image-size", type=int, metavar="N", help="(default: 224; of digits 32)")
    add(
        "--width",
        type=positive,
        metavar="N",
        help="maps of the stem (default: 64; of digits 16)",
    )
    common_ranks.add_option(parser)
    options = common_options.start(parser, arguments)
    ranks = common_ranks.join(options)
    size = options.image_size or (224 if options.data_dir else 32)
    width = options.width or (64 if options.data_dir else 16)
    folder = options.data_dir or Path("build/digits")
    if options.data_dir is None and ranks.rank == 0:
        image_folder.make_from_digits(folder)
    ranks.wait()
    images, test = image_folder.load(folder)
    # A mirrored digit is not a digit.
    loader = image_folder.Loader(images, size, crop_at_random=True, mirror=options.data_dir is not None)

    x = nn.Variable((options.batch_size // ranks.size, 3, size, size))
    t = nn.Variable((x.shape[0], 1))
    classes = len(images.names)
    loss = F.mean(F.softmax_cross_entropy(resnet(x, options.network, width, classes, training=True), t))
    rate = common_options.cosine(options.lr, options.iterations)
    solver = S.Momentum(rate(0), 0.9)
    solver.set_parameters(nn.get_parameters())
    started: Dict[int, List[Future[Any]]] = {}

    def chosen(number: int) -> Any:
        return ranks.share(in_epochs(len(images.files), options.batch_size, options.seed, number))

    def fill(number: int) -> None:
        for begun in (number, number + 1):
            if begun not in started:
                started[begun] = loader.start(chosen(begun), (options.seed, begun))
        x.d, t.d = image_folder.finished(started.pop(number)), loader.classes(chosen(number))

    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        Feeder(fill),
        storage=options.storage,
        weight_decay=1e-4,
        comm=ranks.comm,
        average=True,
    )
    run(options, updater, rate, ranks)
    if ranks.rank == 0:
        seen = image_folder.Loader(test, size, crop_at_random=False).batches(whole_batches(len(test.files)))
        right = accuracy_of_batches(
            lambda batch: resnet(batch, options.network, width, classes, training=False), seen
        )
        print_result(options.network, right, updater)
    return 0


if __name__ == "__main__":
    sys.exit(main())
