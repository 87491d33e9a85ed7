// Reductions of tiles for one element type, SYMMEM_T. Blocks have at most 512 threads, grids at most 256 blocks.
#include "tiles.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(512, 2)
#define CONSTANT const __grid_constant__

// Each rank reduces its own tiles from all parts, in rank order; all synchronise, also those that have none.
//
// Reduce to a root: one tile there, none elsewhere. Many roots: one with each. Reduce-scatter at offsets: as many with each.
KERNEL reduce_tiles(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, CONSTANT Tiles tiles, symmem_u32 op) {
    SymmemBlock block = symmem_begin(group, 2);
    if (!symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        return ruin_tiles(tiles, parts, group.size, 0);
    }
    for (symmem_u32 number = 0; number < tiles.count; number++) {
        TileBytes tile(tiles, number);
        if (!tile.is_even(parts, group.size, 0)) {
            reduce_pieces(tile, parts, group.size, (Op)op);
            continue;
        }
        each_piece(tile, 16, [&](symmem_u64 from, char *to) {
            symmem_u32 words[4];
            if (op <= AVERAGE) {
                sum_vector(words, parts, group.size, from, (Op)op);
            } else {
                reduce_vector(words, parts, group.size, from, (Op)op);
            }
            store_vector(to, words);
        });
    }
    if (!symmem_sync_blocks<SYMMEM_LAST>(group, block)) {
        ruin_tiles(tiles, parts, group.size, 0);
    }
}
