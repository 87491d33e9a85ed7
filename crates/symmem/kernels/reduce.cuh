// Reductions of all ranks' elements, in rank order, between two barriers of the group's blocks.
#pragma once

#include "numbers.cuh"
#include "vectors.cuh"

// What is reduced: of each rank's memory, in bytes.
struct Stretch {
    symmem_u64 row, pitch; // bytes of a row, and from one row to the next; one row unless `row` is smaller

    __device__ __forceinline__ symmem_u64 at(symmem_u64 byte) const {
        if (row == pitch) {
            return byte;
        }
        symmem_u64 number = (byte | row) >> 32 == 0 ? (symmem_u32)byte / (symmem_u32)row : byte / row;
        return number * pitch + (byte - number * row);
    }
};

// All ranks' memory, and where the result goes: to `out`, or back to all of them.
template <bool TO_ALL> struct Operands {
    const SymmemPointers &parts;
    symmem_u32 size;
    symmem_u64 first; // byte of the parts
    Stretch stretch; // all of it, if the result goes back
    char *out;

    __device__ __forceinline__ char *part(symmem_u32 rank, symmem_u64 byte) const {
        return static_cast<char *>(parts.at[rank]) + first + byte;
    }
    // Where a byte of the result is in the parts.
    __device__ __forceinline__ symmem_u64 at(symmem_u64 byte) const { return TO_ALL ? byte : stretch.at(byte); }
    // Bits in which any two addresses differ.
    __device__ __forceinline__ symmem_u64 apart() const {
        symmem_u64 mine = (symmem_u64)part(0, 0);
        symmem_u64 apart = TO_ALL ? 0 : mine ^ (symmem_u64)out;
        for (symmem_u32 rank = 1; rank < size; rank++) {
            apart |= mine ^ (symmem_u64)part(rank, 0);
        }
        return stretch.row == stretch.pitch ? apart : apart | stretch.row | stretch.pitch | mine;
    }
};

// One element, `at` bytes from the beginning of the parts.
__device__ __forceinline__ ElementBits reduced_element(const SymmemPointers &parts, symmem_u32 size, symmem_u64 at,
                                                       Op op) {
    Number::Wide sum = Number::widen(load_bits<Number::BYTES>(static_cast<const char *>(parts.at[0]) + at));
#pragma unroll 1
    for (symmem_u32 rank = 1; rank < size; rank++) {
        sum = combine(op, sum, Number::widen(load_bits<Number::BYTES>(static_cast<const char *>(parts.at[rank]) + at)));
    }
    return Number::narrow(op == AVERAGE ? Number::divide(sum, size) : sum);
}

// Likewise, to where it belongs; `byte` counts bytes of the result.
template <bool TO_ALL> __device__ inline void reduce_element(const Operands<TO_ALL> &operands, symmem_u64 byte, Op op) {
    symmem_u64 at = operands.at(byte);
    ElementBits bits = reduced_element(operands.parts, operands.size, operands.first + at, op);
    if constexpr (TO_ALL) {
        for (symmem_u32 rank = 0; rank < operands.size; rank++) {
            store_bits<Number::BYTES>(operands.part(rank, at), bits);
        }
    } else {
        store_bits<Number::BYTES>(operands.out + byte, bits);
    }
}

// A part of the vectors: number `number` of `of`.
struct Share {
    symmem_u32 number, of;
};

// Likewise, of more than the device's cache holds. What was touched last is still cached, so a kernel begins where the one
// before it ended: kernels alternate between forwards and backwards. And memory is fastest when all ranks access
// neighbouring addresses, so ranks have every `of`th piece instead of a stretch of their own.
//
// Where there is much, no block has pieces of its own: each draws the rank's next when it has done one, because some
// multiprocessors are nearer to the memory than others.
struct AlternatingShare {
    symmem_u32 number, of;
    bool backwards;
    symmem_u32 *drawn; // how many pieces this rank's blocks have drawn, 0 between kernels; or null
};

// What an in-place reduction leaves that could not finish, in this rank's own part: see `ruin`. `apart`: further bits in which
// addresses differ. Everything is computed again, so that nothing has to be kept for it.
static __device__ __noinline__ void ruin_own(const SymmemGroup &group, const SymmemPointers &parts, symmem_u64 first,
                                             symmem_u64 length, symmem_u32 shares, symmem_u64 apart) {
    const symmem_u64 bytes = length * Number::BYTES;
    Operands<true> operands = {parts, group.size, first * Number::BYTES, {bytes, bytes}, nullptr};
    Cut cut(operands.part(0, 0), operands.apart() | apart, bytes);
    ruin(operands.part(group.rank, 0), cut.head, cut.vectors, bytes, Number::BYTES, shares, group.size);
}

// Likewise an output in no part, of rows as `reduce_pull` has them.
static __device__ __noinline__ void ruin_out(const SymmemGroup &group, const SymmemPointers &parts, char *out,
                                             symmem_u64 first, symmem_u64 rows, symmem_u64 columns, symmem_u64 pitch,
                                             symmem_u64 apart) {
    const symmem_u64 row = columns * Number::BYTES, bytes = rows * row;
    Stretch stretch = {rows > 1 ? row : bytes, rows > 1 ? pitch * Number::BYTES : bytes};
    Operands<false> operands = {parts, group.size, first * Number::BYTES, stretch, out};
    Cut cut(operands.part(0, 0), operands.apart() | apart, bytes);
    ruin(out, cut.head, cut.vectors, bytes, Number::BYTES, 1, 1);
}

// How many stretches of vectors ranks have for themselves.
__device__ __forceinline__ symmem_u32 stretches(const Share &share) { return share.of; }
__device__ __forceinline__ symmem_u32 stretches(const AlternatingShare &) { return 1; }

// What vectors are counted by. Those of a `AlternatingShare` are at most 32 GiB, and registers are few.
template <class S> struct Counted { typedef symmem_u64 By; };
template <> struct Counted<AlternatingShare> { typedef symmem_u32 By; };

// Which vectors this thread takes: numbers `i`, `i + stride` and so on below `count`.
template <class S> struct Lane {
    typename Counted<S>::By i, count, stride;
    symmem_u64 origin;

    // Number `thread` of `threads`, which have all vectors between them.
    __device__ __forceinline__ Lane(symmem_u64 vectors, symmem_u64 thread, symmem_u64 threads)
        : i(thread), count(vectors), stride(threads), origin(0) {}
    // Number `n` among all vectors.
    __device__ __forceinline__ symmem_u64 at(symmem_u64 n) const { return n + origin; }
};

// Calls `f` for all of this thread's vectors of a share, U of them at a time.
template <int U, class S, class F> __device__ __forceinline__ void each_batch(Lane<S> lane, F f) {
    for (; lane.i < lane.count; lane.i += U * lane.stride) {
        f(lane);
    }
}

template <int U, class F>
__device__ __forceinline__ void each_batch(symmem_u64 vectors, const Share &share, F f) {
    Lane<Share> lane(vectors, thread_of_grid(), threads_of_grid());
    symmem_u64 of_each = ((vectors + share.of - 1) / share.of + 31) / 32 * 32;
    lane.origin = least(of_each * share.number, vectors);
    lane.count = least(of_each, vectors - lane.origin);
    each_batch<U>(lane, f);
}

template <int U, class F>
__device__ __forceinline__ void each_batch(symmem_u64 vectors, const AlternatingShare &share, F f) {
    __shared__ symmem_u32 pieces[2];
    const symmem_u64 threads = threads_of_grid();
    Lane<AlternatingShare> lane(vectors, thread_of_grid() + share.number * threads, share.of * threads);
    // Backwards they are the same vectors: a rank that goes the other way than the rest still has its own.
    if (share.drawn == nullptr) {
        symmem_u32 step = U * lane.stride, left = lane.i < lane.count ? (lane.count - lane.i + step - 1) / step : 0;
        if (share.backwards) {
            lane.i += (left - 1) * step;
            step = 0 - step;
        }
        for (; left > 0; left--, lane.i += step) {
            f(lane);
        }
        return;
    }
    lane.stride = blockDim.x;
    const symmem_u32 of_piece = U * blockDim.x, of_all = (lane.count + of_piece - 1) / of_piece;
    const symmem_u32 count = (of_all + share.of - 1 - share.number) / share.of;
    symmem_u32 next = threadIdx.x == 0 ? pieces[0] = atomicAdd(share.drawn, 1) : 0, current = 0;
    __syncthreads();
    for (; pieces[current] < count; current ^= 1) {
        if (threadIdx.x == 0) {
            next = atomicAdd(share.drawn, 1); // takes as long as the loads
        }
        const symmem_u32 piece = share.backwards ? count - 1 - pieces[current] : pieces[current];
        lane.i = (piece * share.of + share.number) * of_piece + threadIdx.x;
        if (lane.i < lane.count) {
            f(lane);
        }
        if (threadIdx.x == 0) {
            pieces[current ^ 1] = next;
        }
        __syncthreads();
    }
    // Every block draws once more than there are pieces; the last block to do so prepares for the next kernel.
    if (threadIdx.x == 0 && next == count + gridDim.x - 1) {
        *share.drawn = 0;
    }
}

__device__ __forceinline__ void load_for(const Share &, symmem_u32 (&words)[4], const char *from) {
    load_vector(words, from);
}
__device__ __forceinline__ void load_for(const AlternatingShare &, symmem_u32 (&words)[4], const char *from) {
    load_held(words, from);
}

// U vectors of N ranks, both known when this is compiled, and sums: all loads are under way before the first addition.
// Instead of vectors beyond the last it loads that again: a condition would let the compiler put loads behind it.
template <int N, int U, bool TO_ALL, class S>
__device__ __forceinline__ void sum_batch(const Operands<TO_ALL> &operands, symmem_u64 head, const S &share,
                                          const Lane<S> &lane, Op op) {
    symmem_u32 words[U][N][4];
    symmem_u64 at[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
        auto n = lane.i + u * lane.stride;
        symmem_u64 vector = lane.at(u == 0 ? n : least(n, lane.count - 1));
        at[u] = operands.first + operands.at(head + 16 * vector);
#pragma unroll
        for (int rank = 0; rank < N; rank++) {
            load_for(share, words[u][rank], static_cast<const char *>(operands.parts.at[rank]) + at[u]);
        }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
        Pack<4> sum;
        sum.set(words[u][0]);
#pragma unroll
        for (int rank = 1; rank < N; rank++) {
            sum.add(words[u][rank]);
        }
        sum.template finish<N>(words[u][0], op, N);
        auto n = lane.i + u * lane.stride;
        if (u > 0 && n >= lane.count) {
            return;
        }
        if constexpr (TO_ALL) {
#pragma unroll
            for (int rank = 0; rank < N; rank++) {
                store_vector(static_cast<char *>(operands.parts.at[rank]) + at[u], words[u][0]);
            }
        } else {
            store_vector(operands.out + head + 16 * lane.at(n), words[u][0]);
        }
    }
}

// A share of the vectors of a cut.
template <int N, bool TO_ALL, class S>
__device__ __forceinline__ void sum_vectors(const Operands<TO_ALL> &operands, const Cut &cut, const S &share, Op op) {
    // Vectors at once: about 8 loads, 32 registers. Two-byte floats take twice the registers that they lie in.
    const int U = N >= 8 ? 1 : N == 2 && Number::BYTES == 2 ? 3 : 8 / N;
    each_batch<U>(cut.vectors, share, [&](const Lane<S> &lane) { sum_batch<N, U>(operands, cut.head, share, lane, op); });
}

// Any number of ranks and any operator, one vector: while one rank's is taken, the next one's is on its way.
__device__ __forceinline__ void reduce_vector(symmem_u32 (&result)[4], const SymmemPointers &parts, symmem_u32 size,
                                              symmem_u64 at, Op op) {
    symmem_u32 words[4], next[4];
    load_vector(words, static_cast<const char *>(parts.at[0]) + at);
    load_vector(next, static_cast<const char *>(parts.at[size > 1]) + at);
    Pack<4> sum;
    sum.set(words);
#pragma unroll 1
    for (symmem_u32 rank = 1; rank < size; rank++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = next[i];
        }
        load_vector(next, static_cast<const char *>(parts.at[rank + 1 < size ? rank + 1 : rank]) + at);
        sum.take(words, op);
    }
    sum.finish<0>(result, op, size);
}

// Likewise, sums: four loads in flight.
__device__ __forceinline__ void sum_vector(symmem_u32 (&result)[4], const SymmemPointers &parts, symmem_u32 size,
                                           symmem_u64 at, Op op) {
    symmem_u32 words[4][4];
    Pack<4> sum;
#pragma unroll 1
    for (symmem_u32 rank = 0; rank < size; rank += 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (rank + i < size) {
                load_vector(words[i], static_cast<const char *>(parts.at[rank + i]) + at);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (rank + i == 0) {
                sum.set(words[0]);
            } else if (rank + i < size) {
                sum.add(words[i]);
            }
        }
    }
    sum.finish<0>(result, op, size);
}

template <bool TO_ALL, class S>
__device__ __forceinline__ void reduce_any(const Operands<TO_ALL> &operands, const Cut &cut, const S &share, Op op) {
    each_batch<1>(cut.vectors, share, [&](const Lane<S> &lane) {
        symmem_u64 byte = cut.head + 16 * lane.at(lane.i), at = operands.at(byte);
        symmem_u32 words[4];
        if (op <= AVERAGE) {
            sum_vector(words, operands.parts, operands.size, operands.first + at, op);
        } else {
            reduce_vector(words, operands.parts, operands.size, operands.first + at, op);
        }
        if constexpr (TO_ALL) {
            for (symmem_u32 rank = 0; rank < operands.size; rank++) {
                store_vector(operands.part(rank, at), words);
            }
        } else {
            store_vector(operands.out + byte, words);
        }
    });
}

// A share of the vectors of a cut.
template <bool TO_ALL, class S>
__device__ __forceinline__ void reduce_vectors(const Operands<TO_ALL> &operands, const Cut &cut, const S &share, Op op) {
    // Arithmetic on bytes takes as long as the loads: nothing is gained by more of them at once.
    if constexpr (Number::BYTES > 1) {
        if (op <= AVERAGE && operands.size == 2) {
            return sum_vectors<2>(operands, cut, share, op);
        }
        if (op <= AVERAGE && operands.size == 4) {
            return sum_vectors<4>(operands, cut, share, op);
        }
        if (op <= AVERAGE && operands.size == 8) {
            return sum_vectors<8>(operands, cut, share, op);
        }
    }
    reduce_any(operands, cut, share, op);
}

// The part of the loose elements of a cut that is number `share` of `shares`.
template <bool TO_ALL>
__device__ __forceinline__ void reduce_loose(const Operands<TO_ALL> &operands, const Cut &cut, symmem_u32 share,
                                             symmem_u32 shares, Op op) {
    symmem_u64 loose = cut.loose() / Number::BYTES, per_share = (loose + shares - 1) / shares;
    symmem_u64 to = least(per_share * (share + 1), loose);
    for (symmem_u64 i = per_share * share + thread_of_grid(); i < to; i += threads_of_grid()) {
        reduce_element(operands, cut.loose_at(i * Number::BYTES), op);
    }
}
