// Litmus tests of what orders memory between ranks: data is written and read by plain stores and loads, and whatever does not
// arrive in order is counted. Only tests launch these. Both scopes are right where all ranks share a device.
#include "symmem.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(512)
#define CONSTANT const __grid_constant__

__device__ __forceinline__ void plain_store(symmem_u32 *to, symmem_u32 value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ symmem_u32 plain_load(const symmem_u32 *from) {
    symmem_u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// The word that this thread of rank `source` writes in the part of rank `at`.
__device__ __forceinline__ symmem_u32 *word_of(const SymmemHandle &handle, symmem_u32 at, symmem_u32 source) {
    symmem_u64 word = ((symmem_u64)blockIdx.x * handle.size + source) * blockDim.x + threadIdx.x;
    return symmem_peer<symmem_u32>(handle, at) + word;
}

__device__ __forceinline__ void write_to_all(const SymmemHandle &handle, symmem_u32 value) {
    for (symmem_u32 peer = 0; peer < handle.size; peer++) {
        plain_store(word_of(handle, peer, handle.rank), value);
    }
}

__device__ __forceinline__ void count_others(const SymmemHandle &handle, symmem_u32 value, symmem_u32 *wrong) {
    for (symmem_u32 source = 0; source < handle.size; source++) {
        if (plain_load(word_of(handle, handle.rank, source)) != value) {
            atomicAdd(wrong, 1);
        }
    }
}

// Message passing and store buffering over the flags of the group, in every round from each block to all of its number: what
// they wrote is there after they synchronise with RELEASE, and not overwritten before they synchronise again without it.
KERNEL litmus_blocks(CONSTANT SymmemHandle handle, symmem_u32 scope, symmem_u32 rounds, symmem_u32 *wrong) {
    SymmemGroup group = {handle.rank, handle.size, scope, handle.op, 7, 0, handle.timeout, handle.mailbox, {}};
    for (symmem_u32 rank = 0; rank < handle.size; rank++) {
        group.pads[rank] = handle.group_pads[rank];
    }
    SymmemBlock block = symmem_begin(group, 2 * rounds);
    for (symmem_u32 round = 1; round <= rounds; round++) {
        write_to_all(handle, round);
        if (!symmem_sync_blocks<SYMMEM_RELEASE>(group, block)) {
            return;
        }
        count_others(handle, round, wrong);
        if (!symmem_sync_blocks<0>(group, block)) {
            return;
        }
    }
}

// Message passing by signals of the allocation's pad, around all ranks: block b on channel b, and back on the channel after
// those of all blocks.
KERNEL litmus_signals(CONSTANT SymmemHandle given, symmem_u32 scope, symmem_u32 rounds, symmem_u32 *wrong) {
    SymmemHandle handle = given;
    handle.scope = scope;
    symmem_u32 next = handle.rank + 1 == handle.size ? 0 : handle.rank + 1;
    symmem_u32 last = handle.rank == 0 ? handle.size - 1 : handle.rank - 1;
    for (symmem_u32 round = 1; round <= rounds; round++) {
        plain_store(word_of(handle, next, handle.rank), round);
        __syncthreads();
        bool good = threadIdx.x != 0 || (symmem_put_signal(handle, next, blockIdx.x) &&
                                         symmem_wait_signal(handle, last, blockIdx.x));
        if (!__syncthreads_and(good)) {
            return;
        }
        if (plain_load(word_of(handle, handle.rank, last)) != round) {
            atomicAdd(wrong, 1);
        }
        if (!symmem_barrier(handle, gridDim.x + blockIdx.x)) {
            return;
        }
    }
}

// Before and after a barrier of the group in the stream.
KERNEL litmus_write(CONSTANT SymmemHandle handle, symmem_u32 value) { write_to_all(handle, value); }

KERNEL litmus_check(CONSTANT SymmemHandle handle, symmem_u32 value, symmem_u32 *wrong) {
    count_others(handle, value, wrong);
}
