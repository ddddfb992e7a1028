# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment: nothing stays swapped, and the next update works."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from tests.worlds.trainings import updater_of
from tests.worlds.values import data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gate,
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers"),
    # Where Ctrl-C lands in a callback of the garbage collector, Python can only say so.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def _timer() -> Iterator[None]:
    """A timer raises KeyboardInterrupt, by the handler that Ctrl-C has."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def interrupt(call: Callable[[], object], after: float) -> None:
    """Repeat `call` until a KeyboardInterrupt, due in `after` seconds, ends it.

    Python swallows an exception that a signal raises inside a finalizer or a weak reference's callback. As
    with a user, the next attempt comes a second later.
    """
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # the timer may end any of the calls
        signal.setitimer(signal.ITIMER_REAL, after, 1.0)
        while True:
            call()
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def updater_on(storage: Optional[str], delay: int) -> AdaptiveLossScalingUpdater:
    rng = np.random.RandomState(0)
    h = data(4, 5)
    for name in "abcdef":
        h = h + F.tanh(PF.affine(h, 5, name=name, rng=rng))
    h = F.tanh(PF.affine(F.tanh(PF.affine(h, 5, name="twice", rng=rng)), 5, name="twice"))
    # Every layer is scaled, so that in every layer something is swapped.
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0, use_bound=False, delay=delay)
    return updater_of(F.mean(h**2), solver=S.Momentum(0.01), storage=storage, config=config)


def arrays() -> Dict[str, Tuple[Any, Any]]:
    return {name: (v.data, v.grad) for name, v in nn.get_parameters().items()}


def duration(call: Callable[[], object]) -> float:
    call()
    began = time.perf_counter()
    for _ in range(5):
        call()
    return (time.perf_counter() - began) / 5


@pytest.mark.usefixtures("_timer")
@pytest.mark.parametrize(("storage", "delay"), [(None, 0), ("float16", 0), ("float16", 1)])
def test_interrupted_at_random_moments(storage: Optional[str], delay: int) -> None:
    updater = updater_on(storage, delay)
    longest, original = 2.5 * duration(updater.update), arrays()
    rng = random.Random(delay)
    for _ in range(150):
        interrupt(updater.update, rng.uniform(1e-5, longest))
        assert arrays() == original
    assert updater.update().updated


def press_ctrl_c(wait: float, ended: threading.Event) -> None:
    """Send SIGINT after `wait` seconds, and again every second until it was heard."""
    while not ended.wait(wait):
        os.kill(os.getpid(), signal.SIGINT)
        wait = 1.0


def test_ctrl_c_itself() -> None:
    """SIGINT, sent to the process while the main thread trains."""
    updater = updater_on("float16", 0)
    updater.update()
    original = arrays()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for wait in np.random.default_rng(0).uniform(0.0, 0.02, 20):
            ended = threading.Event()
            killer = threading.Thread(target=press_ctrl_c, args=(wait, ended))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                killer.start()
                while True:
                    updater.update()
            ended.set()
            killer.join()
            assert arrays() == original
    finally:
        signal.signal(signal.SIGINT, before)
    assert updater.update().updated
