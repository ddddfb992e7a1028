# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 and -50 (He et al. 2016) on a folder of images by class, as ImageNet's are usually unpacked.

That is train/CLASS/*.jpg and val/CLASS/*.jpg. Without --data-dir such a folder, build/digits, is made from
the digits of scikit-learn, for which a quarter of the maps and 32x32 pixels do.

  python samples/imagenet_resnet.py                                        ResNet-18 on digits, half a minute
  python samples/imagenet_resnet.py --network resnet50 --iterations 30     ResNet-50
  python samples/imagenet_resnet.py --data-dir imagenet --network resnet50 --iterations 450000 \\
      --batch-size 256 --lr 0.1 --checkpoint build/resnet50 -c cudnn -t half              one GPU
  mpirun -n 8 python samples/imagenet_resnet.py --distributed ...                         eight GPUs (NCCL)
  mpirun -n 2 python samples/imagenet_resnet.py --distributed                             two CPU ranks

The first one printed, in emulated fp16 on one CPU core (not tried yet: ImageNet's own images, a GPU):

  resnet18: 93.9% of the test images told right
  loss scale 16384 at the end, 1 batches repeated, 0 lost
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common import image_folder
from common import options as common_options
from common import ranks as common_ranks
from common.feeder import Feeder, in_epochs
from common.scores import accuracy_of_batches, fate, whole_batches
from common.session import Session

from nnabla_adaloss import AdaptiveLossScalingUpdater

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


def resnet(x: nn.Variable, network: str, width: int, classes: int, training: bool) -> nn.Variable:
    """Logits, shape (batch, classes); ResNet-50 has bottlenecks, which stride in their 3x3 convolution."""
    bottleneck = network == "resnet50"

    def unit(
        h: nn.Variable, maps: int, kernel: int, stride: int, name: str, last: bool = False
    ) -> nn.Variable:
        spread = float(np.sqrt(2.0 / (h.shape[1] * kernel * kernel)))
        h = PF.convolution(
            h,
            maps,
            (kernel, kernel),
            pad=(kernel // 2, kernel // 2),
            stride=(stride, stride),
            w_init=I.NormalInitializer(spread),
            with_bias=False,
            name=name,
        )
        # A block begins as its shortcut (Goyal et al. 2017).
        start = {"gamma": I.ConstantInitializer(0.0 if last else 1.0)}
        return PF.batch_normalization(h, batch_stat=training, param_init=start, name=name)

    h = F.relu(unit(x, width, 7, 2, "stem"))
    h = F.max_pooling(h, (3, 3), stride=(2, 2), pad=(1, 1))
    for stage, blocks in enumerate(BLOCKS[network]):
        maps = width * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            wide = 4 * maps if bottleneck else maps
            with nn.parameter_scope(f"stage{stage}/block{block}"):
                shortcut = h
                if stride != 1 or h.shape[1] != wide:
                    shortcut = unit(h, wide, 1, stride, "shortcut")
                if bottleneck:
                    inner = F.relu(unit(h, maps, 1, 1, "a"))
                    inner = unit(F.relu(unit(inner, maps, 3, stride, "b")), wide, 1, 1, "c", last=True)
                else:
                    inner = unit(F.relu(unit(h, maps, 3, stride, "a")), maps, 3, 1, "b", last=True)
                h = F.relu(inner + shortcut)
    return PF.affine(F.global_average_pooling(h), classes, name="fc")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train and test; returns the exit status."""
    parser = common_options.parser(__doc__, iterations=100, batch_size=32, lr=0.05)
    add = parser.add_argument
    add("--network", choices=tuple(BLOCKS), default="resnet18", help="(default: resnet18)")
    add("--data-dir", type=Path, metavar="FOLDER", help="with train and val (default: made from digits)")
    add("--image-size", type=int, metavar="N", help="(default: 224; of digits 32)")
    add(
        "--width",
        type=common_options.positive,
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
    images, test = image_folder.find(folder / "train"), image_folder.find(folder / "val")
    # A mirrored digit is none.
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
    with Session(options, updater, ranks=ranks) as session:
        for iteration in session:
            solver.set_learning_rate(rate(iteration))
            session.show(updater.update().scale, loss)
    if ranks.rank == 0:
        seen = image_folder.Loader(test, size, crop_at_random=False).batches(whole_batches(len(test.files)))
        right = accuracy_of_batches(
            lambda batch: resnet(batch, options.network, width, classes, training=False), seen
        )
        print(f"{options.network}: {right:.1%} of the test images told right")
        print(fate(updater))
    return 0


if __name__ == "__main__":
    sys.exit(main())
