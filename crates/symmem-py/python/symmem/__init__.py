"""Symmetric memory: ranks load, store and signal in each other's buffers."""

import atexit

from symmem import _native
from symmem._native import *  # noqa: F403
from symmem._native import __version__

# Peers shall see this rank leave, and not vanish, whatever is still alive when the interpreter ends.
atexit.register(_native.close_all)
