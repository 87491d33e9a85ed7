// Signals, barriers and everything that moves bytes without arithmetic. Blocks have a multiple of 32 threads, at most 512;
// grids at most 256 blocks. Collectives read peers' parts between two barriers of the group's blocks.
#include "move.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(512)
#define CONSTANT const __grid_constant__

// What the host must agree with: sizes of the mailbox, the group and the handle, then where some of their fields lie.
extern "C" __constant__ symmem_u32 symmem_layout[] = {
    sizeof(SymmemMailbox),
    sizeof(SymmemGroup),
    sizeof(SymmemHandle),
    SYMMEM_OFFSET(SymmemMailbox, state),
    SYMMEM_OFFSET(SymmemMailbox, rank),
    SYMMEM_OFFSET(SymmemGroup, call),
    SYMMEM_OFFSET(SymmemGroup, timeout),
    SYMMEM_OFFSET(SymmemGroup, mailbox),
    SYMMEM_OFFSET(SymmemGroup, pads),
    SYMMEM_OFFSET(SymmemHandle, op),
    SYMMEM_OFFSET(SymmemHandle, timeout),
    SYMMEM_OFFSET(SymmemHandle, mailbox),
    SYMMEM_OFFSET(SymmemHandle, buffers),
    SYMMEM_OFFSET(SymmemHandle, pads),
    SYMMEM_OFFSET(SymmemHandle, multicast),
    SYMMEM_OFFSET(SymmemHandle, group_pads),
};

// ---- signals ----------------------------------------------------------------------------------------------------------

// Release and acquire: waits for all ranks' blocks; what was in their streams before is visible to what comes after. On one
// device its beginning and its end order memory.
KERNEL barrier(CONSTANT SymmemGroup group) {
    SymmemBlock block = symmem_begin(group, 1);
    symmem_sync_blocks<SYMMEM_FIRST | SYMMEM_LAST>(group, block);
}

KERNEL put_signal(CONSTANT SymmemHandle handle, symmem_u32 to, symmem_u32 channel) {
    symmem_after_earlier();
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        symmem_put_signal(handle, to, channel);
    }
}

KERNEL wait_signal(CONSTANT SymmemHandle handle, symmem_u32 from, symmem_u32 channel) {
    symmem_after_earlier();
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        symmem_wait_signal(handle, from, channel);
    }
}

// As above, on one channel of the allocation's own pad; one block.
KERNEL barrier_on_channel(CONSTANT SymmemHandle handle, symmem_u32 channel) {
    symmem_after_earlier();
    symmem_barrier(handle, channel);
}

// Release: sets word `word`, of 8 bytes, of the pad of rank `to`.
KERNEL put_value(CONSTANT SymmemHandle handle, symmem_u32 to, symmem_u32 word, symmem_u64 value) {
    symmem_after_earlier();
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        symmem_store64<SYMMEM_ALWAYS>(static_cast<symmem_u64 *>(handle.pads[to]) + word, value, handle.scope);
    }
}

// Acquire: waits until word `word` of the own pad, which rank `from` sets, is `value`, or where `least` is not 0 at least
// that.
KERNEL wait_value(CONSTANT SymmemHandle handle, symmem_u32 from, symmem_u32 word, symmem_u64 value, symmem_u32 least) {
    symmem_after_earlier();
    if (threadIdx.x != 0 || blockIdx.x != 0) {
        return;
    }
    const symmem_u64 *at = static_cast<const symmem_u64 *>(handle.pads[handle.rank]) + word;
    SymmemPatience patience;
    for (;;) {
        symmem_u64 now = symmem_load64<SYMMEM_ALWAYS>(at, handle.scope);
        if (now == value || (least != 0 && now > value)) {
            return;
        }
        if (symmem_u32 why = patience.spent(handle.timeout, handle.mailbox, handle.group_pads[handle.rank], from)) {
            symmem_give_up(handle, why, word, from);
            return;
        }
    }
}

// ---- collectives: `first` is the byte of the parts where they begin -----------------------------------------------------

// `copies` copies from peers, between two barriers.
template <class F>
__device__ __forceinline__ void between_barriers(const SymmemGroup &group, symmem_u32 copies, F copy) {
    SymmemBlock block = symmem_begin(group, 2);
    if (symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        Worker().each(copies, copy);
        if (symmem_sync_blocks<SYMMEM_LAST>(group, block)) {
            return;
        }
    }
    Worker().each(copies, copy, true);
}

// Each rank begins with its own part, so that they do not all read from one.
__device__ __forceinline__ symmem_u32 peer_of(const SymmemGroup &group, symmem_u64 copy) {
    symmem_u32 peer = group.rank + (symmem_u32)copy;
    return peer < group.size ? peer : peer - group.size;
}

__device__ __forceinline__ const char *part(const SymmemPointers &parts, symmem_u32 rank, symmem_u64 byte) {
    return static_cast<const char *>(parts.at[rank]) + byte;
}

// `out` becomes all ranks' `bytes`, by rank.
KERNEL all_gather(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, symmem_u64 first,
                  symmem_u64 bytes) {
    between_barriers(group, group.size, [&](symmem_u64 copy, symmem_u64 thread, symmem_u64 threads, bool ruins) {
        symmem_u32 peer = peer_of(group, copy);
        copy_bytes(out + peer * bytes, part(parts, peer, first), bytes, thread, threads, ruins);
    });
}

// `out` becomes the root's `bytes`. In place where `out` is this rank's part; the root's is left alone.
KERNEL broadcast(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, symmem_u64 first,
                 symmem_u64 bytes, symmem_u32 root) {
    between_barriers(group, 1, [&](symmem_u64, symmem_u64 thread, symmem_u64 threads, bool ruins) {
        copy_bytes(out, part(parts, root, first), bytes, thread, threads, ruins);
    });
}

// Each part is a block of `bytes` for each rank; `out` becomes the blocks for this one, by rank.
KERNEL all_to_all(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, symmem_u64 first,
                  symmem_u64 bytes) {
    between_barriers(group, group.size, [&](symmem_u64 copy, symmem_u64 thread, symmem_u64 threads, bool ruins) {
        symmem_u32 peer = peer_of(group, copy);
        copy_bytes(out + peer * bytes, part(parts, peer, first + group.rank * bytes), bytes, thread, threads, ruins);
    });
}

// On the root, `out` becomes all ranks' `bytes`, by rank.
KERNEL gather(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, symmem_u64 first,
              symmem_u64 bytes, symmem_u32 root) {
    symmem_u32 copies = group.rank == root ? group.size : 0;
    between_barriers(group, copies, [&](symmem_u64 copy, symmem_u64 thread, symmem_u64 threads, bool ruins) {
        symmem_u32 peer = peer_of(group, copy);
        copy_bytes(out + peer * bytes, part(parts, peer, first), bytes, thread, threads, ruins);
    });
}

// The root's part is a block of `bytes` for each rank; `out` becomes that for this one.
KERNEL scatter(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, symmem_u64 first,
               symmem_u64 bytes, symmem_u32 root) {
    between_barriers(group, 1, [&](symmem_u64, symmem_u64 thread, symmem_u64 threads, bool ruins) {
        copy_bytes(out, part(parts, root, first + group.rank * bytes), bytes, thread, threads, ruins);
    });
}
