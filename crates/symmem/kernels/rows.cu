// All-to-all of rows, with numbers of rows that only their sender knows: a kernel that reads all ranks' splits and finds
// what goes where, and one that fetches the rows. The same rules as crates/symmem/src/collectives/all_to_all_v.rs.
#include "move.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(512)
#define CONSTANT const __grid_constant__

// A verdict other than 0 is where the numbers are wrong; all ranks come to the same, because each looks at all.
enum Verdict : symmem_u32 { FITS, NEGATIVE, BEYOND_INPUT, BEYOND_OUTPUT, FAILED };

// More rows than any memory has: sums of such numbers do not wrap.
const symmem_u64 TOO_MANY = 1ull << 48;

// What the two kernels share, in memory of this rank: 1 + 3 P words, then all ranks' tables, P or 2 P words each.
struct Plan {
    symmem_u64 pieces; // P, ranks times experts
    symmem_u64 *verdict, *from, *rows, *to, *tables;

    __device__ __forceinline__ Plan(symmem_u64 *words, symmem_u32 size, symmem_u32 experts) {
        pieces = (symmem_u64)size * experts;
        verdict = words;
        from = words + 1;
        rows = from + pieces;
        to = rows + pieces;
        tables = to + pieces;
    }
};

// What a call is about, and where it failed.
struct Planner {
    const SymmemGroup &group;
    const Plan &plan;
    symmem_u64 experts, words, in_rows, out_rows, align;
    symmem_u32 *wrong; // shared: verdict, and the rank above the lowest byte

    __device__ __forceinline__ void refuse(Verdict why, symmem_u32 rank) const { atomicCAS(wrong, 0, why | rank << 8); }

    __device__ __forceinline__ symmem_u64 entry(symmem_u32 source, symmem_u64 at) const {
        symmem_u64 rows = plan.tables[source * words + at];
        return rows > TOO_MANY ? TOO_MANY : rows;
    }
    __device__ __forceinline__ void check(Verdict why, symmem_u32 rank, symmem_u64 begin, symmem_u64 rows,
                                          symmem_u64 limit) const {
        if (rows != 0 && begin + rows > limit) {
            refuse(why, rank);
        }
    }
    // The sum of the lanes before this one; `all` becomes that of all lanes.
    static __device__ __forceinline__ symmem_u64 before(symmem_u64 value, symmem_u64 &all) {
        symmem_u64 sum = value;
        for (int step = 1; step < 32; step *= 2) {
            symmem_u64 other = __shfl_up_sync(0xffffffff, sum, step);
            sum += threadIdx.x % 32 >= step ? other : 0;
        }
        all = __shfl_sync(0xffffffff, sum, 31);
        return sum - value;
    }

    // One warp: where the rows that `source` sends lie at their source. Splits are by rank and then expert.
    __device__ inline void leave(symmem_u32 source) const {
        symmem_u64 begin = 0, all, mine = group.rank * experts;
        for (symmem_u64 base = 0; base < plan.pieces; base += 32) {
            symmem_u64 at = base + threadIdx.x % 32;
            symmem_u64 rows = at < plan.pieces ? entry(source, at) : 0;
            symmem_u64 from = begin + before(rows, all);
            check(BEYOND_INPUT, source, from, rows, in_rows);
            if (at >= mine && at < mine + experts) {
                symmem_u64 piece = (at - mine) * group.size + source;
                plan.from[piece] = from;
                plan.rows[piece] = rows;
            }
            begin = least(begin + all, TOO_MANY);
        }
    }

    // Likewise, where the sender says where they lie. Splits and offsets are by expert and then rank.
    __device__ inline void leave_from_offsets(symmem_u32 source) const {
        for (symmem_u64 at = threadIdx.x % 32; at < plan.pieces; at += 32) {
            symmem_u64 rows = entry(source, at), from = entry(source, plan.pieces + at);
            check(BEYOND_INPUT, source, from, rows, in_rows);
            if (at % group.size == group.rank) {
                symmem_u64 piece = source * experts + at / group.size;
                plan.from[piece] = from;
                plan.rows[piece] = rows;
            }
        }
    }

    // One warp: where rank `to` puts what it gets, expert by expert, each beginning at a multiple of `align`.
    __device__ inline void arrive_by_expert(symmem_u32 to) const {
        symmem_u64 begin = 0, all;
        for (symmem_u64 expert = 0; expert < experts; expert++) {
            symmem_u64 at = begin;
            for (symmem_u32 base = 0; base < group.size; base += 32) {
                symmem_u32 source = base + threadIdx.x % 32;
                symmem_u64 rows = source < group.size ? entry(source, to * experts + expert) : 0;
                symmem_u64 here = at + before(rows, all);
                check(BEYOND_OUTPUT, to, here, rows, out_rows);
                if (to == group.rank && source < group.size) {
                    plan.to[expert * group.size + source] = here;
                }
                at = least(at + all, TOO_MANY);
            }
            // An expert without rows has room all the same.
            symmem_u64 end = at > begin ? at : begin + 1;
            begin = least((end + align - 1) / align * align, TOO_MANY);
        }
    }

    // Likewise, source by source, without gaps.
    __device__ inline void arrive_by_source(symmem_u32 to) const {
        symmem_u64 begin = 0, all;
        for (symmem_u64 base = 0; base < plan.pieces; base += 32) {
            symmem_u64 piece = base + threadIdx.x % 32;
            symmem_u64 source = piece / experts, expert = piece % experts;
            symmem_u64 rows = piece < plan.pieces ? entry((symmem_u32)source, expert * group.size + to) : 0;
            symmem_u64 here = begin + before(rows, all);
            check(BEYOND_OUTPUT, to, here, rows, out_rows);
            if (to == group.rank && piece < plan.pieces) {
                plan.to[piece] = here;
            }
            begin = least(begin + all, TOO_MANY);
        }
    }
};

// One block. `splits` are all ranks' tables in symmetric memory. `offsets` not zero: they carry offsets as well. `align`
// is at most 2^48. What does not fit is noted in the mailbox; the group stays as it is, and the next kernel does nothing.
KERNEL all_to_all_v_plan(CONSTANT SymmemGroup group, CONSTANT SymmemPointers splits, symmem_u64 *words,
                         symmem_u32 experts, symmem_u32 offsets, symmem_u64 in_rows, symmem_u64 out_rows,
                         symmem_u64 align) {
    __shared__ symmem_u32 wrong;
    Plan plan(words, group.size, experts);
    symmem_u64 table = plan.pieces * (offsets != 0 ? 2 : 1);
    Planner planner = {group, plan, experts, table, in_rows, out_rows, align, &wrong};
    if (threadIdx.x == 0) {
        wrong = 0;
        *plan.verdict = FAILED; // until found otherwise
    }
    SymmemBlock block = symmem_begin(group, 1);
    if (!symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        return;
    }
    for (symmem_u32 source = 0; source < group.size; source++) {
        for (symmem_u64 at = threadIdx.x; at < table; at += blockDim.x) {
            symmem_u64 rows = load_bits<8>(static_cast<const char *>(splits.at[source]) + 8 * at);
            plan.tables[source * table + at] = rows;
            if ((long long)rows < 0) {
                planner.refuse(NEGATIVE, source);
            }
        }
    }
    __syncthreads();
    for (symmem_u32 rank = threadIdx.x / 32; rank < group.size; rank += blockDim.x / 32) {
        if (offsets != 0) {
            planner.leave_from_offsets(rank);
            planner.arrive_by_source(rank);
        } else {
            planner.leave(rank);
            planner.arrive_by_expert(rank);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *plan.verdict = wrong & 255;
        if (wrong != 0) {
            symmem_note(group.mailbox, SYMMEM_DOES_NOT_FIT, group.op, 0, wrong >> 8, wrong & 255, 0);
            // All ranks find the same, so none has to be told; but what is in the stream already must not wait for peers
            // that have heard of it.
            symmem_store_relaxed(symmem_own_pad(group), group.rank + 1);
        }
    }
}

// After `all_to_all_v_plan` on the same stream, with the same words. `received` becomes the number of rows and then the
// first row of each piece, as the plan has them. Where ranks did not come to a plan, `out`, of `out_rows` rows, is ruined.
KERNEL all_to_all_v(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, long long *received,
                    symmem_u64 *words, symmem_u32 experts, symmem_u32 offsets, symmem_u64 row_bytes,
                    symmem_u64 out_rows) {
    Plan plan(words, group.size, experts);
    SymmemBlock block = symmem_begin(group, 1);
    auto fetch = [&](symmem_u64 piece, symmem_u64 thread, symmem_u64 threads, bool ruins) {
        symmem_u64 source = offsets != 0 ? piece / experts : piece % group.size;
        const char *from = static_cast<const char *>(parts.at[source]) + plan.from[piece] * row_bytes;
        copy_bytes(out + plan.to[piece] * row_bytes, from, plan.rows[piece] * row_bytes, thread, threads, ruins);
    };
    const symmem_u64 verdict = *plan.verdict;
    if (verdict == FITS && block.broken == 0) {
        Worker().each(plan.pieces, fetch);
        for (symmem_u64 piece = thread_of_grid(); piece < plan.pieces; piece += threads_of_grid()) {
            received[piece] = (long long)plan.rows[piece];
            received[plan.pieces + piece] = (long long)plan.to[piece];
        }
    }
    if (symmem_sync_blocks<SYMMEM_LAST>(group, block)) {
        return;
    }
    if (verdict == FITS) {
        Worker().each(plan.pieces, fetch, true);
    } else if (verdict == FAILED) {
        Cut cut(out, 0, out_rows * row_bytes);
        ruin(out, cut.head, cut.vectors, cut.bytes, 1, 1, 1);
    }
}

// ---- one dimension for another ----------------------------------------------------------------------------------------

// `rows` rows of `bytes` from each rank: from byte `first` of its part on and `pitch` apart, to byte `rank * of_rank` of
// `out` on and `out_pitch` apart. Between two barriers.
KERNEL all_to_all_nd(CONSTANT SymmemGroup group, CONSTANT SymmemPointers parts, char *out, symmem_u64 first,
                     symmem_u64 rows, symmem_u64 bytes, symmem_u64 pitch, symmem_u64 of_rank, symmem_u64 out_pitch) {
    SymmemBlock block = symmem_begin(group, 2);
    auto fetch = [&](symmem_u64 copy, symmem_u64 thread, symmem_u64 threads, bool ruins) {
        // Each rank begins with its own part, so that they do not all read from one.
        symmem_u64 number = copy / rows, row = copy - number * rows;
        symmem_u64 peer = (group.rank + number) % group.size;
        const char *from = static_cast<const char *>(parts.at[peer]) + first + row * pitch;
        copy_bytes(out + peer * of_rank + row * out_pitch, from, bytes, thread, threads, ruins);
    };
    if (symmem_sync_blocks<SYMMEM_FIRST>(group, block)) {
        Worker().each(rows * group.size, fetch);
        if (symmem_sync_blocks<SYMMEM_LAST>(group, block)) {
            return;
        }
    }
    Worker().each(rows * group.size, fetch, true);
}
