// Reductions for one element type, SYMMEM_T. Blocks have at most 512 threads, grids at most 256 blocks.
#include "reduce.cuh"

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define CONSTANT const __grid_constant__

// Elements that are too wide to travel with a flag.
#define WIDER_THAN_UNITS_c128 1
#define JOINED(a, b) a##b
#define JOIN(a, b) JOINED(a, b)
#if !JOIN(WIDER_THAN_UNITS_, SYMMEM_T)

// ---- data that carries its flag ---------------------------------------------------------------------------------------

// What is seldom is not inlined: code that a kernel runs through once takes longest to fetch.
static __device__ __noinline__ symmem_u64 load_loose(const char *from, symmem_u64 bytes) {
    symmem_u64 bits = 0;
#pragma unroll 1
    for (int i = 0; i < 8 && i < bytes; i += Number::BYTES) {
        bits |= load_bits<Number::BYTES>(from + i) << (8 * i);
    }
    return bits;
}

static __device__ __noinline__ void store_loose(char *to, symmem_u64 bits, symmem_u64 bytes) {
#pragma unroll 1
    for (int i = 0; i < 8 && i < bytes; i += Number::BYTES) {
        store_bits<Number::BYTES>(to + i, bits >> (8 * i));
    }
}

// Eight bytes of elements at `from`, of which `bytes` are there.
__device__ __forceinline__ void load_unit(symmem_u32 (&unit)[2], const char *from, symmem_u64 bytes) {
    bool whole = bytes >= 8 && (symmem_u64)from % 8 == 0;
    symmem_u64 bits = whole ? load_bits<8>(from) : load_loose(from, bytes);
    unit[0] = (symmem_u32)bits;
    unit[1] = (symmem_u32)(bits >> 32);
}

__device__ __forceinline__ void store_unit(char *to, const symmem_u32 (&unit)[2], symmem_u64 bytes) {
    symmem_u64 bits = unit[0] | (symmem_u64)unit[1] << 32;
    if (bytes >= 8 && (symmem_u64)to % 8 == 0) {
        store_bits<8>(to, bits);
    } else {
        store_loose(to, bits, bytes);
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
        if (symmem_u32 why = patience.spent(group.timeout, group.mailbox, pad, missing)) {
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

// The rank that comes `steps` after this one, at most all the way round.
__device__ __forceinline__ symmem_u32 after(const SymmemGroup &group, symmem_u32 steps) {
    symmem_u32 rank = group.rank + steps;
    return rank < group.size ? rank : rank - group.size;
}

// Where this thread's unit from this rank lies in any rank's pad.
__device__ __forceinline__ symmem_u64 unit_at(const SymmemGroup &group, symmem_u32 epoch) {
    return symmem_slot_at(group, epoch, group.rank) + 16 * threadIdx.x;
}

// Sends all ranks a unit. Each begins with its neighbour, so that they do not all write to one, and ends with itself.
__device__ __forceinline__ void send_to_all(const symmem_u32 (&unit)[2], const SymmemGroup &group, symmem_u32 epoch) {
    symmem_u64 to = unit_at(group, epoch);
#pragma unroll 4
    for (symmem_u32 step = 1; step <= group.size; step++) {
        send_unit(static_cast<char *>(group.pads[after(group, step)]) + to, unit, epoch);
    }
}

// How units are shared out: each block takes one for a thread in every round. At most 16 GiB.
struct Rounds {
    symmem_u32 units, of_block, count;

    // At least one round: blocks without data synchronise as well, because their epochs count.
    __device__ __forceinline__ Rounds(symmem_u64 bytes) {
        units = (symmem_u32)((bytes + 7) / 8);
        symmem_u32 share = (units + gridDim.x - 1) / gridDim.x;
        of_block = share < blockDim.x ? share : blockDim.x;
        count = share <= blockDim.x ? 1 : (share + blockDim.x - 1) / blockDim.x;
    }
    // The byte of this thread's unit; beyond all where it has none.
    __device__ __forceinline__ symmem_u64 at(symmem_u32 round) const {
        symmem_u32 unit = (round * gridDim.x + blockIdx.x) * of_block + threadIdx.x;
        return threadIdx.x < of_block && unit < units ? 8 * (symmem_u64)unit : ~0ull;
    }
};

// This thread's units of `out` from a round on, which could not be finished.
static __device__ __noinline__ void ruin_units(char *out, symmem_u64 bytes, symmem_u32 round) {
    const symmem_u32 ones[2] = {~0u, ~0u};
    const Rounds rounds(bytes);
#pragma unroll 1
    for (; round < rounds.count; round++) {
        symmem_u64 at = rounds.at(round);
        if (at < bytes) {
            store_unit(out + at, ones, bytes - at);
        }
    }
}

// The same block of all ranks synchronises; in the meantime `exchange(epoch)` by threads with `mine`, which waits for all ranks'
// units. False on all threads of the block: failed, noted, and all ranks told.
template <class F>
__device__ __forceinline__ bool flagged_round(const SymmemGroup &group, SymmemBlock &block, bool mine, F exchange) {
    bool good = symmem_untold(group, block.broken, threadIdx.x == 0);
    block.epoch = symmem_epoch_after(block.epoch, 1);
    if (good && threadIdx.x < group.size && threadIdx.x != group.rank) {
        symmem_arrive<SYMMEM_NEVER>(group, block, threadIdx.x);
    }
    if (good && mine) {
        good = exchange(block.epoch);
    } else if (good && threadIdx.x < group.size && threadIdx.x != group.rank) {
        good = symmem_await<SYMMEM_NEVER>(group, block, threadIdx.x); // data carries its flags
    }
    return __syncthreads_and(good);
}

// Sends each rank the unit at byte `at` of its block of `bytes`, likewise; those for four ranks are under way before the first
// is sent.
__device__ __forceinline__ void send_blocks(const char *in, symmem_u64 bytes, symmem_u64 at, const SymmemGroup &group,
                                            symmem_u32 epoch) {
    const symmem_u32 N = 4;
    symmem_u64 to = unit_at(group, epoch);
    symmem_u32 units[N][2];
#pragma unroll 1
    for (symmem_u32 first = 1; first <= group.size; first += N) {
#pragma unroll
        for (symmem_u32 i = 0; i < N; i++) {
            // Instead of ranks beyond the last, that one's again, without a condition around the load.
            symmem_u32 peer = after(group, first + i < group.size ? first + i : group.size);
            load_unit(units[i], in + peer * bytes + at, bytes - at);
        }
#pragma unroll
        for (symmem_u32 i = 0; i < N; i++) {
            if (first + i <= group.size) {
                send_unit(static_cast<char *>(group.pads[after(group, first + i)]) + to, units[i], epoch);
            }
        }
    }
}

// `out` becomes the reduction of all ranks' `in`; they may be the same.
KERNEL(256, 4) all_reduce_flagged(CONSTANT SymmemGroup group, const char *in, char *out, symmem_u64 length,
                                  symmem_u32 op) {
    const symmem_u64 bytes = length * Number::BYTES;
    const Rounds rounds(bytes);
    SymmemBlock block = symmem_begin(group, rounds.count);
    for (symmem_u32 round = 0; round < rounds.count; round++) {
        symmem_u64 at = rounds.at(round);
        symmem_u32 unit[2];
        if (at < bytes) {
            load_unit(unit, in + at, bytes - at);
        }
        auto exchange = [&](symmem_u32 epoch) {
            send_to_all(unit, group, epoch);
            return take_unit(unit, group, epoch, (Op)op);
        };
        if (!flagged_round(group, block, at < bytes, exchange)) {
            return ruin_units(out, bytes, round);
        }
        if (at < bytes) {
            store_unit(out + at, unit, bytes - at);
        }
    }
}

// `out` becomes the reduction of all ranks' blocks for this one, of `length` elements each; `in` has one for each rank.
KERNEL(256, 4) reduce_scatter_flagged(CONSTANT SymmemGroup group, const char *in, char *out, symmem_u64 length,
                                      symmem_u32 op) {
    const symmem_u64 bytes = length * Number::BYTES;
    const Rounds rounds(bytes);
    SymmemBlock block = symmem_begin(group, rounds.count);
    for (symmem_u32 round = 0; round < rounds.count; round++) {
        symmem_u64 at = rounds.at(round);
        symmem_u32 unit[2];
        auto reduce = [&](symmem_u32 epoch) {
            send_blocks(in, bytes, at, group, epoch);
            return take_unit(unit, group, epoch, (Op)op);
        };
        if (!flagged_round(group, block, at < bytes, reduce)) {
            return ruin_units(out, bytes, round);
        }
        if (at < bytes) {
            store_unit(out + at, unit, bytes - at);
        }
    }
}

#endif // elements that fit into units

// ---- between two barriers ---------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void two_shot(const SymmemGroup &group, const SymmemPointers &parts, symmem_u64 first,
                                         symmem_u64 length, Op op, const S &share) {
    const symmem_u64 bytes = length * Number::BYTES;
    Operands<true> operands = {parts, group.size, first * Number::BYTES, {bytes, bytes}, nullptr};
    Cut cut(operands.part(0, 0), operands.apart(), bytes);
    SymmemBlock block = symmem_begin(group, 2);
    if (symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        reduce_vectors(operands, cut, share, op);
        reduce_loose(operands, cut, group.rank, group.size, op);
        if (symmem_sync_blocks<SYMMEM_LAST | SYMMEM_RELEASE>(group, block)) {
            return;
        }
    }
    // What peers' blocks of the same number would have stored here, or have not.
    ruin_own(group, parts, first, length, stretches(share), 0);
}

// In place: elements `first..first + length` of all parts become their reduction. Each rank reduces its share of the
// vectors and stores it with all.
KERNEL(512, 2) all_reduce_two_shot(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, symmem_u64 first,
                                   symmem_u64 length, symmem_u32 op) {
    two_shot(group, parts, first, length, (Op)op, Share{group.rank, group.size});
}

// Likewise, of more than the device's cache holds: see `AlternatingShare`.
KERNEL(512, 2) all_reduce_two_shot_alternating(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts,
                                               symmem_u64 first, symmem_u64 length, symmem_u32 op,
                                               symmem_u32 backwards, symmem_u32 draws) {
    void *drawn = draws != 0 ? symmem_own_pad(group) + SYMMEM_DRAWN_AT : nullptr;
    AlternatingShare share = {group.rank, group.size, backwards != 0, static_cast<symmem_u32 *>(drawn)};
    two_shot(group, parts, first, length, (Op)op, share);
}

// `out` becomes the reduction of `rows` rows of `columns` elements, which lie `pitch` elements apart in all parts, from
// element `first` on. Only ranks with `active` not zero reduce; all synchronise. `out` lies in no part.
//
// One-shot all-reduce: one row of the length. Reduce-scatter: the block for this rank. Reduce: active on the root.
KERNEL(512, 2) reduce_pull(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, symmem_u64 first,
                           symmem_u64 rows, symmem_u64 columns, symmem_u64 pitch, symmem_u32 active, symmem_u32 op) {
    const symmem_u64 row = columns * Number::BYTES, bytes = rows * row;
    Stretch stretch = {rows > 1 ? row : bytes, rows > 1 ? pitch * Number::BYTES : bytes};
    Operands<false> operands = {parts, group.size, first * Number::BYTES, stretch, out};
    Cut cut(operands.part(0, 0), operands.apart(), bytes);
    SymmemBlock block = symmem_begin(group, 2);
    if (symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        if (active != 0) {
            reduce_vectors(operands, cut, Share{0, 1}, (Op)op);
            reduce_loose(operands, cut, 0, 1, (Op)op);
        }
        if (symmem_sync_blocks<SYMMEM_LAST>(group, block)) {
            return;
        }
    }
    if (active != 0) {
        ruin_out(group, parts, out, first, rows, columns, pitch, 0);
    }
}

// In place, one-shot: every rank reduces everything, and stores what its threads hold in registers once the same block
// of all ranks has read it. A barrier for each vector of a thread.
KERNEL(512, 2) all_reduce_one_shot_in_place(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts,
                                            symmem_u64 first, symmem_u64 length, symmem_u32 op) {
    const symmem_u64 bytes = length * Number::BYTES, begin = first * Number::BYTES;
    char *own = static_cast<char *>(parts.at[group.rank]) + begin;
    Operands<true> operands = {parts, group.size, begin, {bytes, bytes}, nullptr};
    Cut cut(own, operands.apart(), bytes);
    const symmem_u64 loose = cut.loose() / Number::BYTES, units = loose + cut.vectors;
    SymmemBlock block = symmem_begin(group, 1 + (symmem_u32)((units + threads_of_grid() - 1) / threads_of_grid()));
    if (!symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        return ruin(own, cut.head, cut.vectors, bytes, Number::BYTES, 1, 1);
    }
    for (symmem_u64 base = 0; base < units; base += threads_of_grid()) {
        symmem_u64 unit = base + thread_of_grid();
        symmem_u32 vector[4];
        ElementBits element;
        symmem_u64 at = unit < loose ? cut.loose_at(unit * Number::BYTES) : cut.head + 16 * (unit - loose);
        if (unit < loose) {
            element = reduced_element(parts, group.size, begin + at, (Op)op);
        } else if (unit < units) {
            reduce_vector(vector, parts, group.size, begin + at, (Op)op);
        }
        if (!symmem_sync_blocks<0>(group, block)) {
            return ruin(own, cut.head, cut.vectors, bytes, Number::BYTES, 1, 1);
        }
        if (unit < loose) {
            store_bits<Number::BYTES>(own + at, element);
        } else if (unit < units) {
            store_vector(own + at, vector);
        }
    }
}
