// Copies of any length and alignment, shared out among warps.
#pragma once

#include "vectors.cuh"

template <int W> struct Word {
    symmem_u64 bits;
    template <bool RUIN> __device__ __forceinline__ void get(const char *from) {
        bits = RUIN ? ~0ull : load_bits<W>(from);
    }
    __device__ __forceinline__ void store(char *to) const { store_bits<W>(to, bits); }
};

template <> struct Word<16> {
    symmem_u32 words[4];
    template <bool RUIN> __device__ __forceinline__ void get(const char *from) {
        if (RUIN) {
            words[0] = words[1] = words[2] = words[3] = ~0u;
        } else {
            load_vector(words, from);
        }
    }
    __device__ __forceinline__ void store(char *to) const { store_vector(to, words); }
};

// By threads `thread` of `threads`; both addresses are alike modulo W. With RUIN nothing is read: see `ruin`.
template <int W, bool RUIN>
__device__ __forceinline__ void copy_words(char *to, const char *from, symmem_u64 bytes, symmem_u64 thread,
                                           symmem_u64 threads) {
    const int U = 4;
    symmem_u64 head = least((W - (symmem_u64)to % W) % W, bytes), words = (bytes - head) / W, i = thread;
    for (; i + (U - 1) * threads < words; i += U * threads) {
        Word<W> word[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            word[u].template get<RUIN>(from + head + W * (i + u * threads));
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            word[u].store(to + head + W * (i + u * threads));
        }
    }
    for (; i < words; i += threads) {
        Word<W> word;
        word.template get<RUIN>(from + head + W * i);
        word.store(to + head + W * i);
    }
    for (i = thread; W > 1 && i < bytes - W * words; i += threads) {
        symmem_u64 at = i < head ? i : i + W * words;
        store_bits<1>(to + at, RUIN ? 0xff : load_bits<1>(from + at));
    }
}

template <bool RUIN>
static __device__ __noinline__ void move_bytes(char *to, const char *from, symmem_u64 bytes, symmem_u64 thread,
                                               symmem_u64 threads) {
    symmem_u64 apart = (symmem_u64)to ^ (symmem_u64)from;
    if (to == from) {
        return;
    }
    if (apart % 16 == 0) {
        copy_words<16, RUIN>(to, from, bytes, thread, threads);
    } else if (apart % 4 == 0) {
        copy_words<4, RUIN>(to, from, bytes, thread, threads);
    } else {
        copy_words<1, RUIN>(to, from, bytes, thread, threads);
    }
}

// The part of thread `thread` of `threads` in a copy. With `ruins`, it leaves what `ruin` does where it would have copied.
__device__ __forceinline__ void copy_bytes(char *to, const char *from, symmem_u64 bytes, symmem_u64 thread,
                                           symmem_u64 threads, bool ruins) {
    if (ruins) {
        move_bytes<true>(to, from, bytes, thread, threads);
    } else {
        move_bytes<false>(to, from, bytes, thread, threads);
    }
}

// A warp's part in copies: which it begins with, and its index among the warps of one copy.
struct Worker {
    symmem_u64 worker, workers;

    __device__ __forceinline__ Worker() {
        worker = (symmem_u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
        workers = (symmem_u64)gridDim.x * (blockDim.x / 32);
    }

    // Calls `f(copy, thread, threads, ruins)` for the copies that this warp has a part in, all of them about equally long.
    template <class F> __device__ __forceinline__ void each(symmem_u64 copies, F f, bool ruins = false) const {
        symmem_u64 lane = threadIdx.x % 32;
        if (workers < copies) {
            for (symmem_u64 copy = worker; copy < copies; copy += workers) {
                f(copy, lane, 32, ruins);
            }
        } else if (copies != 0) {
            symmem_u64 copy = worker % copies, together = (workers - copy + copies - 1) / copies;
            f(copy, worker / copies * 32 + lane, together * 32, ruins);
        }
    }
};
