// Reductions for one element type, SYMMEM_T. Blocks have at most 512 threads, grids at most 256 blocks.
#include "reduce.cuh"

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define CONSTANT const __grid_constant__

// ---- data that carries its flag ---------------------------------------------------------------------------------------

// Eight bytes of elements at `from`, of which `bytes` are there.
__device__ __forceinline__ void load_unit(symmem_u32 (&unit)[2], const char *from, symmem_u64 bytes) {
    symmem_u64 bits = 0;
    if (bytes >= 8 && (symmem_u64)from % 8 == 0) {
        bits = load_bits<8>(from);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i += Number::BYTES) {
            bits |= i < bytes ? load_bits<Number::BYTES>(from + i) << (8 * i) : 0;
        }
    }
    unit[0] = (symmem_u32)bits;
    unit[1] = (symmem_u32)(bits >> 32);
}

__device__ __forceinline__ void store_unit(char *to, const symmem_u32 (&unit)[2], symmem_u64 bytes) {
    symmem_u64 bits = unit[0] | (symmem_u64)unit[1] << 32;
    if (bytes >= 8 && (symmem_u64)to % 8 == 0) {
        return store_bits<8>(to, bits);
    }
#pragma unroll
    for (int i = 0; i < 8; i += Number::BYTES) {
        if (i < bytes) {
            store_bits<Number::BYTES>(to + i, bits >> (8 * i));
        }
    }
}

// Both halves of a slot's line are data and epoch, each half in one piece; so nothing needs to be ordered.
__device__ __forceinline__ void send_unit(char *slot, const symmem_u32 (&unit)[2], symmem_u32 epoch) {
    symmem_u64 low = unit[0] | (symmem_u64)epoch << 32, high = unit[1] | (symmem_u64)epoch << 32;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(slot), "l"(low), "l"(high) : "memory");
}

__device__ __forceinline__ bool receive_unit(symmem_u32 (&unit)[2], const char *slot, symmem_u32 epoch) {
    symmem_u64 low, high;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(slot) : "memory");
    unit[0] = (symmem_u32)low;
    unit[1] = (symmem_u32)high;
    return (symmem_u32)(low >> 32) == epoch && (symmem_u32)(high >> 32) == epoch;
}

// The units of N ranks from `first` on; past the last rank, the last one's again. Waits for all of them together, and for
// the flag of the rank with this thread's number, which says whether it makes the same call.
template <int N>
__device__ __forceinline__ bool receive_units(symmem_u32 (&units)[N][2], const char *slot, const SymmemGroup &group,
                                              symmem_u32 first, symmem_u32 epoch) {
    SymmemPatience patience;
    const char *pad = symmem_own_pad(group);
    bool watched = first != 0 || threadIdx.x >= group.size || threadIdx.x == group.rank;
    for (;;) {
        symmem_u64 flag = watched ? 0 : load_bits<8>(pad + symmem_flag_at(group, threadIdx.x));
        symmem_u32 missing = 0xffffffff;
#pragma unroll
        for (int i = 0; i < N; i++) {
            symmem_u32 peer = N == 4 && first + i >= group.size ? group.size - 1 : first + i;
            missing = receive_unit(units[i], slot + (symmem_u64)peer * SYMMEM_SLOT_BYTES, epoch) ? missing : peer;
        }
        symmem_u32 ahead = (symmem_u32)flag - epoch, theirs = (symmem_u32)(flag >> 32);
        if (!watched && ahead == 0 && theirs != group.call) {
            return symmem_fail(group, SYMMEM_OTHER_CALL, threadIdx.x, theirs);
        }
        missing = watched || (int)ahead >= 0 ? missing : threadIdx.x;
        if (missing == 0xffffffff) {
            return true;
        }
        if (symmem_u32 why = patience.spent(group.timeout, group.mailbox, pad)) {
            return symmem_give_up(group, why, missing);
        }
    }
}

// Sums of exactly N ranks.
template <int N>
__device__ __forceinline__ bool sum_units(symmem_u32 (&unit)[2], const char *slot, const SymmemGroup &group,
                                          symmem_u32 epoch, Op op) {
    symmem_u32 units[N][2];
    if (!receive_units<N>(units, slot, group, 0, epoch)) {
        return false;
    }
    Pack<2> sum;
    sum.set(units[0]);
#pragma unroll
    for (int i = 1; i < N; i++) {
        sum.add(units[i]);
    }
    sum.template finish<N>(unit, op, N);
    return true;
}

// Any number of ranks and any operator, four at a time.
__device__ __forceinline__ bool reduce_units(symmem_u32 (&unit)[2], const char *slot, const SymmemGroup &group,
                                             symmem_u32 epoch, Op op) {
    symmem_u32 units[4][2];
    Pack<2> sum;
#pragma unroll 1
    for (symmem_u32 first = 0; first < group.size; first += 4) {
        if (!receive_units<4>(units, slot, group, first, epoch)) {
            return false;
        }
#pragma unroll 1
        for (symmem_u32 i = 0; i < 4 && first + i < group.size; i++) {
            symmem_u32 next[2];
            next[0] = i == 0 ? units[0][0] : i == 1 ? units[1][0] : i == 2 ? units[2][0] : units[3][0];
            next[1] = i == 0 ? units[0][1] : i == 1 ? units[1][1] : i == 2 ? units[2][1] : units[3][1];
            if (first + i == 0) {
                sum.set(next);
            } else {
                sum.take(next, op);
            }
        }
    }
    sum.finish<0>(unit, op, group.size);
    return true;
}

// What all ranks have sent to this thread, reduced.
__device__ __forceinline__ bool take_unit(symmem_u32 (&unit)[2], const SymmemGroup &group, symmem_u32 epoch, Op op) {
    symmem_u64 line = 16 * threadIdx.x;
    const char *slot = symmem_own_pad(group) + symmem_slot_at(group, epoch, 0) + line;
    if (op <= AVERAGE && group.size == 2) {
        return sum_units<2>(unit, slot, group, epoch, op);
    }
    if (op <= AVERAGE && group.size == 4) {
        return sum_units<4>(unit, slot, group, epoch, op);
    }
    if (op <= AVERAGE && group.size == 8) {
        return sum_units<8>(unit, slot, group, epoch, op);
    }
    return reduce_units(unit, slot, group, epoch, op);
}

// Sends this thread's unit to all, with SCATTER that of each rank's block to that rank, and takes what they sent. `unit` is
// loaded already unless SCATTER.
template <bool SCATTER>
__device__ __forceinline__ bool exchange_unit(symmem_u32 (&unit)[2], const SymmemGroup &group, symmem_u32 epoch, Op op,
                                              const char *in, symmem_u64 at, symmem_u64 bytes) {
    symmem_u64 to = symmem_slot_at(group, epoch, group.rank) + 16 * threadIdx.x;
    // Each rank begins with its neighbour, so that they do not all write to one, and ends with itself.
    symmem_u32 peer = group.rank;
#pragma unroll 4
    for (symmem_u32 i = 0; i < group.size; i++) {
        peer = peer + 1 < group.size ? peer + 1 : 0;
        if (SCATTER) {
            load_unit(unit, in + peer * bytes + at, bytes - at);
        }
        send_unit(static_cast<char *>(group.pads[peer]) + to, unit, epoch);
    }
    return take_unit(unit, group, epoch, op);
}

// `out` becomes the reduction of `length` elements that all ranks have sent: of their `in`, or with SCATTER of the block of it
// that is for this rank. One meeting for each 2 KiB of a block. At most 16 GiB.
template <bool SCATTER>
__device__ __forceinline__ void flagged(const SymmemGroup &group, const char *in, char *out, symmem_u64 length, Op op) {
    SymmemBlock block = symmem_begin(group);
    const symmem_u64 bytes = length * Number::BYTES;
    const symmem_u32 units = (symmem_u32)((bytes + 7) / 8), share = (units + gridDim.x - 1) / gridDim.x;
    const symmem_u32 per_block = share < blockDim.x ? share : blockDim.x;
    symmem_u32 base = 0;
    // At least one round: blocks without data meet as well, because their epochs count.
    do {
        symmem_u64 at = 8 * ((symmem_u64)base + blockIdx.x * per_block + threadIdx.x);
        bool mine = threadIdx.x < per_block && at < bytes;
        symmem_u32 unit[2];
        if (!SCATTER && mine) {
            load_unit(unit, in + at, bytes - at); // on its way together with the epoch
        }
        bool good = block.broken == 0 || symmem_told(group, block);
        block.epoch = symmem_next_epoch(block.epoch);
        if (good && threadIdx.x < group.size && threadIdx.x != group.rank) {
            symmem_arrive<false>(group, block, threadIdx.x);
        }
        if (good && mine) {
            good = exchange_unit<SCATTER>(unit, group, block.epoch, op, in, at, bytes);
        } else if (good && threadIdx.x < group.size && threadIdx.x != group.rank) {
            good = symmem_await(group, block, threadIdx.x);
        }
        if (!__syncthreads_and(good)) {
            return;
        }
        if (mine) {
            store_unit(out + at, unit, bytes - at);
        }
        base += per_block * gridDim.x;
    } while (base < units);
    if (threadIdx.x == 0) {
        symmem_store_relaxed(symmem_own_pad(group) + 128 + 4 * blockIdx.x, block.epoch);
    }
}

// `out` becomes the reduction of all ranks' `in`; they may be the same.
KERNEL(256, 4) all_reduce_flagged(CONSTANT SymmemGroup group, const char *in, char *out, symmem_u64 length,
                                  symmem_u32 op) {
    flagged<false>(group, in, out, length, (Op)op);
}

// `out` becomes the reduction of all ranks' blocks for this one, of `length` elements each; `in` has one for each rank.
KERNEL(256, 4) reduce_scatter_flagged(CONSTANT SymmemGroup group, const char *in, char *out, symmem_u64 length,
                                      symmem_u32 op) {
    flagged<true>(group, in, out, length, (Op)op);
}

// ---- between two meetings ---------------------------------------------------------------------------------------------

// In place: elements `first..first + length` of all parts become their reduction. Each rank reduces its share of the
// vectors and stores it with all.
KERNEL(512, 2) all_reduce_two_shot(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, symmem_u64 first,
                                   symmem_u64 length, symmem_u32 op) {
    SymmemBlock block = symmem_begin(group);
    const symmem_u64 bytes = length * Number::BYTES;
    Places<true> places = {parts, group.size, first * Number::BYTES, {bytes, bytes}, nullptr};
    Cut cut(places.part(0, 0), places.apart(), bytes);
    symmem_u64 share = (cut.vectors + group.size - 1) / group.size;
    symmem_u64 from = least(share * group.rank, cut.vectors), to = least(from + share, cut.vectors);
    if (!symmem_sync_blocks<false>(group, block)) {
        return;
    }
    reduce_vectors(places, cut.head, from, to, (Op)op);
    reduce_loose(places, cut, group.rank, group.size, (Op)op);
    symmem_sync_blocks<true>(group, block);
}

// `out` becomes the reduction of `rows` rows of `columns` elements, which lie `pitch` elements apart in all parts, from
// element `first` on. Only ranks with `active` not zero reduce; all meet. `out` lies in no part.
//
// One-shot all-reduce: one row of the length. Reduce-scatter: the block for this rank. Reduce: active on the root.
KERNEL(512, 2) reduce_pull(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, symmem_u64 first,
                           symmem_u64 rows, symmem_u64 columns, symmem_u64 pitch, symmem_u32 active, symmem_u32 op) {
    SymmemBlock block = symmem_begin(group);
    const symmem_u64 row = columns * Number::BYTES, bytes = rows * row;
    Stretch stretch = {rows > 1 ? row : bytes, rows > 1 ? pitch * Number::BYTES : bytes};
    Places<false> places = {parts, group.size, first * Number::BYTES, stretch, out};
    Cut cut(places.part(0, 0), places.apart(), bytes);
    if (!symmem_sync_blocks<false>(group, block)) {
        return;
    }
    if (active != 0) {
        reduce_vectors(places, cut.head, 0, cut.vectors, (Op)op);
        reduce_loose(places, cut, 0, 1, (Op)op);
    }
    symmem_sync_blocks<false>(group, block);
}

// In place, one-shot: every rank reduces everything, and stores what its threads hold in registers once the same block
// of all ranks has read it. A meeting for each vector of a thread.
KERNEL(512, 2) all_reduce_one_shot_in_place(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts,
                                            symmem_u64 first, symmem_u64 length, symmem_u32 op) {
    SymmemBlock block = symmem_begin(group);
    const symmem_u64 bytes = length * Number::BYTES, begin = first * Number::BYTES;
    char *own = static_cast<char *>(parts.at[group.rank]) + begin;
    Places<true> places = {parts, group.size, begin, {bytes, bytes}, nullptr};
    Cut cut(own, places.apart(), bytes);
    const symmem_u64 loose = cut.loose() / Number::BYTES, units = loose + cut.vectors;
    if (!symmem_sync_blocks<false>(group, block)) {
        return;
    }
    for (symmem_u64 base = 0; base < units; base += threads_of_grid()) {
        symmem_u64 unit = base + thread_of_grid();
        symmem_u32 vector[4];
        symmem_u64 element;
        symmem_u64 at = unit < loose ? cut.loose_at(unit * Number::BYTES) : cut.head + 16 * (unit - loose);
        if (unit < loose) {
            element = reduced_element(parts, group.size, begin + at, (Op)op);
        } else if (unit < units) {
            reduce_vector(vector, parts, group.size, begin + at, (Op)op);
        }
        if (!symmem_sync_blocks<false>(group, block)) {
            return;
        }
        if (unit < loose) {
            store_bits<Number::BYTES>(own + at, element);
        } else if (unit < units) {
            store_vector(own + at, vector);
        }
    }
}
