# SPDX-License-Identifier: Apache-2.0
"""Complete training in float16: checkpoints, a schedule, clipping, early stopping, a progress bar."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

from nnabla_adaloss import AdaptiveLossScalingUpdater, load_checkpoint, save_checkpoint

EPILOG = """\
examples:
  python samples/complete_loop.py                    about ten seconds
  python samples/complete_loop.py --epochs 5
Kill it at any time: started again with the same --checkpoint, it ends bit for bit where it would have ended.
"""

BATCH = 64


def network(x: nn.Variable, *, train: bool) -> nn.Variable:
    """Two convolutions and two dense layers."""
    with nn.parameter_scope("net"):
        h = PF.convolution(x, 16, (3, 3), pad=(1, 1), with_bias=False, name="conv1")
        h = F.relu(PF.batch_normalization(h, batch_stat=train, name="bn"))
        h = F.relu(PF.convolution(F.max_pooling(h, (2, 2)), 32, (3, 3), pad=(1, 1), name="conv2"))
        h = F.relu(PF.affine(h, 64, name="fc"))
        return PF.affine(F.dropout(h, 0.3) if train else h, 10, name="out")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train until the validation loss has not fallen for `--patience` epochs."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=40, help="at most (default: 40)")
    parser.add_argument("--patience", type=int, default=6, help="epochs without progress (default: 6)")
    parser.add_argument("--checkpoint", type=Path, help="goes on from this file and saves to it")
    options = parser.parse_args(arguments)

    digits = load_digits()
    images, labels = digits.images[:, None].astype(np.float32) / 16.0, digits.target[:, None]
    rest, held_out = np.split(np.random.default_rng(0).permutation(len(images)), [1408])
    per_epoch = len(rest) // BATCH

    nn.seed(0)
    x, t = nn.Variable((BATCH, *images.shape[1:])), nn.Variable((BATCH, 1))
    loss = F.mean(F.softmax_cross_entropy(network(x, train=True), t))
    y = network(nn.Variable.from_numpy_array(images[held_out]), train=False)
    validation = F.mean(F.softmax_cross_entropy(y, nn.Variable.from_numpy_array(labels[held_out])))
    solver = S.Momentum(0.05)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        # All randomness depends on the number of the batch, which checkpoints contain.
        batch = updater.counters.fed
        epoch, number = divmod(batch, per_epoch)
        order = np.random.default_rng((1, epoch)).permutation(rest)
        chosen = order[BATCH * number : BATCH * (number + 1)]
        x.d, t.d = images[chosen], labels[chosen]
        nn.seed(batch)  # dropout

    updater = AdaptiveLossScalingUpdater(
        solver,
        loss,
        feed,
        storage="float16",
        on_gradients=lambda solver: solver.clip_grad_by_norm(1.0),
        # A batch with NaN is skipped without any change.
        on_nonfinite_loss="skip",
        on_nonfinite_forward="skip",
    )
    best = {"loss": math.inf, "accuracy": 0.0, "epoch": 0}
    if options.checkpoint is not None and options.checkpoint.exists():
        best = load_checkpoint(options.checkpoint, updater)
    epoch = updater.counters.fed // per_epoch
    with tqdm(total=options.epochs * per_epoch, initial=updater.counters.fed, unit=" batches") as bar:
        while epoch < options.epochs and epoch - best["epoch"] < options.patience:
            for _ in range(per_epoch):
                # Updates, not calls: a skipped batch does not advance the schedule.
                done = updater.counters.updates / (options.epochs * per_epoch)
                solver.set_learning_rate(0.05 * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0))))
                result = updater.update()
                bar.update()
            epoch += 1
            validation.forward(clear_buffer=True)
            y.forward(clear_buffer=True)
            bar.set_postfix_str(f"loss {float(loss.d):.4f}, scale {result.scale:g}")
            if float(validation.d) < best["loss"]:
                hits = np.argmax(y.d, axis=1) == labels[held_out].ravel()
                best = {"loss": float(validation.d), "accuracy": float(hits.mean()), "epoch": epoch}
            if options.checkpoint is not None:
                save_checkpoint(options.checkpoint, updater, extra=best)
    print(f"best epoch {best['epoch']} of {epoch}: accuracy {100 * best['accuracy']:.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
