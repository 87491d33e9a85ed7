// Tiles: parts of matrices in all ranks' memory, and where their reductions go.
#pragma once

#include "reduce.cuh"

#define SYMMEM_MAX_TILES 16

// Those whose reduction this rank gets. Passed by value. Everything counts elements.
struct Tiles {
    symmem_u32 count, reserved;
    symmem_u64 pitch;     // from one row to the next, in all parts
    symmem_u64 out_pitch; // likewise in outputs; 0: rows follow each other
    symmem_u64 first[SYMMEM_MAX_TILES], rows[SYMMEM_MAX_TILES], columns[SYMMEM_MAX_TILES];
    char *out[SYMMEM_MAX_TILES]; // in no part
};
static_assert(sizeof(Tiles) == 536, "layout");

// One tile, in bytes.
struct TileBytes {
    symmem_u64 first, rows, row, pitch, out_pitch;
    char *out;

    __device__ __forceinline__ TileBytes(const Tiles &tiles, symmem_u32 tile) {
        first = tiles.first[tile] * Number::BYTES;
        rows = tiles.rows[tile];
        row = tiles.columns[tile] * Number::BYTES;
        pitch = tiles.pitch * Number::BYTES;
        out_pitch = tiles.out_pitch == 0 ? row : tiles.out_pitch * Number::BYTES;
        out = tiles.out[tile];
    }

    // Whether everything lies at multiples of 16 bytes; `other` is a further address.
    __device__ __forceinline__ bool is_even(const SymmemPointers &parts, symmem_u32 size, symmem_u64 other) const {
        symmem_u64 bits = first | row | pitch | out_pitch | (symmem_u64)out | other;
        for (symmem_u32 rank = 0; rank < size; rank++) {
            bits |= (symmem_u64)parts.at[rank];
        }
        return bits % 16 == 0;
    }
};

// Calls `f(from, to)` for all pieces of `bytes` of a tile that are this thread's: where one is in the parts, and where its
// reduction goes.
template <class F> __device__ __forceinline__ void each_piece(const TileBytes &tile, symmem_u64 bytes, F f) {
    symmem_u64 of_row = tile.row / bytes, pieces = of_row * tile.rows;
    for (symmem_u64 piece = thread_of_grid(); piece < pieces; piece += threads_of_grid()) {
        symmem_u64 row = piece / of_row, at = (piece - row * of_row) * bytes;
        f(tile.first + row * tile.pitch + at, tile.out + row * tile.out_pitch + at);
    }
}

// Element by element, in rank order. Seldom, and so not inlined: it would take registers from what is often.
static __device__ __noinline__ void reduce_pieces(const TileBytes &tile, const SymmemPointers &parts, symmem_u32 size,
                                                  Op op) {
    each_piece(tile, Number::BYTES, [&](symmem_u64 from, char *to) {
        store_bits<Number::BYTES>(to, reduced_element(parts, size, from, op));
    });
}

// All of this rank's outputs, whose kernel could not finish: see `ruin`. `other` as of `is_even`.
static __device__ __noinline__ void ruin_tiles(const Tiles &tiles, const SymmemPointers &parts, symmem_u32 size,
                                               symmem_u64 other) {
    const symmem_u32 ones[4] = {~0u, ~0u, ~0u, ~0u};
#pragma unroll 1
    for (symmem_u32 number = 0; number < tiles.count; number++) {
        TileBytes tile(tiles, number);
        if (tile.is_even(parts, size, other)) {
            each_piece(tile, 16, [&](symmem_u64, char *to) { store_vector(to, ones); });
        } else {
            each_piece(tile, Number::BYTES, [](symmem_u64, char *to) { store_bits<Number::BYTES>(to, ~0ull); });
        }
    }
}
