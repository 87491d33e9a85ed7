// Reductions of all ranks' elements, in rank order, between two meetings of the group's blocks.
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
template <bool TO_ALL> struct Places {
    const SymmemPointers &parts;
    symmem_u32 size;
    symmem_u64 first; // byte of the parts
    Stretch stretch;
    char *out;

    __device__ __forceinline__ char *part(symmem_u32 rank, symmem_u64 byte) const {
        return static_cast<char *>(parts.at[rank]) + first + byte;
    }
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
__device__ __forceinline__ symmem_u64 reduced_element(const SymmemPointers &parts, symmem_u32 size, symmem_u64 at,
                                                      Op op) {
    Number::Wide sum = Number::widen(load_bits<Number::BYTES>(static_cast<const char *>(parts.at[0]) + at));
#pragma unroll 1
    for (symmem_u32 rank = 1; rank < size; rank++) {
        sum = combine(op, sum, Number::widen(load_bits<Number::BYTES>(static_cast<const char *>(parts.at[rank]) + at)));
    }
    return Number::narrow(op == AVERAGE ? Number::divide(sum, size) : sum);
}

// Likewise, to where it belongs; `byte` counts bytes of the result.
template <bool TO_ALL> __device__ inline void reduce_element(const Places<TO_ALL> &places, symmem_u64 byte, Op op) {
    symmem_u64 at = places.stretch.at(byte);
    symmem_u64 bits = reduced_element(places.parts, places.size, places.first + at, op);
    if constexpr (TO_ALL) {
        for (symmem_u32 rank = 0; rank < places.size; rank++) {
            store_bits<Number::BYTES>(places.part(rank, at), bits);
        }
    } else {
        store_bits<Number::BYTES>(places.out + byte, bits);
    }
}

// U vectors of N ranks, both known when this is compiled, and sums: all loads are under way before the first addition.
template <int N, int U, bool TO_ALL>
__device__ __forceinline__ void sum_batch(const Places<TO_ALL> &places, symmem_u64 head, symmem_u64 v,
                                          symmem_u64 stride, Op op) {
    symmem_u32 words[U][N][4];
    symmem_u64 at[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
        at[u] = places.first + places.stretch.at(head + 16 * (v + u * stride));
#pragma unroll
        for (int rank = 0; rank < N; rank++) {
            load_vector(words[u][rank], static_cast<const char *>(places.parts.at[rank]) + at[u]);
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
        if constexpr (TO_ALL) {
#pragma unroll
            for (int rank = 0; rank < N; rank++) {
                store_vector(static_cast<char *>(places.parts.at[rank]) + at[u], words[u][0]);
            }
        } else {
            store_vector(places.out + head + 16 * (v + u * stride), words[u][0]);
        }
    }
}

template <int N, bool TO_ALL>
__device__ __forceinline__ void sum_vectors(const Places<TO_ALL> &places, symmem_u64 head, symmem_u64 from,
                                            symmem_u64 to, Op op) {
    // Vectors at once: about 8 loads, 32 registers. Two-byte floats take twice the registers that they lie in.
    const int U = N >= 8 ? 1 : N == 2 && Number::BYTES == 2 ? 3 : 8 / N;
    const symmem_u64 stride = threads_of_grid();
    symmem_u64 v = from + thread_of_grid();
    // Whole batches apart from the rest: a condition between them would let the compiler put loads behind it.
    for (; v + (U - 1) * stride < to; v += U * stride) {
        sum_batch<N, U>(places, head, v, stride, op);
    }
    if constexpr (U > 1) {
#pragma unroll 1
        for (; v < to; v += stride) {
            sum_batch<N, 1>(places, head, v, stride, op);
        }
    }
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

template <bool TO_ALL>
__device__ __forceinline__ void reduce_any(const Places<TO_ALL> &places, symmem_u64 head, symmem_u64 from,
                                           symmem_u64 to, Op op) {
    for (symmem_u64 v = from + thread_of_grid(); v < to; v += threads_of_grid()) {
        symmem_u64 at = places.stretch.at(head + 16 * v);
        symmem_u32 words[4];
        if (op <= AVERAGE) {
            sum_vector(words, places.parts, places.size, places.first + at, op);
        } else {
            reduce_vector(words, places.parts, places.size, places.first + at, op);
        }
        if constexpr (TO_ALL) {
            for (symmem_u32 rank = 0; rank < places.size; rank++) {
                store_vector(places.part(rank, at), words);
            }
        } else {
            store_vector(places.out + head + 16 * v, words);
        }
    }
}

template <bool TO_ALL>
__device__ __forceinline__ void reduce_vectors(const Places<TO_ALL> &places, symmem_u64 head, symmem_u64 from,
                                               symmem_u64 to, Op op) {
    // Arithmetic on bytes takes as long as the loads: nothing is gained by more of them at once.
    if constexpr (Number::BYTES > 1) {
        if (op <= AVERAGE && places.size == 2) {
            return sum_vectors<2>(places, head, from, to, op);
        }
        if (op <= AVERAGE && places.size == 4) {
            return sum_vectors<4>(places, head, from, to, op);
        }
        if (op <= AVERAGE && places.size == 8) {
            return sum_vectors<8>(places, head, from, to, op);
        }
    }
    reduce_any(places, head, from, to, op);
}

// The part of the loose elements of a cut that is number `share` of `shares`.
template <bool TO_ALL>
__device__ __forceinline__ void reduce_loose(const Places<TO_ALL> &places, const Cut &cut, symmem_u32 share,
                                             symmem_u32 shares, Op op) {
    symmem_u64 loose = cut.loose() / Number::BYTES, per_share = (loose + shares - 1) / shares;
    symmem_u64 to = least(per_share * (share + 1), loose);
    for (symmem_u64 i = per_share * share + thread_of_grid(); i < to; i += threads_of_grid()) {
        reduce_element(places, cut.loose_at(i * Number::BYTES), op);
    }
}
