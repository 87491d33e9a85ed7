"""A kernel of the tests' own that synchronises ranks through the pads of an allocation."""

import triton
import triton.language as tl


@triton.jit
def pad_barrier(pads, rank: tl.constexpr, size: tl.constexpr):
    """Tells every rank, by the words of channel 0, and waits for every rank; the words are zero again then."""
    pads = pads.to(tl.pointer_type(tl.int64))
    for peer in range(size):
        theirs = tl.load(pads + peer).to(tl.pointer_type(tl.int32))
        while tl.atomic_cas(theirs + rank, 0, 1, sem="release", scope="sys") != 0:
            pass
    own = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
    for peer in range(size):
        while tl.atomic_cas(own + peer, 1, 0, sem="acquire", scope="sys") != 1:
            pass
