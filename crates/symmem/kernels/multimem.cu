// Reductions and stores that the switch does, through an address that reaches all ranks' memory at once: sums of SYMMEM_T,
// which is f32, bf16 or f16, in the switch's order. 16-bit floats are summed in f32. compute_90.
#include "move.cuh"
#include "tiles.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(512, 2)
#define CONSTANT const __grid_constant__

#define LOAD_f32 "multimem.ld_reduce.relaxed.sys.global.add.v4.f32"
#define LOAD_bf16 "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2"
#define LOAD_f16 "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2"
#define LOAD_OF(name) LOAD_##name
#define LOAD(name) LOAD_OF(name)

// The sum of all ranks' vectors at this address.
__device__ __forceinline__ void multimem_load(symmem_u32 (&words)[4], const char *from) {
    asm volatile("{ .reg .b32 w<4>; " LOAD(SYMMEM_T) " {w0, w1, w2, w3}, [%4];"
                 " mov.b32 %0, w0; mov.b32 %1, w1; mov.b32 %2, w2; mov.b32 %3, w3; }"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
}

// The same vector for all ranks.
__device__ __forceinline__ void multimem_store(char *to, const symmem_u32 (&words)[4]) {
    asm volatile("{ .reg .b32 w<4>; mov.b32 w0, %1; mov.b32 w1, %2; mov.b32 w2, %3; mov.b32 w3, %4;"
                 " multimem.st.relaxed.sys.global.v4.f32 [%0], {w0, w1, w2, w3}; }" ::"l"(to),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// Vectors `from..to` summed by the switch; `store(v, words)` takes each.
template <class At, class Store>
__device__ __forceinline__ void each_sum(symmem_u64 from, symmem_u64 to, At at, Store store) {
    const int U = 4;
    const symmem_u64 stride = threads_of_grid();
    symmem_u64 v = from + thread_of_grid();
    for (; v + (U - 1) * stride < to; v += U * stride) {
        symmem_u32 words[U][4];
#pragma unroll
        for (int u = 0; u < U; u++) {
            multimem_load(words[u], at(v + u * stride));
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            store(v + u * stride, words[u]);
        }
    }
    for (; v < to; v += stride) {
        symmem_u32 words[4];
        multimem_load(words, at(v));
        store(v, words);
    }
}

// In place, as `all_reduce_two_shot`; `multicast` is the address of all parts.
KERNEL multimem_all_reduce(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *multicast,
                           symmem_u64 first, symmem_u64 length) {
    SymmemBlock block = symmem_begin(group, 2);
    const symmem_u64 bytes = length * Number::BYTES;
    Operands<true> operands = {parts, group.size, first * Number::BYTES, {bytes, bytes}, nullptr};
    Cut cut(operands.part(0, 0), operands.apart() | ((symmem_u64)multicast ^ (symmem_u64)parts.at[0]), bytes);
    char *all = multicast + operands.first + cut.head;
    symmem_u64 share = (cut.vectors + group.size - 1) / group.size;
    symmem_u64 from = least(share * group.rank, cut.vectors), to = least(from + share, cut.vectors);
    if (symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        each_sum(
            from, to, [&](symmem_u64 v) { return all + 16 * v; },
            [&](symmem_u64 v, const symmem_u32(&words)[4]) { multimem_store(all + 16 * v, words); });
        reduce_loose(operands, cut, group.rank, group.size, SUM);
        if (symmem_sync_blocks<SYMMEM_LAST | SYMMEM_RELEASE>(group, block)) {
            return;
        }
    }
    ruin_own(group, parts, first, length, group.size, (symmem_u64)multicast ^ (symmem_u64)parts.at[0]);
}

// As `reduce_pull`: one-shot all-reduce, reduce-scatter and reduce.
KERNEL multimem_reduce_pull(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *multicast, char *out,
                            symmem_u64 first, symmem_u64 rows, symmem_u64 columns, symmem_u64 pitch,
                            symmem_u32 active) {
    SymmemBlock block = symmem_begin(group, 2);
    const symmem_u64 row = columns * Number::BYTES, bytes = rows * row;
    Stretch stretch = {rows > 1 ? row : bytes, rows > 1 ? pitch * Number::BYTES : bytes};
    Operands<false> operands = {parts, group.size, first * Number::BYTES, stretch, out};
    Cut cut(operands.part(0, 0), operands.apart() | ((symmem_u64)multicast ^ (symmem_u64)parts.at[0]), bytes);
    if (symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        if (active != 0) {
            each_sum(
                0, cut.vectors,
                [&](symmem_u64 v) { return multicast + operands.first + stretch.at(cut.head + 16 * v); },
                [&](symmem_u64 v, const symmem_u32(&words)[4]) { store_vector(out + cut.head + 16 * v, words); });
            reduce_loose(operands, cut, 0, 1, SUM);
        }
        if (symmem_sync_blocks<SYMMEM_LAST>(group, block)) {
            return;
        }
    }
    if (active != 0) {
        symmem_u64 apart = (symmem_u64)multicast ^ (symmem_u64)parts.at[0];
        ruin_out(group, parts, out, first, rows, columns, pitch, apart);
    }
}

// As `reduce_tiles`, sums.
KERNEL multimem_reduce_tiles(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *multicast,
                             CONSTANT Tiles tiles) {
    SymmemBlock block = symmem_begin(group, 2);
    if (!symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        return ruin_tiles(tiles, parts, group.size, (symmem_u64)multicast);
    }
    for (symmem_u32 number = 0; number < tiles.count; number++) {
        TileBytes tile(tiles, number);
        if (!tile.is_even(parts, group.size, (symmem_u64)multicast)) {
            reduce_pieces(tile, parts, group.size, SUM);
            continue;
        }
        each_piece(tile, 16, [&](symmem_u64 from, char *to) {
            symmem_u32 words[4];
            multimem_load(words, multicast + from);
            store_vector(to, words);
        });
    }
    if (!symmem_sync_blocks<SYMMEM_LAST>(group, block)) {
        ruin_tiles(tiles, parts, group.size, (symmem_u64)multicast);
    }
}

// All ranks' `bytes` in this rank's part, by threads of the grid: which block would have stored what is not known here.
static __device__ __noinline__ void ruin_all(const SymmemGroup &group, const SymmemPointers &parts, symmem_u64 first,
                                             symmem_u64 bytes) {
    char *to = static_cast<char *>(parts.at[group.rank]) + first;
    Cut cut(to, 0, bytes * group.size);
    ruin(to, cut.head, cut.vectors, cut.bytes, 1, 1, 1);
}

// Into all parts, by rank, from byte `first` on: the `bytes` at `in`, which this rank stores with all.
KERNEL multimem_all_gather(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *multicast, const char *in,
                           symmem_u64 first, symmem_u64 bytes) {
    SymmemBlock block = symmem_begin(group, 2);
    const symmem_u64 begin = first + group.rank * bytes;
    char *all = multicast + begin;
    symmem_u64 apart = (symmem_u64)all ^ (symmem_u64)in;
    Cut cut(in, apart, bytes);
    if (!symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        return ruin_all(group, parts, first, bytes);
    }
    const symmem_u64 stride = threads_of_grid();
    symmem_u64 v = thread_of_grid();
#pragma unroll 4
    for (; v < cut.vectors; v += stride) {
        symmem_u32 words[4];
        load_vector(words, in + cut.head + 16 * v);
        multimem_store(all + cut.head + 16 * v, words);
    }
    // The rest goes to each rank by itself: the switch takes no single bytes.
    for (symmem_u32 rank = 0; rank < group.size; rank++) {
        char *to = static_cast<char *>(parts.at[rank]) + begin;
        copy_bytes(to, in, cut.head, thread_of_grid(), stride, false);
        copy_bytes(to + cut.tail(), in + cut.tail(), bytes - cut.tail(), thread_of_grid(), stride, false);
    }
    if (!symmem_sync_blocks<SYMMEM_LAST | SYMMEM_RELEASE>(group, block)) {
        ruin_all(group, parts, first, bytes);
    }
}
