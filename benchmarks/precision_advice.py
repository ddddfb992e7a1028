# SPDX-License-Identifier: Apache-2.0
"""Trains the ten networks of the study with the precisions that `diagnose(storage=[...])` advises for them.

    python benchmarks/precision_advice.py             everything, or what is missing of it
    python benchmarks/precision_advice.py --report    the table of what is there

Each network is examined once, before training, on batches of seed 0. It is then trained as advised, with
`AdaptiveLossScalingUpdater` at its defaults, from five seeds. The question is that of the study: is it as
good as fp32, whose five trainings per network are those of `results/study.jsonl`?

Each examination and each training is a line of `results/precision_advice.jsonl`; the same command goes on
where it was stopped. The table is `results/precision_advice.md`.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from statistics import mean
from typing import Any, Dict, List

# What is small is no faster with two threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import nnabla as nn
from scaling_study.methods import Job, Loop
from scaling_study.nets import NETS
from scaling_study.records import appending, read
from scaling_study.training import Run, runs_of, train
from scaling_study.verdict import RULE, references

from nnabla_adaloss import AdaptiveLossScalingUpdater, diagnose

RESULTS = Path(__file__).parent / "results"
LINES, TABLE = RESULTS / "precision_advice.jsonl", RESULTS / "precision_advice.md"

CANDIDATES = ["fp8_hybrid", "float16"]
BATCHES = 2
SEEDS = range(5)


def examine(net: str) -> Dict[str, Any]:
    """What is advised for a network: a line of the results."""
    nn.seed(0)
    start = time.perf_counter()
    with nn.parameter_scope("", OrderedDict()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        players = NETS[net].build(0).players
        advised = [diagnose(p.loss, CANDIDATES, p.feed, BATCHES) for p in players]
    layers = [
        [layer.name, layer.candidate.given, {name: harm.reason() for name, harm in layer.tried.items()}]
        for advice in advised
        for layer in advice.layers
    ]
    return {
        "net": net,
        "storages": [advice.storage for advice in advised],
        "layers": layers,
        "error": max(advice.error for advice in advised),
        "seconds": round(time.perf_counter() - start, 1),
    }


def train_as_advised(net: str, seed: int, storages: List[Dict[str, str]]) -> Dict[str, Any]:
    """A training: a line of the results."""
    waiting = iter(storages)

    def make(job: Job) -> Loop:
        updater = AdaptiveLossScalingUpdater(job.solver, job.loss, job.feed, storage=next(waiting))
        return Loop(updater, updater.scaling.loss, updater.scaling)

    # The storage of the run is what others of the study are made with; this one has its own.
    run = Run(net, "float16", 1.0, "advised", seed, NETS[net].iterations)
    return {**run._asdict(), **train(run, make)._asdict()}


def report(lines: List[Dict[str, Any]]) -> str:
    """The table."""
    known = references(runs_of(read(RESULTS / "study.jsonl")))
    advised = {line["net"]: line for line in lines if "storages" in line}
    rows = []
    passed = 0
    for net, line in advised.items():
        scores = [r["score"] for r in lines if r["net"] == net and "storages" not in r]
        if not scores:
            continue
        counts: Dict[str, int] = {}
        for _, given, _ in line["layers"]:
            counts[given] = counts.get(given, 0) + 1
        layers = ", ".join(f"{count} {given}" for given, count in sorted(counts.items()))
        whole = None not in scores
        passes = whole and mean(scores) >= known[net].wanted
        passed += passes
        score = f"{mean(scores):.3f}" if whole else "none"
        fp32 = f"{known[net].mean:.3f} ({known[net].wanted:.3f})"
        verdict = "yes" if passes else "no"
        cells = [NETS[net].title, layers, f"{line['error']:.0%}", score, fp32, str(len(scores)), verdict]
        rows.append(f"| {' | '.join(cells)} |")
    head = [
        "# Precisions as advised",
        "",
        f"`diagnose(loss, storage={CANDIDATES})`, then training with what it advised: `python "
        "benchmarks/precision_advice.py`.",
        "",
        f"{passed} of {len(rows)} are as good as fp32. {RULE}",
        "",
        "| network | layers in | error of gradients | score | fp32 (wanted) | seeds | as good as fp32 |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def main() -> None:
    """Do what is missing, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", action="store_true", help="only write the table of what is there")
    parser.add_argument("--only", help="names of networks, with commas between them")
    options = parser.parse_args()
    logging.getLogger("nnabla").setLevel(logging.WARNING)
    nets = options.only.split(",") if options.only else list(NETS)
    if not options.report:
        with appending(LINES) as records:
            for seed in SEEDS:
                for net in nets:
                    if not any(line["net"] == net and "storages" in line for line in read(LINES)):
                        records.add(examine(net))
                    lines = [line for line in read(LINES) if line["net"] == net]
                    advice = next(line for line in lines if "storages" in line)
                    if not any(line.get("seed") == seed for line in lines):
                        records.add(train_as_advised(net, seed, advice["storages"]))
                    TABLE.write_text(report(read(LINES)), "utf-8")
    TABLE.write_text(report(read(LINES)), "utf-8")
    print(TABLE.read_text("utf-8"))


if __name__ == "__main__":
    main()
