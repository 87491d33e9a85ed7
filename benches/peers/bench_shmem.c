// OpenSHMEM (active-set collectives of 1.4, which is what Debian's oshmem has): f32, no reduce-scatter.
#include "sync.h"
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long psync[2][SHMEM_REDUCE_SYNC_SIZE + SHMEM_COLLECT_SYNC_SIZE + SHMEM_ALLTOALL_SYNC_SIZE];
static float *in, *out, *work;
static int rank, size, turn;
struct ctx { size_t bytes; };
#define BYTES (((struct ctx *)p)->bytes)
#define N (BYTES / 4)
#define PS psync[turn ^= 1] // in turn, as the standard asks

static void barrier(void *p) { (void)p; shmem_barrier_all(); }
static void all_reduce(void *p) { shmem_float_sum_to_all(in, in, N, 0, 0, size, work, PS); }
static void all_gather(void *p) { shmem_fcollect32(out, in, N, 0, 0, size, PS); }
static void broadcast(void *p) { shmem_broadcast32(out, in, N, 0, 0, 0, size, PS); }
static void all_to_all(void *p) { shmem_alltoall32(out, in, N, 0, 0, size, PS); }

// Data, and a flag behind it; as in bench_mpi.c.
static long flag, sent, seen;
static int second;
static void serve(void) { shmem_long_test(&flag, SHMEM_CMP_GT, seen); }
static void send_flagged(size_t bytes, int to) {
  shmem_putmem(out, in, bytes, to);
  shmem_fence();
  shmem_long_p(&flag, ++sent, to);
}
static void wait_flagged(void) { shmem_long_wait_until(&flag, SHMEM_CMP_GE, ++seen); }
static void put(void *p) {
  if (rank == 0) send_flagged(BYTES, second);
  if (rank == second) wait_flagged();
}
static void put_signal(void *p) {
  if (rank == 0) send_flagged(BYTES, second), wait_flagged();
  if (rank == second) wait_flagged(), send_flagged(BYTES, 0);
}
static int is_put(bench_fn call) { return call == put || call == put_signal; }

static void dirty1(void *p) { sync_dirty(in, BYTES); }
static void dirtyn(void *p) { sync_dirty(in, BYTES * size); }
static void dirty_root(void *p) { if (rank == 0) dirty1(p); }
static void read_in(void *p) { sync_read(in, BYTES); }
static void read_one(void *p) { if (rank) sync_read(out, BYTES); else sync_read(in, BYTES); }
static void read_all(void *p) { sync_read(out, BYTES * size); }

static int check(const char *op, bench_fn call, struct ctx *c) {
  size_t n = c->bytes / 4;
  int right = 1;
  for (size_t i = 0; i < n * size; i++) in[i] = 1 + rank;
  shmem_barrier_all();
  call(c);
  for (size_t i = 0; i < n && right; i++) {
    if (call == all_reduce) right &= sync_expect(op, in, i, size * (size + 1) / 2);
    if (is_put(call) && rank == second) right &= sync_expect(op, out, i, 1);
    if (call == put_signal && rank == 0) right &= sync_expect(op, out, i, 1 + second);
    if (call == broadcast && rank) right &= sync_expect(op, out, i, 1); // the root's own is not written
    for (int r = 0; r < size; r++)
      if (call == all_gather || call == all_to_all) right &= sync_expect(op, out, r * n + i, 1 + r);
  }
  shmem_barrier_all();
  return right;
}

static void one(const char *op, bench_fn prep, bench_fn call, bench_fn read) {
  if (!sync_wants(op)) return;
  for (int i = 0; sync_size(i); i++) {
    struct ctx c = { sync_size(i) };
    if (!sync_fits(op, c.bytes)) continue;
    int right = check(op, call, &c);
    sync_bench(op, is_put(call) ? "-" : "f32", c.bytes, right, prep, call, read, &c);
  }
}

int main(void) {
  shmem_init();
  rank = shmem_my_pe(), size = shmem_n_pes();
  size_t big = (sync_largest() * size + 4095) & ~(size_t)4095;
  in = shmem_align(4096, big), out = shmem_align(4096, big), work = shmem_align(4096, big / 2 + 4096);
  if (!in || !out || !work) { fprintf(stderr, "no memory\n"); shmem_global_exit(1); }
  for (size_t i = 0; i < sizeof psync[0] / sizeof(long); i++) psync[0][i] = psync[1][i] = SHMEM_SYNC_VALUE;
  shmem_barrier_all();
  sync_init(rank, size);
  if (sync_wants("barrier")) sync_bench_barrier(barrier, NULL);
  if ((second = sync_second())) {
    sync_serve(serve);
    one("put_signal", dirty1, put_signal, NULL);
    one("put", dirty1, put, NULL);
    sync_serve(NULL);
  }
  if (!strcmp(sync_dtype(), "f32")) {
    one("all_reduce", dirty1, all_reduce, read_in);
    one("all_gather", dirty1, all_gather, read_all);
    one("broadcast", dirty_root, broadcast, read_one);
    one("all_to_all", dirtyn, all_to_all, read_all);
  }
  shmem_barrier_all();
  fflush(NULL);
  _Exit(0); // Debian's shmem_finalize crashes
}
