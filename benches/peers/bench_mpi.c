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

static void dirty1(void *p) { struct ctx *c = p; sync_dirty(c->in, c->bytes); }
static void dirtyn(void *p) { struct ctx *c = p; sync_dirty(c->in, c->bytes * size); }
static void dirty_root(void *p) { if (rank == 0) dirty1(p); }
static void read_in(void *p) { struct ctx *c = p; sync_read(c->in, c->bytes); }
static void read_one(void *p) { struct ctx *c = p; sync_read(c->out, c->bytes); }
static void read_all(void *p) { struct ctx *c = p; sync_read(c->out, c->bytes * size); }

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

static void expect(const char *op, const void *p, size_t i, double v) {
  if (sync_get(p, i) == v) return;
  fprintf(stderr, "wrong result of %s: %g at %zu instead of %g\n", op, sync_get(p, i), i, v);
  MPI_Abort(MPI_COMM_WORLD, 3);
}

// One call on numbers that tell ranks and blocks apart, looked at everywhere, before anything is timed.
static void check(const char *op, bench_fn call, struct ctx *c) {
  size_t n = c->count;
  for (int b = 0; b < size; b++)
    for (size_t i = 0; i < n; i++) sync_put(c->in, b * n + i, 1 + (rank + 2 * b) % 4);
  double sum = 0, mine = 0;
  for (int r = 0; r < size; r++) sum += 1 + r % 4, mine += 1 + (r + 2 * rank) % 4;
  call(c);
  for (size_t i = 0; i < n; i++) {
    if (call == all_reduce) expect(op, c->in, i, sum);
    if (call == broadcast) expect(op, c->in, i, 1);
    if (call == reduce_scatter) expect(op, c->out, i, mine);
    for (int r = 0; r < size; r++) {
      if (call == all_gather) expect(op, c->out, r * n + i, 1 + r % 4);
      if (call == all_to_all) expect(op, c->out, r * n + i, 1 + (r + 2 * rank) % 4);
    }
  }
}

static void one(const char *op, struct ctx *c, bench_fn prep, bench_fn call, bench_fn read) {
  if (!sync_wants(op)) return;
  for (int i = 0; sync_size(i); i++) {
    c->bytes = sync_size(i), c->count = c->bytes / sync_element();
    check(op, call, c);
    sync_bench(op, sync_dtype(), c->bytes, prep, call, read, c);
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

  if (sync_wants("barrier")) sync_bench("barrier", "-", 0, NULL, barrier, NULL, &c);
  if (c.t != MPI_DATATYPE_NULL) { // else this MPI has no such type
    one("all_reduce", &c, dirty1, all_reduce, read_in);
    one("reduce_scatter", &c, dirtyn, reduce_scatter, read_one);
    one("all_gather", &c, dirty1, all_gather, read_all);
    one("broadcast", &c, dirty_root, broadcast, read_in);
    one("all_to_all", &c, dirtyn, all_to_all, read_all);
  }
  MPI_Finalize();
}
