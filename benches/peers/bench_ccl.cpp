// oneCCL's CPU collectives (the host build of the library), started by Intel MPI.
#include "sync.h"
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mpi.h>
#include <oneapi/ccl.hpp>
#include <string>

// The static library wants the tracing hooks of a package that is not here; a null hook does nothing.
#define HOOK(f) extern "C" { void *__itt_##f##_ptr__3_0; }
HOOK(domain_create) HOOK(event_create) HOOK(event_end) HOOK(event_start) HOOK(metadata_add)
HOOK(string_handle_create) HOOK(task_begin) HOOK(task_end) HOOK(thread_set_name)

struct Ctx { ccl::communicator *comm; void *in, *out; size_t bytes, count; ccl::datatype t; };
static int rank_, size_;
#define C(p) (*static_cast<Ctx *>(p))

static void barrier(void *p) { ccl::barrier(*C(p).comm); }
static void all_reduce(void *p) { ccl::allreduce(C(p).in, C(p).in, C(p).count, C(p).t, ccl::reduction::sum, *C(p).comm).wait(); }
static void reduce_scatter(void *p) { ccl::reduce_scatter(C(p).in, C(p).out, C(p).count, C(p).t, ccl::reduction::sum, *C(p).comm).wait(); }
static void all_gather(void *p) { ccl::allgather(C(p).in, C(p).out, C(p).count, C(p).t, *C(p).comm).wait(); }
static void broadcast(void *p) { ccl::broadcast(C(p).in, C(p).count, C(p).t, 0, *C(p).comm).wait(); }
static void all_to_all(void *p) { ccl::alltoall(C(p).in, C(p).out, C(p).count, C(p).t, *C(p).comm).wait(); }
static void dirty1(void *p) { sync_dirty(C(p).in, C(p).bytes); }
static void dirtyn(void *p) { sync_dirty(C(p).in, C(p).bytes * size_); }
static void dirty_root(void *p) { if (rank_ == 0) dirty1(p); }
static void read_in(void *p) { sync_read(C(p).in, C(p).bytes); }
static void read_one(void *p) { sync_read(C(p).out, C(p).bytes); }
static void read_all(void *p) { sync_read(C(p).out, C(p).bytes * size_); }

static int check(const char *op, bench_fn call, Ctx &c) {
  for (size_t i = 0; i < c.count * size_; i++) sync_put(c.in, i, 1 + rank_);
  call(&c);
  int right = 1;
  double sum = size_ * (size_ + 1) / 2;
  for (size_t i = 0; i < c.count; i++) {
    if (call == all_reduce) right &= sync_expect(op, c.in, i, sum);
    if (call == reduce_scatter) right &= sync_expect(op, c.out, i, sum);
    if (call == broadcast) right &= sync_expect(op, c.in, i, 1);
    for (int r = 0; r < size_; r++)
      if (call == all_gather || call == all_to_all) right &= sync_expect(op, c.out, r * c.count + i, 1 + r);
    if (!right) return 0; // the first says enough
  }
  return right;
}

static void one(const char *op, Ctx &c, bench_fn prep, bench_fn call, bench_fn read) {
  for (int i = 0; sync_wants(op) && sync_size(i); i++) {
    c.bytes = sync_size(i), c.count = c.bytes / sync_element();
    int right = check(op, call, c);
    sync_bench(op, sync_dtype(), c.bytes, right, prep, call, read, &c);
  }
}

int main(int argc, char **argv) {
  ccl::init();
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &size_);
  ccl::kvs::address_type addr;
  ccl::shared_ptr_class<ccl::kvs> kvs;
  if (rank_ == 0) kvs = ccl::create_main_kvs(), addr = kvs->get_address();
  MPI_Bcast(addr.data(), addr.size(), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank_) kvs = ccl::create_kvs(addr);
  auto comm = ccl::create_communicator(size_, rank_, kvs);
  sync_init(rank_, size_);
  const std::map<std::string, ccl::datatype> types = {
    { "f32", ccl::datatype::float32 }, { "f64", ccl::datatype::float64 }, { "bf16", ccl::datatype::bfloat16 },
    { "f16", ccl::datatype::float16 }, { "i32", ccl::datatype::int32 }, { "i64", ccl::datatype::int64 },
    { "u32", ccl::datatype::uint32 }, { "u8", ccl::datatype::uint8 },
  };
  size_t big = (sync_largest() * size_ + 4095) & ~(size_t)4095;
  Ctx c = { &comm, aligned_alloc(4096, big), aligned_alloc(4096, big), 0, 0, types.at(sync_dtype()) };
  if (!c.in || !c.out) { perror("memory"); MPI_Abort(MPI_COMM_WORLD, 1); }

  if (sync_wants("barrier")) sync_bench_barrier(barrier, &c);
  one("all_reduce", c, dirty1, all_reduce, read_in);
  one("reduce_scatter", c, dirtyn, reduce_scatter, read_one);
  one("all_gather", c, dirty1, all_gather, read_all);
  one("broadcast", c, dirty_root, broadcast, read_in);
  one("all_to_all", c, dirtyn, all_to_all, read_all);
  MPI_Barrier(MPI_COMM_WORLD);
  _Exit(0); // the teardown of the two libraries is not what is measured
}
