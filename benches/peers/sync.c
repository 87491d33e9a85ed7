#define _GNU_SOURCE
#include "sync.h"
#include <fcntl.h>
#include <linux/futex.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAXR = 64, MAXN = 1024, NEAR_NS = 170, SMALL = 16 << 10 };
struct region {
  _Alignas(128) _Atomic uint32_t arrived;
  _Alignas(128) _Atomic uint32_t gen;
  _Alignas(128) _Atomic int plan;
  struct { _Alignas(128) _Atomic uint64_t v; } flag[2];
  _Atomic int turn[MAXR], right[MAXR];
  double start[MAXR][MAXN], end[2][MAXR][MAXN], rtt[MAXN];
};
static struct region *R;
static int rank_, size_, hosts_ = 1, yield_, sleep_;
static double cap_ns;
static void (*serve_)(void);

static const char *env(const char *k, const char *d) { const char *v = getenv(k); return v && *v ? v : d; }

double sync_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
#ifdef __x86_64__
  __builtin_ia32_lfence(); // nothing of the call starts before the clock is read
#endif
  return t.tv_sec * 1e9 + t.tv_nsec;
}

// How many hosts there are; ends the program unless it runs in the network of its rank's.
static int find_hosts(int rank, int size) {
  char list[16384], *own = NULL, *save = NULL;
  struct stat mine, hosts;
  int count = 0;
  snprintf(list, sizeof list, "%s", env("PEERS_SPACES", ""));
  for (char *c = list; *c; c++) count += *c != ' ' && (c[1] == ' ' || !c[1]);
  if (!count) return 1;
  for (int h = 0; h <= rank / (size / count); h++) own = strtok_r(h ? NULL : list, " ", &save);
  if (!own || stat(own, &hosts) || stat("/proc/self/ns/net", &mine)) { perror("network namespace"); exit(1); }
  if (hosts.st_ino == mine.st_ino && hosts.st_dev == mine.st_dev) return count;
  fprintf(stderr, "rank %d of %d does not run on its host\n", rank, size);
  exit(1);
}

void sync_init(int rank, int size) {
  if (size > MAXR) { fprintf(stderr, "more than %d ranks\n", MAXR); exit(1); }
  hosts_ = find_hosts(rank, size);
  int fd = open(env("PEERS_REGION", ""), O_RDWR);
  if (fd < 0 || ftruncate(fd, sizeof *R)) { perror("PEERS_REGION"); exit(1); }
  R = mmap(NULL, sizeof *R, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (R == MAP_FAILED) { perror("mmap"); exit(1); }
  rank_ = rank, size_ = size;
  sleep_ = *env("PEERS_SLEEP", "") != 0; // for a peer with threads of its own, that must not find its core held by us
  int cores = sysconf(_SC_NPROCESSORS_ONLN);
  yield_ = size > cores;
  if ((yield_ || hosts_ > 1) && !sleep_) { // around the cores, as `symmem bench` binds its own: some kernels leave several ranks on one core
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(rank % cores, &one);
    sched_setaffinity(0, sizeof one, &one);
  }
  cap_ns = atof(env("PEERS_TIME_MS", "200")) * 1e6;
  sync_barrier();
}

void sync_barrier(void) {
  uint32_t g = atomic_load_explicit(&R->gen, memory_order_acquire);
  if (atomic_fetch_add(&R->arrived, 1) + 1 == (uint32_t)size_) {
    atomic_store(&R->arrived, 0);
    atomic_store(&R->gen, g + 1);
    if (sleep_) syscall(SYS_futex, &R->gen, FUTEX_WAKE, MAXR, NULL, NULL, 0);
    return;
  }
  while (atomic_load_explicit(&R->gen, memory_order_acquire) == g)
    if (sleep_) syscall(SYS_futex, &R->gen, FUTEX_WAIT, g, NULL, NULL, 0);
    else {
      if (serve_) serve_();
      if (yield_) sched_yield();
    }
}

void sync_meet(int i) {
  enum { TRIPS = 8 };
  static uint64_t seq;
  sync_barrier();
  R->rtt[i] = NAN;
  if (size_ != 2 || hosts_ > 1 || sleep_ || yield_) return;
  double t = sync_now();
  for (uint64_t end = seq + TRIPS; seq < end;) {
    seq++;
    if (rank_ == 0) atomic_store_explicit(&R->flag[0].v, seq, memory_order_release);
    while (atomic_load_explicit(&R->flag[!rank_].v, memory_order_acquire) < seq) {}
    if (rank_ == 1) atomic_store_explicit(&R->flag[1].v, seq, memory_order_release);
  }
  if (rank_ == 0) R->rtt[i] = (sync_now() - t) / TRIPS;
}

void sync_record(int i, double start, double end, double end_of_read) {
  R->start[rank_][i] = start, R->end[0][rank_][i] = end, R->end[1][rank_][i] = end_of_read;
}
int sync_batch(size_t bytes) { return bytes <= 64 ? 20 : 1; }
int sync_reads(size_t bytes) { return hosts_ == 1 && bytes >= SMALL; }
int sync_second(void) { return hosts_ > 1 ? size_ / hosts_ : 0; }
int sync_fits(const char *op, size_t bytes) {
  if (!strcmp(op, "put_signal")) return bytes <= SMALL && bytes % 8 == 0;
  return strcmp(op, "put") || (bytes >= SMALL && bytes % 8 == 0);
}
void sync_serve(void (*serve)(void)) { serve_ = serve; }
static int one_way(const char *op) { return hosts_ > 1 && (!strcmp(op, "put") || !strcmp(op, "broadcast")); }

int sync_wants(const char *op) {
  char list[512], name[64];
  snprintf(list, sizeof list, " %s ", env("PEERS_OPS", "barrier all_reduce reduce_scatter all_gather broadcast all_to_all reduce gather scatter"));
  snprintf(name, sizeof name, " %s ", op);
  return strstr(list, name) != NULL;
}
size_t sync_size(int i) {
  const char *p = env("PEERS_BYTES", "8,1024,16384,131072,1048576,16777216");
  while (i-- > 0 && p) p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL;
  return p ? strtoull(p, NULL, 10) : 0;
}
size_t sync_largest(void) {
  size_t most = 64;
  for (int i = 0; sync_size(i); i++) if (sync_size(i) > most) most = sync_size(i);
  return most;
}

const char *sync_dtype(void) { return env("PEERS_DTYPE", "f32"); }
static int is(const char *name) { return !strcmp(sync_dtype(), name); }
size_t sync_element(void) {
  if (is("f64") || is("i64")) return 8;
  if (is("f32") || is("i32") || is("u32")) return 4;
  return is("bf16") || is("f16") ? 2 : is("u8");
}
void sync_put(void *p, size_t i, double v) {
  float f = v;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (is("f32")) ((float *)p)[i] = f;
  else if (is("f64")) ((double *)p)[i] = v;
  else if (is("i64")) ((int64_t *)p)[i] = v;
  else if (is("i32") || is("u32")) ((int32_t *)p)[i] = v;
  else if (is("bf16")) ((uint16_t *)p)[i] = bits >> 16;
  else if (is("f16")) ((_Float16 *)p)[i] = f;
  else ((uint8_t *)p)[i] = v;
}
double sync_get(const void *p, size_t i) {
  if (is("f32")) return ((float *)p)[i];
  if (is("f64")) return ((double *)p)[i];
  if (is("i64")) return ((int64_t *)p)[i];
  if (is("i32") || is("u32")) return ((int32_t *)p)[i];
  if (is("f16")) return ((_Float16 *)p)[i];
  if (is("u8")) return ((uint8_t *)p)[i];
  uint32_t bits = (uint32_t)((uint16_t *)p)[i] << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static int agree(double v) { // rank 0's number, for all
  if (rank_ == 0) atomic_store(&R->plan, (int)v);
  sync_barrier();
  int r = atomic_load(&R->plan);
  sync_barrier();
  return r;
}

int sync_warm(double call_ns, size_t bytes) {
  double n = bytes <= 16384 ? 200 : bytes <= 16 << 20 ? 40 : 2;
  return agree(fmin(n, cap_ns / 2 / call_ns));
}

int sync_plan(double call_ns, size_t bytes) {
  double n = bytes <= 64 ? 300 : bytes <= 16384 ? 500 : bytes <= 1 << 20 ? 250 : bytes <= 16 << 20 ? 50 : 20;
  return agree(fmax(hosts_ > 1 ? 3 : 7, fmin(n, cap_ns / call_ns / sync_batch(bytes))));
}

void sync_settle(void) { // a core that slept is often placed anew
  for (int i = 0; i < 60; i++) {
    sync_meet(0);
    if (!agree(R->rtt[0] < NEAR_NS)) return;
    usleep(3000);
  }
}

static int cmp(const void *a, const void *b) { double x = *(double *)a, y = *(double *)b; return (x > y) - (x < y); }

int sync_expect(const char *op, const void *p, size_t i, double v) {
  double is = sync_get(p, i);
  if (is != v) fprintf(stderr, "wrong result of %s: %g at %zu instead of %g\n", op, is, i, v);
  return is == v;
}

// A barrier keeps turns apart. Relaxed: it is the barrier that has to make them seen.
void sync_arrive(int turn) {
  if (rank_ == turn % size_) usleep(100); // the others have to wait for someone
  atomic_store_explicit(&R->turn[rank_], turn, memory_order_relaxed);
}
int sync_all_arrived(int turn) {
  int all = 1;
  for (int r = 0; r < size_; r++) all &= atomic_load_explicit(&R->turn[r], memory_order_relaxed) >= turn;
  return all;
}

static void emit(const char *op, const char *ending, const char *dtype, size_t bytes, int n, int which) {
  static double v[2][MAXN]; // far from each other, and near
  int m[2] = { 0, 0 };
  for (int i = 0; i < n; i++) {
    double a = 0, e = 0;
    for (int r = 0; r < size_; r++) a = fmax(a, R->start[r][i]), e = fmax(e, R->end[which][r][i]);
    if (one_way(op)) a = R->start[0][i];
    int k = R->rtt[i] < NEAR_NS;
    v[k][m[k]++] = (e - a) / sync_batch(bytes) / 1e3;
  }
  int right = 1;
  for (int r = 0; r < size_; r++) right &= atomic_load(&R->right[r]);
  int k = m[0] < 5 && m[1] > m[0]; // near all the time: there is nothing else to report
  qsort(v[k], m[k], sizeof(double), cmp);
  FILE *f = fopen(env("PEERS_OUT", "/dev/stdout"), "a");
  if (!f) { perror("PEERS_OUT"); exit(1); }
  fprintf(f, "{\"system\":\"%s\",\"collective\":\"%s%s\",\"ranks\":%d,\"bytes\":%zu,\"dtype\":\"%s\",\"backend\":\"-\",\"memory\":\"%s\",\"algorithm\":\"-\","
    "\"samples\":%d,\"median_us\":%.4f,\"p10_us\":%.4f,\"p90_us\":%.4f,\"verified\":%s,\"near\":%.2f,\"as_near\":%s,\"round\":%s}\n",
    env("PEERS_NAME", "?"), op, ending, size_, bytes, dtype, *dtype == '-' ? "-" : env("PEERS_MEMORY", "slices"), m[k], v[k][m[k] / 2], v[k][m[k] / 10], v[k][m[k] * 9 / 10],
    right ? "true" : "false", (double)m[1] / n, k ? "true" : "false", env("PEERS_ROUND", "1"));
  fclose(f);
}

void sync_emit(const char *op, const char *dtype, size_t bytes, int n, int read, int right) {
  atomic_store(&R->right[rank_], right);
  sync_barrier();
  if (rank_ == 0) {
    emit(op, "", dtype, bytes, n, 0);
    if (read) emit(op, "+read", dtype, bytes, n, 1);
  }
  sync_barrier();
}

void sync_dirty(void *p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) *(volatile float *)((char *)p + i) = 1.0f;
}

void sync_read(const void *p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) (void)*(const volatile float *)((const char *)p + i);
}

static void calls(int n, bench_fn prep, bench_fn call, void *ctx) {
  while (n-- > 0) {
    if (prep) prep(ctx);
    call(ctx);
  }
}

void sync_bench(const char *op, const char *dtype, size_t bytes, int right, bench_fn prep, bench_fn call, bench_fn read, void *ctx) {
  int reads = read && sync_reads(bytes);
  double t = sync_now();
  calls(3, prep, call, ctx);
  int warm = sync_warm((sync_now() - t) / 3, bytes) + 2;
  t = sync_now();
  calls(warm, prep, call, ctx);
  int n = sync_plan((sync_now() - t) / warm, bytes);
  sync_settle();
  for (int i = 0; i < n; i++) {
    if (prep) prep(ctx);
    sync_meet(i);
    double a = sync_now();
    for (int b = 0; b < sync_batch(bytes); b++) call(ctx);
    double e = sync_now(), er = e;
    if (reads) read(ctx), er = sync_now();
    sync_record(i, a, e, er);
    sync_barrier(); // no rank rewrites its input while another still reads it
  }
  sync_emit(op, dtype, bytes, n, reads, right);
}

void sync_bench_barrier(bench_fn call, void *ctx) {
  int right = 1;
  for (int turn = 1; turn <= 20; turn++) {
    sync_arrive(turn);
    call(ctx);
    right &= sync_all_arrived(turn);
  }
  sync_bench("barrier", "-", 0, right, NULL, call, NULL, ctx);
}
