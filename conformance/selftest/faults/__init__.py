"""Wrong implementations, most of them public bugs put back: the suite must catch every one.

Each module holds the faults of one step of a batch's journey.
"""

from . import attention, layout, loss, merge, parallel, plans, ranks, refusals
from .fault import Fault

_STEPS = (refusals, layout, attention, loss, merge, plans, parallel, ranks)
FAULTS = {
    fault.name: fault
    for step in _STEPS
    for fault in vars(step).values()
    if isinstance(fault, Fault)
}

__all__ = ["FAULTS", "Fault"]
