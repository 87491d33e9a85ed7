// Timing and synchronisation shared by every bench here, so that all peers are measured as `symmem bench` measures the
// library (C and C++ link sync.c, Python loads it with ctypes).
//
// One sample: every rank rewrites its input (a store in each cache line), all synchronise, then the call is timed, from the last
// rank's start to the last rank's end. Up to 64 bytes a sample is twenty calls in a row. From 16 KiB on the owner then
// reads the whole result, and the time to the end of that is the figure `...+read`: writing into a peer's buffer leaves
// the lines in the wrong cache, non-temporal stores leave them in no cache, and what that costs shows only there.
//
// A host moves virtual cores about, and between cores that share a cache a flag travels several times as fast. So the
// barrier ends with a few round trips of a flag, and a sample taken while they were near is kept apart.
//
// Between hosts ($PEERS_SPACES, see host.sh) it is as there: every rank is bound to a core and looks whether it runs in its host's
// network, the reading is not timed, nor where the cores are, and what goes one way is timed from rank 0's start.
#pragma once
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef void (*bench_fn)(void *);

void sync_init(int rank, int size);          // joins the region $PEERS_REGION
void sync_barrier(void);                     // ours, not the peer's; never timed
double sync_now(void);                       // nanoseconds
void sync_dirty(void *p, size_t bytes);      // one store in every cache line
void sync_read(const void *p, size_t bytes); // one load from every cache line

// What is asked for.
int sync_wants(const char *op);   // whether it is in $PEERS_OPS, a list with spaces
size_t sync_size(int i);          // the i-th of $PEERS_BYTES, a list with commas; 0 at the end
size_t sync_largest(void);        // the largest of them
int sync_fits(const char *op, size_t bytes); // whether so many are measured: put_signal to 16 KiB, put from there on, others all
int sync_second(void);            // the first rank of the second host; 0 on one host
void sync_serve(void (*serve)(void)); // what a rank does while it waits in our barrier; NULL: nothing
const char *sync_dtype(void);     // $PEERS_DTYPE
size_t sync_element(void);        // bytes of an element of it; 0: unknown
void sync_put(void *p, size_t i, double v);       // element i becomes v
double sync_get(const void *p, size_t i);

// Times one collective and has rank 0 write its lines, verified if `right` on all ranks: that the result has been looked at
// and was the one expected. `read` (may be null) reads the result.
void sync_bench(const char *op, const char *dtype, size_t bytes, int right, bench_fn prep, bench_fn call, bench_fn read, void *ctx);
void sync_bench_barrier(bench_fn call, void *ctx); // checks it, too
int sync_expect(const char *op, const void *p, size_t i, double v); // whether element i is v; says so where it is not

// The parts of sync_bench, for a caller that is not C.
int sync_batch(size_t bytes);                // calls in one sample
int sync_reads(size_t bytes);                // whether the reading is timed too
int sync_warm(double call_ns, size_t bytes); // untimed calls to make first; rank 0 decides for all
int sync_plan(double call_ns, size_t bytes); // samples to take; likewise
void sync_settle(void);                      // waits a little for the host to part near cores
void sync_arrive(int turn);                   // before the turn-th barrier of a check
int sync_all_arrived(int turn);              // after it: whether all have come
void sync_meet(int i);                       // before sample i: barrier, then the round trips
void sync_record(int i, double start, double end, double end_of_read);
void sync_emit(const char *op, const char *dtype, size_t bytes, int n, int read, int right);
#ifdef __cplusplus
}
#endif
