"""Symmetric memory: ranks load, store and signal in each other's buffers."""

from symmem._native import __version__

__all__ = ["__version__"]
