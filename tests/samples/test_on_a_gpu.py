# SPDX-License-Identifier: Apache-2.0
"""The networks of samples and benchmarks are made of functions that have a CUDA implementation."""

from __future__ import annotations

from typing import Set

import cifar_resnet
import gpu_networks
import nnabla as nn
import pytest
from common.resnet import resnet

# Of nnabla-ext-cuda120 1.39.0: nnabla copies what these read to the host and back.
ON_THE_HOST = {"GlobalAveragePooling", "KLMultinomial"}
# NNabla's kernels for these end in an illegal instruction on an H100 (docs/gpu.md).
FAIL_ON_HOPPER = {
    "Sum",
    "Mean",
    "Max",
    "Prod",
    "Norm",
    "LayerNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "WeightNormalization",
    "SpectralNorm",
}


def types(variable: nn.Variable) -> Set[str]:
    found: Set[str] = set()
    variable.visit(lambda function: found.add(function.info.type_name))
    return found


@pytest.mark.parametrize("network", ["resnet20", "wide16_4", "resnet18", "resnet50"])
def test_no_array_of_the_resnets_goes_through_the_host(network: str) -> None:
    x = nn.Variable((2, 3, 32, 32))
    if network in ("resnet18", "resnet50"):
        logits = resnet(x, network, 2, 4, training=True)
    else:
        logits = cifar_resnet.NETWORKS[network](x, True)
    assert "Convolution" in types(logits)
    assert not types(logits) & ON_THE_HOST


@pytest.mark.parametrize("network", ["resnet50", "transformer"])
def test_timed_programs_run_on_every_gpu(network: str) -> None:
    loss = gpu_networks.build(network, gpu_networks.QUICK[network])
    assert loss.size == 1
    assert not types(loss) & (ON_THE_HOST | FAIL_ON_HOPPER)
