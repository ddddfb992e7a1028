# SPDX-License-Identifier: Apache-2.0
"""Networks trained in the precisions that `diagnose(storage=[...])` advises for their layers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from statistics import mean
from typing import Any, List

import nnabla as nn

from nnabla_adaloss import diagnose

from .experiment import Experiment, Line
from .methods import REFERENCE, Loop, Trainee, adaptive
from .nets import NETS
from .text import paragraph, rows
from .training import Run, results_of, train
from .verdict import RULE, references

CANDIDATES = ["fp8_hybrid", "float16"]
_BATCHES = 2
_SEEDS = range(5)


def experiment(quick: bool) -> Experiment:
    """Define the jobs: one seed after the other, in fp32 and as advised."""
    nets = ("lenet", "mlp8") if quick else tuple(NETS)
    jobs = [
        Run(net, storage, 1.0, method, seed, NETS[net].iterations)
        for seed in (range(2) if quick else _SEEDS)
        for net in nets
        for storage, method in (("float32", REFERENCE), ("float16", "advised"))
    ]
    return Experiment(jobs, work, table)


def work(run: Run) -> Line:
    """Examine on batches of seed 0, before training, and train as advised, or in fp32."""
    net = NETS[run.net]
    if run.method == REFERENCE:
        return train(run, net)._asdict()
    nn.seed(0)
    with nn.parameter_scope("", OrderedDict()):
        advised = [diagnose(p.loss, CANDIDATES, p.feed, _BATCHES) for p in net.build(0).players]
    waiting = iter([advice.storage for advice in advised])

    def method(trainee: Trainee, storage: Any) -> Loop:
        return adaptive()(trainee, next(waiting))

    return {
        "layers": [[layer.name, layer.storage] for advice in advised for layer in advice.layers],
        "error_of_gradients": max(advice.error for advice in advised),
        **train(run, net, method)._asdict(),
    }


def table(lines: List[Line]) -> str:
    """Write a row for each network, with fp32's scores of the study."""
    known = references(results_of(lines), NETS)
    body = []
    for net in dict.fromkeys(line["net"] for line in lines):
        mine = [line for line in lines if line["net"] == net and line["method"] != REFERENCE]
        scores = [line["score"] for line in mine]
        whole = None not in scores
        counts = Counter(given for _, given in mine[0]["layers"])
        body.append(
            [
                NETS[net].title,
                ", ".join(f"{count} {given}" for given, count in sorted(counts.items())),
                f"{mine[0]['error_of_gradients']:.0%}",
                f"{mean(scores):.3f}" if whole else "none",
                f"{known[net].mean:.3f} ({known[net].wanted:.3f})",
                str(len(scores)),
                "yes" if whole and mean(scores) >= known[net].wanted else "no",
            ]
        )
    text = (
        f"`diagnose(loss, storage={CANDIDATES})`, then training with what it advised: `python "
        f"benchmarks/study.py advice`. {sum(row[-1] == 'yes' for row in body)} of {len(body)} are as good as "
        f"fp32. {RULE}"
    )
    head = [
        "network",
        "layers in",
        "error of gradients",
        "score",
        "fp32 (wanted)",
        "seeds",
        "as good as fp32",
    ]
    return "\n".join(["# Precisions as advised\n", paragraph(text), rows(head, body)])
