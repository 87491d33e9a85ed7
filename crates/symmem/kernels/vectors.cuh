// Loads and stores of vectors and single elements, and how a stretch of memory is cut into them.
#pragma once

#include "symmem.cuh"

// The caches of a multiprocessor are passed by: what peers wrote is read once.
__device__ __forceinline__ void load_vector(symmem_u32 (&words)[4], const char *from) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
}

// Likewise, and they stay in the device's cache until the same line is stored to: what is about to be replaced need not be
// written back and fetched in between.
__device__ __forceinline__ void load_held(symmem_u32 (&words)[4], const char *from) {
    symmem_u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from), "l"(policy));
}

__device__ __forceinline__ void store_vector(char *to, const symmem_u32 (&words)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

template <int BYTES> struct Bits;
template <> struct Bits<1> { typedef unsigned char Type; };
template <> struct Bits<2> { typedef unsigned short Type; };
template <> struct Bits<4> { typedef symmem_u32 Type; };
template <> struct Bits<8> { typedef symmem_u64 Type; };

// The bits of an element of 16 bytes; those of all others fit into 64.
struct WideBits {
    symmem_u64 low, high;
};
template <int BYTES> struct Raw { typedef symmem_u64 Type; };
template <> struct Raw<16> { typedef WideBits Type; };

template <int BYTES> __device__ __forceinline__ typename Raw<BYTES>::Type load_bits(const char *from) {
    if constexpr (BYTES == 16) {
        return {load_bits<8>(from), load_bits<8>(from + 8)};
    } else {
        return *reinterpret_cast<const volatile typename Bits<BYTES>::Type *>(from);
    }
}

template <int BYTES> __device__ __forceinline__ void store_bits(char *to, typename Raw<BYTES>::Type bits) {
    if constexpr (BYTES == 16) {
        store_bits<8>(to, bits.low);
        store_bits<8>(to + 8, bits.high);
    } else {
        *reinterpret_cast<typename Bits<BYTES>::Type *>(to) = (typename Bits<BYTES>::Type)bits;
    }
}

__device__ __forceinline__ symmem_u64 least(symmem_u64 a, symmem_u64 b) { return a < b ? a : b; }

// Threads of the grid, and this one's number among them.
__device__ __forceinline__ symmem_u64 thread_of_grid() { return (symmem_u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ symmem_u64 threads_of_grid() { return (symmem_u64)gridDim.x * blockDim.x; }

// `bytes` from an address on: `head` bytes up to the first vector, then vectors, then the rest.
struct Cut {
    symmem_u64 head, vectors, bytes;

    // `apart`: bits in which addresses differ that are to be cut alike; if not, there are no vectors.
    __device__ __forceinline__ Cut(const void *first, symmem_u64 apart, symmem_u64 bytes) : bytes(bytes) {
        head = least((16 - (symmem_u64)first % 16) % 16, bytes);
        if (apart % 16 != 0) {
            head = bytes;
        }
        vectors = (bytes - head) / 16;
    }
    __device__ __forceinline__ symmem_u64 tail() const { return head + 16 * vectors; }
    // Bytes outside vectors.
    __device__ __forceinline__ symmem_u64 loose() const { return bytes - 16 * vectors; }
    // Where the loose byte number `i` lies.
    __device__ __forceinline__ symmem_u64 loose_at(symmem_u64 i) const { return i < head ? i : i + 16 * vectors; }
};

// ---- what a kernel leaves that could not finish ------------------------------------------------------------------------

// Bytes of ones, by this thread: NaN in every floating-point type. A reader of an output that has not asked whether
// its kernel failed must not find what was there before.
//
// `unit` bytes are an element. Vectors are those of a cut: this thread's of each of `shares` parts of them, and of `loose`
// parts of the other elements, as `Share` and `reduce_loose` deal them out. What other blocks have finished stays.
static __device__ __noinline__ void ruin(char *to, symmem_u64 head, symmem_u64 vectors, symmem_u64 bytes,
                                         symmem_u32 unit, symmem_u32 shares, symmem_u32 loose) {
    const symmem_u32 ones[4] = {~0u, ~0u, ~0u, ~0u};
    symmem_u64 of_each = shares == 1 ? vectors : ((vectors + shares - 1) / shares + 31) / 32 * 32;
#pragma unroll 1
    for (symmem_u64 first = 0; first < vectors; first += of_each) {
        symmem_u64 count = least(of_each, vectors - first);
#pragma unroll 1
        for (symmem_u64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
            store_vector(to + head + 16 * (first + i), ones);
        }
    }
    symmem_u64 elements = (bytes - 16 * vectors) / unit, per_share = (elements + loose - 1) / loose;
#pragma unroll 1
    for (symmem_u64 first = 0; first < elements; first += per_share) {
        symmem_u64 count = least(per_share, elements - first);
#pragma unroll 1
        for (symmem_u64 i = thread_of_grid(); i < count; i += threads_of_grid()) {
            symmem_u64 at = (first + i) * unit;
            at = at < head ? at : at + 16 * vectors;
#pragma unroll 1
            for (symmem_u32 byte = 0; byte < unit; byte++) {
                store_bits<1>(to + at + byte, 0xff);
            }
        }
    }
}
