// MPI's own collectives. The same source is built against every MPI.
#include "sync.h"
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(MPICH_NUMVERSION) && MPICH_NUMVERSION < 50000000 && !defined(I_MPI_VERSION)
#undef MPIX_C_FLOAT16 // Debian's MPICH 4.0 names it and aborts when it is used
#endif

struct ctx { void *in, *out; size_t bytes; int count; MPI_Datatype t; };
static int rank, size;

static void barrier(void *c) { (void)c; MPI_Barrier(MPI_COMM_WORLD); }
static void all_reduce(void *p) { struct ctx *c = p; MPI_Allreduce(MPI_IN_PLACE, c->in, c->count, c->t, MPI_SUM, MPI_COMM_WORLD); }
static void reduce_scatter(void *p) { struct ctx *c = p; MPI_Reduce_scatter_block(c->in, c->out, c->count, c->t, MPI_SUM, MPI_COMM_WORLD); }
static void all_gather(void *p) { struct ctx *c = p; MPI_Allgather(c->in, c->count, c->t, c->out, c->count, c->t, MPI_COMM_WORLD); }
static void broadcast(void *p) { struct ctx *c = p; MPI_Bcast(c->in, c->count, c->t, 0, MPI_COMM_WORLD); }
static void all_to_all(void *p) { struct ctx *c = p; MPI_Alltoall(c->in, c->count, c->t, c->out, c->count, c->t, MPI_COMM_WORLD); }

static void reduce(void *p) { struct ctx *c = p; MPI_Reduce(c->in, c->out, c->count, c->t, MPI_SUM, 0, MPI_COMM_WORLD); }
static void gather(void *p) { struct ctx *c = p; MPI_Gather(c->in, c->count, c->t, c->out, c->count, c->t, 0, MPI_COMM_WORLD); }
static void scatter(void *p) { struct ctx *c = p; MPI_Scatter(c->in, c->count, c->t, c->out, c->count, c->t, 0, MPI_COMM_WORLD); }

static void dirty1(void *p) { struct ctx *c = p; sync_dirty(c->in, c->bytes); }
static void dirtyn(void *p) { struct ctx *c = p; sync_dirty(c->in, c->bytes * size); }
static void dirty_root(void *p) { if (rank == 0) dirty1(p); }
static void dirtyn_root(void *p) { if (rank == 0) dirtyn(p); }
static void read_in(void *p) { struct ctx *c = p; sync_read(c->in, c->bytes); }
static void read_one(void *p) { struct ctx *c = p; sync_read(c->out, c->bytes); }
static void read_all(void *p) { struct ctx *c = p; sync_read(c->out, c->bytes * size); }
static void read_one_root(void *p) { if (rank == 0) read_one(p); }
static void read_all_root(void *p) { if (rank == 0) read_all(p); }

static MPI_Datatype type(void) {
  const char *t = sync_dtype();
  if (!strcmp(t, "f32")) return MPI_FLOAT;
  if (!strcmp(t, "f64")) return MPI_DOUBLE;
  if (!strcmp(t, "i32")) return MPI_INT32_T;
  if (!strcmp(t, "i64")) return MPI_INT64_T;
  if (!strcmp(t, "u32")) return MPI_UINT32_T;
  if (!strcmp(t, "u8")) return MPI_UINT8_T;
#ifdef MPIX_BFLOAT16
  if (!strcmp(t, "bf16")) return MPIX_BFLOAT16;
#endif
#ifdef MPIX_C_FLOAT16
  if (!strcmp(t, "f16")) return MPIX_C_FLOAT16;
#endif
  return MPI_DATATYPE_NULL;
}

// One call on numbers that tell ranks and blocks apart, looked at everywhere, before anything is timed.
static int check(const char *op, bench_fn call, struct ctx *c) {
  size_t n = c->count;
  for (int b = 0; b < size; b++)
    for (size_t i = 0; i < n; i++) sync_put(c->in, b * n + i, 1 + (rank + 2 * b) % 4);
  double sum = 0, mine = 0;
  int right = 1, root = rank == 0;
  for (int r = 0; r < size; r++) sum += 1 + r % 4, mine += 1 + (r + 2 * rank) % 4;
  call(c);
  for (size_t i = 0; i < n; i++) {
    if (call == all_reduce) right &= sync_expect(op, c->in, i, sum);
    if (call == broadcast) right &= sync_expect(op, c->in, i, 1);
    if (call == reduce_scatter) right &= sync_expect(op, c->out, i, mine);
    if (call == reduce && root) right &= sync_expect(op, c->out, i, sum);
    if (call == scatter) right &= sync_expect(op, c->out, i, 1 + 2 * rank % 4);
    for (int r = 0; r < size; r++) {
      if (call == all_gather || (call == gather && root)) right &= sync_expect(op, c->out, r * n + i, 1 + r % 4);
      if (call == all_to_all) right &= sync_expect(op, c->out, r * n + i, 1 + (r + 2 * rank) % 4);
    }
    if (!right) return 0; // the first says enough
  }
  return right;
}

static void one(const char *op, struct ctx *c, bench_fn prep, bench_fn call, bench_fn read) {
  if (!sync_wants(op)) return;
  for (int i = 0; sync_size(i); i++) {
    c->bytes = sync_size(i), c->count = c->bytes / sync_element();
    int right = check(op, call, c);
    sync_bench(op, sync_dtype(), c->bytes, right, prep, call, read, c);
  }
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  sync_init(rank, size);
  size_t big = (sync_largest() * size + 4095) & ~(size_t)4095;
  struct ctx c = { aligned_alloc(4096, big), aligned_alloc(4096, big), 0, 0, type() };
  if (!c.in || !c.out) { perror("memory"); MPI_Abort(MPI_COMM_WORLD, 1); }
  memset(c.in, 0, big), memset(c.out, 0, big);

  if (sync_wants("barrier")) sync_bench_barrier(barrier, &c);
  if (c.t != MPI_DATATYPE_NULL) { // else this MPI has no such type
    one("all_reduce", &c, dirty1, all_reduce, read_in);
    one("reduce_scatter", &c, dirtyn, reduce_scatter, read_one);
    one("all_gather", &c, dirty1, all_gather, read_all);
    one("broadcast", &c, dirty_root, broadcast, read_in);
    one("all_to_all", &c, dirtyn, all_to_all, read_all);
    one("reduce", &c, dirty1, reduce, read_one_root);
    one("gather", &c, dirty1, gather, read_all_root);
    one("scatter", &c, dirtyn_root, scatter, read_one);
  }
  MPI_Finalize();
}
