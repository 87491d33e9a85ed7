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
static int rank, size, second;

static void barrier(void *c) { (void)c; MPI_Barrier(MPI_COMM_WORLD); }
static void all_reduce(void *p) { struct ctx *c = p; MPI_Allreduce(MPI_IN_PLACE, c->in, c->count, c->t, MPI_SUM, MPI_COMM_WORLD); }
static void reduce_scatter(void *p) { struct ctx *c = p; MPI_Reduce_scatter_block(c->in, c->out, c->count, c->t, MPI_SUM, MPI_COMM_WORLD); }
static void all_gather(void *p) { struct ctx *c = p; MPI_Allgather(c->in, c->count, c->t, c->out, c->count, c->t, MPI_COMM_WORLD); }
static void broadcast(void *p) { struct ctx *c = p; MPI_Bcast(c->in, c->count, c->t, 0, MPI_COMM_WORLD); }
static void all_to_all(void *p) { struct ctx *c = p; MPI_Alltoall(c->in, c->count, c->t, c->out, c->count, c->t, MPI_COMM_WORLD); }

static void reduce(void *p) { struct ctx *c = p; MPI_Reduce(c->in, c->out, c->count, c->t, MPI_SUM, 0, MPI_COMM_WORLD); }
static void gather(void *p) { struct ctx *c = p; MPI_Gather(c->in, c->count, c->t, c->out, c->count, c->t, 0, MPI_COMM_WORLD); }
static void scatter(void *p) { struct ctx *c = p; MPI_Scatter(c->in, c->count, c->t, c->out, c->count, c->t, 0, MPI_COMM_WORLD); }

// One-sided: data, and a flag behind it. Who waits looks for messages, without which some MPIs do not serve the others' puts, and
// all do so in our barrier: a flush may need the receiver, and a flag its sender.
static MPI_Win window;
static char *mine; // its part here: the flag, and a line further the data
static long sent, seen;
enum { DATA = 64 };

static void serve(void) {
  int some;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &some, MPI_STATUS_IGNORE);
}
static void send_flagged(struct ctx *c, int to) {
  sent++;
  MPI_Put(c->in, c->bytes, MPI_BYTE, to, DATA, c->bytes, MPI_BYTE, window);
  MPI_Win_flush(to, window);
  MPI_Put(&sent, 8, MPI_BYTE, to, 0, 8, MPI_BYTE, window);
  MPI_Win_flush_local(to, window);
}
static void wait_flagged(void) {
  seen++;
  while (*(volatile long *)mine < seen) serve(), MPI_Win_sync(window);
}
static void put(void *p) {
  if (rank == 0) send_flagged(p, second);
  if (rank == second) wait_flagged();
}
static void put_signal(void *p) {
  if (rank == 0) send_flagged(p, second), wait_flagged();
  if (rank == second) wait_flagged(), send_flagged(p, 0);
}
static int is_put(bench_fn call) { return call == put || call == put_signal; }

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
  if (is_put(call)) {
    memset(c->in, 1 + rank, c->bytes);
    call(c);
    int from = rank == second ? 0 : rank == 0 && call == put_signal ? second : -1, right = 1;
    for (size_t i = 0; from >= 0 && i < c->bytes; i++) right &= mine[DATA + i] == 1 + from;
    if (!right) fprintf(stderr, "wrong result of %s\n", op);
    sync_barrier(); // before the next one comes
    return right;
  }
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
    if (!sync_fits(op, c->bytes)) continue;
    int right = check(op, call, c);
    sync_bench(op, is_put(call) ? "-" : sync_dtype(), c->bytes, right, prep, call, read, c);
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
  if ((second = sync_second()) && (sync_wants("put") || sync_wants("put_signal"))) {
    MPI_Win_allocate(DATA + big, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &mine, &window);
    memset(mine, 0, DATA);
    MPI_Win_lock_all(MPI_MODE_NOCHECK, window);
    MPI_Barrier(MPI_COMM_WORLD);
    sync_serve(serve);
    one("put_signal", &c, dirty1, put_signal, NULL);
    one("put", &c, dirty1, put, NULL);
    sync_serve(NULL);
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
  }
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
