# SPDX-License-Identifier: Apache-2.0
"""Events of a training, monitors that receive them, and recordings that can be queried."""

from .audience import Audience as Audience
from .audience import audience_of as audience_of
from .events import BatchRepeated as BatchRepeated
from .events import BatchThrownAway as BatchThrownAway
from .events import Event as Event
from .events import GradientSeen as GradientSeen
from .events import LayerLook as LayerLook
from .events import LayerScaled as LayerScaled
from .events import Monitor as Monitor
from .events import Overflowed as Overflowed
from .events import ScaleChanged as ScaleChanged
from .events import TrainingBegan as TrainingBegan
from .events import UpdateEnded as UpdateEnded
from .fault_monitors import LogMonitor as LogMonitor
from .fault_monitors import NanDump as NanDump
from .recorder import Recorder as Recorder
from .recording import Recording as Recording
from .recording import Underflow as Underflow
from .rows import LayerRow as LayerRow
