"""Symmetric memory: ranks load, store and signal in each other's buffers.

Every rank allocates memory of the same size, and a rendezvous maps all peers' memory into each rank. From then on ranks load,
store and signal in each other's memory, and call collectives on it::

    import symmem

    world = symmem.World.from_env()                       # under `symmem run`, torchrun, mpirun, srun; or alone
    x = symmem.rendezvous(symmem.empty(1024, "float32", world), world)
    x.local[:] = world.rank                               # a numpy array over this rank's part
    x.all_reduce("sum")                                   # of all ranks, in place

    x.barrier()
    neighbour = x.peer((world.rank + 1) % world.size)     # a numpy array over another rank's part
    x.barrier()

Waits release the GIL, and Ctrl-C interrupts them. They also end at their deadline, and when a peer is lost. Failures are
exceptions, subclasses of `Error`, that name the rank and the operation.
"""

import atexit
import os
import sys

from symmem._native import (
    Aborted,
    Array,
    Driver,
    Error,
    Group,
    Handle,
    Interrupted,
    Memory,
    Mismatch,
    OutOfStepError,
    Panicked,
    PeerFailed,
    PeerLost,
    Pending,
    Pool,
    Protocol,
    Queue,
    System,
    Timeout,
    Unavailable,
    Usage,
    World,
    __version__,
    close_all,
    find,
    look_in,
    note_process,
    set_signal_pad_size,
    signal_pad_size,
)
from symmem._symmetric import Symmetric, empty, rendezvous

__all__ = [
    "Aborted",
    "Array",
    "Driver",
    "Error",
    "Group",
    "Handle",
    "Interrupted",
    "Memory",
    "Mismatch",
    "OutOfStepError",
    "Panicked",
    "PeerFailed",
    "PeerLost",
    "Pending",
    "Pool",
    "Protocol",
    "Queue",
    "Symmetric",
    "System",
    "Timeout",
    "Unavailable",
    "Usage",
    "World",
    "__version__",
    "empty",
    "find",
    "rendezvous",
    "set_signal_pad_size",
    "signal_pad_size",
]

# Where pip installs libraries such as NCCL.
look_in([folder for folder in sys.path if folder])

# A forked process is not a member of the worlds that its parent joined.
note_process()
os.register_at_fork(after_in_child=note_process)

# Leave worlds in order at exit, so that peers do not report this rank as lost.
atexit.register(close_all)
