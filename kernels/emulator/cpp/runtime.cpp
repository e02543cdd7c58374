// See runtime.h. -fno-tree-loop-distribute-patterns keeps copies out of memcpy, which sanitizers intercept.
#include "runtime.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#include <cstdarg>
#include <csignal>
#include <map>
#include <string>
#include <vector>
#include <unistd.h>
#include <sys/mman.h>
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMU_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#endif
#if !defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT
#endif
#ifdef EMU_UCONTEXT
#include <ucontext.h>
#else
extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
#endif

namespace emu {
Config config;
uint3 g_threadIdx, g_blockIdx;
dim3 g_blockDim, g_gridDim;

static constexpr size_t STACK = 256 << 10;
static constexpr int MAXT = 1024;
enum State : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };
struct Fiber {
#ifdef EMU_UCONTEXT
  ucontext_t uc;
#else
  void* sp;
#endif
  char* stack = nullptr;
  void *fake = nullptr, *tsan = nullptr;
  uint3 tid;
  State st;
  const char *what, *file;
  int line;
  CpOp q[256];
  int grp[256];
  int nq = 0, cur_grp;  // grp[i]: group number of q[i] (plain arrays: nothing here may call the intercepted
                        // malloc or memmove)
};
struct Rdv {
  Kind kind;
  uint32_t mask, arrived, left;
  bool used, complete;
  const char* file;
  int line;
  uint64_t v[32][MAXW];
};
struct Warp {
  Rdv r[40];
  uint32_t exist, done;
};
static Fiber fib[MAXT];
static Warp warps[MAXT / 32];
static int nthreads, cur, ndone, nbar;
static uint64_t ready[MAXT / 64];
static const char* bar_file;
static int bar_line;
static int bar_gen;
static char bar_token[2], launch_token, warp_token[MAXT / 32];
static Fiber mainf;
static const void* main_bottom;
static size_t main_size;
static void (*kfn)(void*);
static void* kctx;
static const char* kname = "(none)";
static uint64_t rng;
static uint64_t rnd() {
  rng ^= rng << 13;
  rng ^= rng >> 7;
  rng ^= rng << 17;
  return rng;
}

struct Seg {
  unsigned char* p;
  size_t n;
  int key;
};
static std::vector<Seg> segs;
struct DevBuf {
  std::string name;
  unsigned char* p;
  size_t n;
  unsigned char* base;
  size_t total;
};
static std::map<const void*, DevBuf> bufs;

void fail(const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  fprintf(stderr, "CUDA emulator ERROR in %s, block (%u,%u,%u) thread (%u,%u,%u): ", kname, g_blockIdx.x,
          g_blockIdx.y, g_blockIdx.z, g_threadIdx.x, g_threadIdx.y, g_threadIdx.z);
  vfprintf(stderr, fmt, ap);
  fputc('\n', stderr);
  va_end(ap);
  fflush(stdout);
  fflush(stderr);
  _exit(3);
}
static void on_segv(int sig, siginfo_t* si, void*) {
  const char* a = (const char*)si->si_addr;
  for (auto& b : bufs)
    if (a >= (char*)b.second.base && a < (char*)b.second.base + b.second.total)
      fail("invalid global access at byte %td of buffer '%s' (%zu bytes)", a - (char*)b.second.p,
           b.second.name.c_str(), b.second.n);
  fail("signal %d at address %p", sig, a);
}
static void install_segv() {
#if !defined(EMU_ASAN) && !defined(EMU_TSAN)
  static bool done = false;
  if (done) return;
  done = true;
  static char alt[65536];
  stack_t ss{};
  ss.ss_sp = alt;
  ss.ss_size = sizeof alt;
  sigaltstack(&ss, nullptr);
  struct sigaction sa{};
  sa.sa_sigaction = on_segv;
  sa.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &sa, nullptr);
  sigaction(SIGBUS, &sa, nullptr);
#endif
}
static size_t guard() {
#ifdef EMU_TSAN
  return 16u << 20;
#else
  return 1u << 30;
#endif
}
void* dev_alloc(const char* name, size_t bytes) {
  install_segv();
  size_t body = (bytes + 15) / 16 * 16, pages = (body + 4095) / 4096 * 4096, total = pages + 2 * guard();
  unsigned char* base =
      (unsigned char*)mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) fail("mmap");
  mprotect(base + guard(), pages, PROT_READ | PROT_WRITE);
  unsigned char* p = base + guard() + pages - body;
  if (bytes < (256u << 20))
    for (size_t i = 0; i < bytes; i++)
      ((volatile unsigned char*)p)[i] = 0xFF;  // huge buffers stay sparse (zero)
#ifdef EMU_ASAN
  __asan_poison_memory_region(base + guard(), p - (base + guard()));
  if (body > bytes) __asan_poison_memory_region(p + bytes, body - bytes);
#endif
  bufs[p] = DevBuf{name, p, bytes, base, total};
  return p;
}
void dev_free(void* p) {
  auto it = bufs.find(p);
  if (it == bufs.end()) fail("dev_free of unknown pointer");
#ifdef EMU_ASAN
  __asan_unpoison_memory_region(it->second.base + guard(), it->second.total - 2 * guard());
#endif
  munmap(it->second.base, it->second.total);
  bufs.erase(it);
}
// shared memory: one allocation per variable per block, freed at the end of the block
#ifdef EMU_TSAN
static unsigned char* arena;
static size_t arena_used;
static constexpr size_t ARENA = 256 << 10;
#endif
static unsigned char* seg_new(size_t n, int key) {
  Seg s{nullptr, n, key};
#ifdef EMU_TSAN
  // mapped by the host thread before the fibers start (the interceptor counts mmap as a write), carved up
  // here
  if (key == -1) {
    arena_used = 0;
    arena = (unsigned char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  s.p = arena + arena_used;
  arena_used += (n + 255) / 128 * 128;
#else
  if (posix_memalign((void**)&s.p, 128, n ? n : 1)) fail("shared alloc");
#endif
  for (size_t i = 0; i < n; i++) ((volatile unsigned char*)s.p)[i] = 0xFF;
  segs.push_back(s);
  return s.p;
}
static void seg_free_all() {
  for (auto& s : segs) {
#ifdef EMU_TSAN
    if (s.key == -1) munmap(arena, ARENA);
#else
    free(s.p);
#endif
  }
  segs.clear();
}
unsigned char* dyn_shared() {
  return segs[0].p;
}
void* static_shared(size_t n, int key) {
  for (auto& s : segs)
    if (s.key == key) return s.p;
  size_t tot = n;
  for (auto& s : segs) tot += s.n;
  if (tot > 227 * 1024) fail("%zu bytes of shared memory", tot);
  return seg_new(n, key);
}
bool is_shared(const void* p, size_t n) {
  for (auto& s : segs)
    if ((const unsigned char*)p >= s.p && (const unsigned char*)p + n <= s.p + s.n) return true;
  return false;
}

static void set_cur(int i) {
  cur = i;
  g_threadIdx = fib[i].tid;
}
static void sw(Fiber* from, Fiber* to, bool dying) {
#ifdef EMU_ASAN
  const void* bot = to == &mainf ? main_bottom : to->stack;
  size_t sz = to == &mainf ? main_size : STACK;
  __sanitizer_start_switch_fiber(dying ? nullptr : &from->fake, bot, sz);
#endif
#ifdef EMU_TSAN
  __tsan_switch_to_fiber(to->tsan, 1);
#endif
  (void)dying;
#ifdef EMU_UCONTEXT
  swapcontext(&from->uc, &to->uc);
#else
  emu_switch(&from->sp, to->sp);
#endif
#ifdef EMU_ASAN
  const void* ob;
  size_t os;
  __sanitizer_finish_switch_fiber(from->fake, &ob, &os);
#endif
}
static int find_from(int start) {  // first ready thread at or after start, cyclic
  int w = start / 64;
  uint64_t m = ready[w] & (~0ull << (start % 64));
  for (int k = 0; k <= MAXT / 64; k++) {
    if (m) return w * 64 + __builtin_ctzll(m);
    w = (w + 1) % (MAXT / 64);
    m = ready[w];
  }
  return -1;
}
static int pick() {
  switch (config.order) {
    case HIGHEST:
      for (int w = MAXT / 64 - 1; w >= 0; w--)
        if (ready[w]) return w * 64 + 63 - __builtin_clzll(ready[w]);
      return -1;
    case RANDOM:
      return find_from(rnd() % MAXT % nthreads);
    case RANDOM_WARP: {  // stay in the warp while it can run
      uint32_t m = (uint32_t)(ready[cur / 64] >> (cur / 32 % 2 * 32));
      if (m) {
        int r = rnd() % 32;
        uint32_t hi = m & (~0u << r);
        return cur / 32 * 32 + __builtin_ctz(hi ? hi : m);
      }
      return find_from(rnd() % MAXT % nthreads);
    }
    default:
      return find_from(0);
  }
}
static void report_stuck() {
  fprintf(stderr, "CUDA emulator: deadlock in %s, block (%u,%u,%u):\n", kname, g_blockIdx.x, g_blockIdx.y,
          g_blockIdx.z);
  for (int i = 0; i < nthreads;) {
    int j = i;
    while (j + 1 < nthreads && fib[j + 1].st == fib[i].st && fib[j + 1].what == fib[i].what &&
           fib[j + 1].line == fib[i].line)
      j++;
    if (fib[i].st == DONE)
      fprintf(stderr, "  threads %d-%d: exited\n", i, j);
    else
      fprintf(stderr, "  threads %d-%d: wait in %s at %s:%d\n", i, j, fib[i].what, fib[i].file, fib[i].line);
    i = j + 1;
  }
  fail("deadlock");
}
static void block_here() {  // the current fiber is not ready any more (or done): run another
  int n = pick(), me = cur;
  if (n < 0) {
    if (ndone == nthreads) {
      sw(&fib[me], &mainf, true);
      abort();
    }
    report_stuck();
  }
  if (n == me) return;
  set_cur(n);
  sw(&fib[me], &fib[n], fib[me].st == DONE);
}
static void set_ready(int i) {
  fib[i].st = READY;
  ready[i / 64] |= 1ull << (i % 64);
}
static void set_wait(State s, const char* what, const char* file, int line) {
  Fiber& f = fib[cur];
  f.st = s;
  f.what = what;
  f.file = file;
  f.line = line;
  ready[cur / 64] &= ~(1ull << (cur % 64));
}
static void do_copy(const CpOp& op) {
  for (int i = 0; i < op.bytes; i++) ((char*)op.dst)[i] = i < op.valid ? ((const char*)op.src)[i] : 0;
}
static void fiber_main() {
#ifdef EMU_ASAN
  const void* ob;
  size_t os;
  __sanitizer_finish_switch_fiber(nullptr, &ob, &os);
  if (!main_bottom) {
    main_bottom = ob;
    main_size = os;
  }
#endif
  kfn(kctx);
  Fiber& f = fib[cur];
  for (int i = 0; i < f.nq; i++) do_copy(f.q[i]);
  f.nq = 0;
#ifdef EMU_TSAN
  __tsan_release(&launch_token);
#endif
  Warp& w = warps[cur / 32];
  int lane = cur % 32;
  w.done |= 1u << lane;
  for (auto& r : w.r)
    if (r.used && !r.complete && (r.mask >> lane & 1))
      fail("lane %d exits while lanes %08x wait for it in a warp collective at %s:%d (mask %08x)", lane,
           r.arrived, r.file, r.line, r.mask);
  if (nbar)
    fail("thread exits while %d threads wait at the barrier %s:%d", nbar, bar_file, bar_line);
  set_wait(DONE, "exit", "", 0);
  ndone++;
  block_here();
  abort();
}
static void fiber_init(int i) {
  Fiber& f = fib[i];
#ifdef EMU_TSAN
  f.stack =
      (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  f.tsan = __tsan_create_fiber(0);
#else
  if (!f.stack)
    f.stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                          -1, 0);
#endif
  f.fake = nullptr;
  f.cur_grp = 0;
  f.nq = 0;
#ifdef EMU_UCONTEXT
  getcontext(&f.uc);
  f.uc.uc_stack.ss_sp = f.stack;
  f.uc.uc_stack.ss_size = STACK;
  f.uc.uc_link = nullptr;
  makecontext(&f.uc, fiber_main, 0);
#else
  void** top = (void**)(f.stack + STACK);
  *--top = nullptr;
  *--top = (void*)fiber_main;
  for (int k = 0; k < 6; k++) *--top = nullptr;
  f.sp = top;
#endif
}
void launch_raw(const char* name, dim3 grid, dim3 block, size_t dyn, void (*fn)(void*), void* ctx) {
  install_segv();
  kname = name;
  kfn = fn;
  kctx = ctx;
  g_gridDim = grid;
  g_blockDim = block;
  nthreads = block.x * block.y * block.z;
  rng = config.seed * 0x9E3779B97F4A7C15ull | 1;
  if (nthreads < 1 || nthreads > MAXT) fail("%d threads a block", nthreads);
  if (dyn > 227 * 1024) fail("%zu bytes of dynamic shared memory", dyn);
  if (grid.y > 65535 || grid.z > 65535) fail("grid too large");
#ifdef EMU_TSAN
  mainf.tsan = __tsan_get_current_fiber();
#endif
  size_t nb = (size_t)grid.x * grid.y * grid.z;
  std::vector<uint32_t> ord(nb);
  for (size_t i = 0; i < nb; i++) ord[i] = config.block_order == 1 ? nb - 1 - i : i;
  if (config.block_order == 2)
    for (size_t i = nb; i > 1; i--) std::swap(ord[i - 1], ord[rnd() % i]);
  for (size_t bi = 0; bi < nb; bi++) {
    uint32_t b = ord[bi];
    g_blockIdx = make_uint3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
    seg_new(dyn, -1);
    ndone = nbar = 0;
    bar_gen = 0;
    for (int w = 0; w < (nthreads + 31) / 32; w++) {
      for (auto& r : warps[w].r) r.used = false;
      int n = std::min(32, nthreads - w * 32);
      warps[w].exist = n == 32 ? ~0u : (1u << n) - 1;
      warps[w].done = 0;
    }
    for (int i = 0; i < nthreads; i++) {
      fib[i].tid = make_uint3(i % block.x, i / block.x % block.y, i / block.x / block.y);
      fiber_init(i);
      set_ready(i);
    }
    cur = 0;
    int n = pick();
    set_cur(n);
    sw(&mainf, &fib[n], false);
    seg_free_all();
#ifdef EMU_TSAN
    for (int i = 0; i < nthreads; i++) {
      __tsan_destroy_fiber(fib[i].tsan);
      munmap(fib[i].stack, STACK);
      fib[i].stack = nullptr;
    }
#endif
  }
#ifdef EMU_TSAN
  __tsan_acquire(&launch_token);
#endif
  kname = "(host)";
}
void block_barrier(const char* what, const char* file, int line) {
  if (nbar && (bar_file != file || bar_line != line))
    fail("%s at %s:%d while %d threads wait at %s:%d (divergent barriers)", what, file, line, nbar, bar_file,
         bar_line);
  if (ndone)
    fail("%s at %s:%d after %d threads of the block have exited", what, file, line, ndone);
  bar_file = file;
  bar_line = line;
  nbar++;
#ifdef EMU_TSAN
  char* tok = &bar_token[bar_gen & 1];
  __tsan_release(tok);
#endif
  if (nbar == nthreads - ndone) {
    nbar = 0;
    bar_gen++;
    for (int i = 0; i < nthreads; i++)
      if (fib[i].st == AT_BARRIER) set_ready(i);
    if (config.order != LOWEST) {
      block_here();
    }
  } else {
    set_wait(AT_BARRIER, what, file, line);
    block_here();
  }
#ifdef EMU_TSAN
  __tsan_acquire(tok);
#endif
}
int lane_id() {
  return cur % 32;
}
static const char* kind_name(Kind k) {
  static const char* n[] = {"__syncwarp", "__shfl_xor_sync", "ldmatrix", "ldmatrix.trans", "mma.sync"};
  return n[k];
}
Rdv* rdv_enter(Kind k, uint32_t mask, const uint64_t* pl, int words, const char* file, int line) {
  Warp& w = warps[cur / 32];
  int lane = cur % 32;
  if (!(mask >> lane & 1))
    fail("%s at %s:%d: lane %d is not in its mask %08x", kind_name(k), file, line, lane, mask);
  if (mask & ~w.exist && mask != ~0u)
    fail("%s at %s:%d: mask %08x names lanes that do not exist", kind_name(k), file, line, mask);
  mask &= w.exist;
  if (mask & w.done)
    fail("%s at %s:%d: mask %08x names lanes %08x that have exited", kind_name(k), file, line, mask,
         mask & w.done);
  Rdv *r = nullptr, *fr = nullptr;
  for (auto& x : w.r) {
    if (!x.used) {
      if (!fr) fr = &x;
      continue;
    }
    if (x.complete || !(x.mask & mask)) continue;
    if (x.mask != mask || x.kind != k || x.line != line || x.file != file)
      fail("divergent warp collectives: lane %d is at %s %s:%d mask %08x, lanes %08x at %s %s:%d mask %08x",
           lane, kind_name(k), file, line, mask, x.arrived, kind_name(x.kind), x.file, x.line, x.mask);
    r = &x;
    break;
  }
  if (!r) {
    if (!fr) fail("too many open warp collectives");
    r = fr;
    r->used = true;
    r->complete = false;
    r->kind = k;
    r->mask = mask;
    r->arrived = r->left = 0;
    r->file = file;
    r->line = line;
  }
  for (int i = 0; i < words; i++) r->v[lane][i] = pl[i];
  r->arrived |= 1u << lane;
  if (r->arrived == mask) {
    r->complete = true;
    for (uint32_t m = mask & ~(1u << lane); m; m &= m - 1) set_ready(cur / 32 * 32 + __builtin_ctz(m));
    if (config.order != LOWEST) block_here();
  } else {
    set_wait(AT_WARP, kind_name(k), file, line);
    block_here();
  }
  return r;
}
const uint64_t* rdv_peek(Rdv* r, int lane) {
  return lane >= 0 && lane < 32 && (r->mask >> lane & 1) ? r->v[lane] : nullptr;
}
void rdv_leave(Rdv* r) {
  r->left |= 1u << (cur % 32);
  if (r->left == r->mask) r->used = false;
}
// Unlike a shuffle, orders the memory accesses of the lanes.
void warp_barrier(uint32_t mask, const char* file, int line) {
#ifdef EMU_TSAN
  __tsan_release(&warp_token[cur / 32]);
#endif
  rdv_leave(rdv_enter(K_SYNCWARP, mask, nullptr, 0, file, line));
#ifdef EMU_TSAN
  __tsan_acquire(&warp_token[cur / 32]);
#endif
}

bool cp_push(const CpOp& op) {
  if (config.cp_async == 1 || (config.cp_async == 2 && rnd() % 2)) return true;
  Fiber& f = fib[cur];
  if (f.nq == 256) fail("more than 256 cp.async in flight");
  f.q[f.nq] = op;
  f.grp[f.nq++] = f.cur_grp;
  return false;
}
void cp_commit() {
  fib[cur].cur_grp++;
}
bool cp_take(int keep, CpOp* op) {  // groups numbered below cur_grp are committed; keep the last `keep`
  Fiber& f = fib[cur];
  if (!f.nq || f.grp[0] >= f.cur_grp - keep) return false;  // oldest first
  *op = f.q[0];
  f.nq--;
  for (int i = 0; i < f.nq; i++) f.q[i] = f.q[i + 1], f.grp[i] = f.grp[i + 1];
  return true;
}
}  // namespace emu
