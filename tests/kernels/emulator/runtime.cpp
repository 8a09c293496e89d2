// Runs a kernel on the CPU, one block after another, and checks every access to memory. The blocks
// of a cluster run together: they are the threads of one large block, each with its own window of
// shared memory and its own barriers.
//
// Each CUDA thread is a fiber. It runs until it waits (at a barrier, or for the lanes of its warp),
// in an order drawn from a seed. Device code is compiled with -fsanitize=thread, without that
// sanitizer's library: the calls that the compiler puts before each load and store come here, and
// shadow memory knows of each two bytes of shared memory who wrote and read them, and vector clocks
// say whether barriers put that before what happens now. So these are errors, whatever the order of
// execution and whatever the result:
//   - an access outside x, weight, y and the shared arrays, a write to x or weight, a read of y;
//   - a byte of y written twice, or not at all;
//   - two threads at one shared address without a barrier between, one of them writing;
//   - a read of shared memory that nothing wrote in this block;
//   - an access to bytes that a background copy is yet to bring;
//   - a vector access that is not aligned, an index beyond an array's bound (-fsanitize=alignment,
//     bounds);
//   - threads that wait for each other for ever;
//   - an access to another block's shared memory that is not made as one, or after threads of that
//     block have ended;
//   - of kernels that wait for the kernel ahead: before that, to let the next one in, and an access to
//     x, y or a weight, but for one that the kernel ahead does not write.
#include "runtime.hpp"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" {
extern const char __ehdr_start __attribute__((visibility("hidden")));  // the library's own image
extern const char _end __attribute__((visibility("hidden")));
}

namespace emulate {
namespace {

constexpr std::size_t STACK_BYTES = 128 * 1024;
constexpr std::size_t SHARED_LIMIT = 2048 * 1024;  // of all blocks of a cluster, with red zones
constexpr std::size_t RED_ZONE = 256;
constexpr unsigned MOST_BLOCKS_OF_CLUSTER = 8, BARRIERS = 16;
constexpr std::size_t GRANULE = 2;  // bytes that share a record: the smallest element's
constexpr int NOBODY = -1;

using Address = std::uintptr_t;

struct Range {
  Address begin, end;
  bool holds(Address address, std::size_t bytes) const {
    return begin <= address && address + bytes <= end;
  }
};

// Who touched something, and when by the thread's own clock, which every barrier advances.
struct Access {
  int thread;
  std::uint32_t clock;
};

// What happened to one granule of shared memory. Several reads that no barrier orders are kept in
// `concurrent_reads`; a read that comes after all others stands for them.
struct Record {
  Access write, read;
  Address write_site, read_site;
  int concurrent;  // index into concurrent_reads; NOBODY: only `read`
  bool allocated, written;
  std::uint16_t copies;  // on their way to it
};

struct Copy {
  std::uint32_t shared;
  const char* source;
  unsigned bytes, source_bytes;
  Address site;
};

enum class State { READY, AT_BARRIER, AT_WARP, DONE };

// A context starts the fiber; later switches are jumps, which make no system call.
struct Fiber {
  ucontext_t context;
  jmp_buf resumed;
  bool begun;
  std::unique_ptr<char[]> stack;
  State state;
  std::size_t shared_cursor;
  std::vector<Copy> uncommitted;
  std::deque<std::vector<Copy>> groups;
  bool arrived_at_cluster;
  unsigned cluster_phase;  // of its barrier, when the thread arrived
  Address first_operand, first_weight;  // where it accessed x or y, and the weight, before it waited; or 0
  bool has_waited, has_let_in;  // for the kernel ahead; the next one
};

struct Warp {
  const char* name;  // of the operation that its lanes wait for
  int arrived;
  void* operands[32];
};

struct Barrier {
  unsigned count, arrived;  // threads that it takes, and those that have come
  std::vector<int> waiting;
  std::vector<std::uint32_t> known;  // what the arrived know of all clocks
  unsigned phase;                    // how often all have come
  std::vector<std::uint32_t> before;  // what they knew the last time
};

struct Mbarrier {
  unsigned count, missing, phase;
  std::vector<std::uint32_t> arriving, known;  // clocks: of this phase so far, of the last one
  std::vector<int> waiting;
  long long bytes_missing;
  std::vector<Copy> copies;  // that land when the phase ends
};

struct Launch {
  const Kernel* kernel;
  const void* arguments;
  unsigned blocks;
  unsigned threads, block_threads;  // of a cluster, of a block
  unsigned block;                   // the cluster's first
  std::size_t dynamic_bytes;
  Range argument_range, x, weight, y;
  std::string error;
};

Launch launch;
jmp_buf scheduler;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::map<std::uint32_t, Mbarrier> mbarriers;  // by their offset in shared memory
std::vector<int> ready;
std::vector<Record> records;
std::vector<std::uint8_t> written_y;
bool updates_y = false;  // a kernel may read what it has not written, and leave it
bool weight_is_settled = false;  // the kernel ahead does not write it
alignas(1024) char shared[SHARED_LIMIT];
int current = NOBODY;
std::vector<std::vector<Access>> concurrent_reads;
std::vector<std::uint32_t> clocks;  // [t * threads + u]: what t knows of u's clock
Barrier barriers[MOST_BLOCKS_OF_CLUSTER * BARRIERS + 1];  // the last is the cluster's
std::size_t shared_end = SHARED_LIMIT;  // of what this block, or the last, may have touched
std::mt19937 random_order;
bool shuffled;

unsigned rank_of(int thread) { return static_cast<unsigned>(thread) / launch.block_threads; }

// Bytes of shared memory that lie between a block's and the next one's: a power of two.
std::size_t window() { return std::bit_floor(SHARED_LIMIT / (launch.threads / launch.block_threads)); }

// A place in the code, for cuda_emulator.py to replace by file and line.
std::string place(Address site) {
  char text[32];
  std::snprintf(text, sizeof text, "{+%#zx}", site - reinterpret_cast<Address>(&__ehdr_start) - 1);
  return text;
}

// Called on a fiber, which is then never resumed: back to where the scheduler left off.
[[noreturn]] void stop(const std::string& what) {
  launch.error = what + " (block " + std::to_string(launch.block + rank_of(current)) + ", thread " +
                 std::to_string(static_cast<unsigned>(current) % launch.block_threads) + ")";
  _longjmp(scheduler, 1);
}

void leave(State state) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  if (_setjmp(fiber.resumed) == 0) _longjmp(scheduler, 1);
}

// Runs a fiber until it leaves or stops.
__attribute__((noinline)) void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.resumed, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

void wake(int thread) {
  fibers[thread].state = State::READY;
  ready.push_back(thread);
}

void enter() {
  launch.kernel->run(launch.arguments);
  Fiber& fiber = fibers[current];
  for (const auto& group : fiber.groups) {
    if (!group.empty()) stop("the thread ended before a copy it began at " + place(group[0].site));
  }
  if (!fiber.uncommitted.empty()) {
    stop("the thread ended with a copy that it never committed, begun at " + place(fiber.uncommitted[0].site));
  }
  leave(State::DONE);
}

std::string accessed(bool write, Address address, std::size_t bytes, const char* where, Address begin, Address site) {
  return std::string(write ? "write" : "read") + " of " + std::to_string(bytes) + " bytes at byte " +
         std::to_string(static_cast<long long>(address - begin)) + " of " + where + " at " + place(site);
}

std::uint32_t* clocks_of(int thread) { return &clocks[thread * launch.threads]; }

// Whether the current thread did it, or barriers put it before what the current thread does now.
bool ordered(const Access& access) {
  return access.thread == NOBODY || access.thread == current ||
         clocks_of(current)[access.thread] >= access.clock;
}

// All of `threads` meet: each learns what any of them knew.
void meet(const std::vector<int>& threads) {
  static std::vector<std::uint32_t> known;
  known.assign(launch.threads, 0);
  for (const int t : threads) {
    for (unsigned u = 0; u < launch.threads; ++u) known[u] = std::max(known[u], clocks_of(t)[u]);
  }
  for (const int t : threads) {
    std::copy(known.begin(), known.end(), clocks_of(t));
    ++clocks_of(t)[t];
  }
}

std::string racing(const std::string& what, const char* before, int thread, Address site) {
  return "race: " + what + ", which thread " + std::to_string(thread) + " " + before + " at " + place(site) +
         " with no barrier between";
}

void check_shared(bool write, Address address, std::size_t bytes, Address site, bool remote) {
  const Address base = reinterpret_cast<Address>(shared);
  const auto what = [&] { return accessed(write, address, bytes, "shared memory", base, site); };
  const std::size_t first = (address - base) / GRANULE, last = (address - base + bytes - 1) / GRANULE;
  const Access now{current, clocks_of(current)[current]};
  if (!remote && (address - base) / window() != rank_of(current)) {
    stop("outside the block's shared memory: " + what());
  }
  for (std::size_t g = first; g <= last; ++g) {
    Record& r = records[g];
    if (!r.allocated) stop("outside the block's shared memory: " + what());
    if (r.copies) stop("a background copy to it is under way: " + what());
    if (!ordered(r.write)) stop(racing(what(), "wrote", r.write.thread, r.write_site));
    if (write) {
      if (!ordered(r.read)) stop(racing(what(), "had read", r.read.thread, r.read_site));
      if (r.concurrent != NOBODY) {
        for (const Access& read : concurrent_reads[r.concurrent]) {
          if (!ordered(read)) stop(racing(what(), "had read", read.thread, r.read_site));
        }
      }
      r.write = now, r.write_site = site, r.written = true;
      r.read = {NOBODY, 0}, r.concurrent = NOBODY;
      continue;
    }
    if (!r.written) stop("nothing wrote there before: " + what());
    if (!ordered(r.read) && r.concurrent == NOBODY) {
      r.concurrent = static_cast<int>(concurrent_reads.size());
      concurrent_reads.emplace_back();
    }
    if (r.concurrent != NOBODY) {
      std::vector<Access>& reads = concurrent_reads[r.concurrent];
      reads.push_back(r.read);
      std::erase_if(reads, ordered);
      if (reads.empty()) r.concurrent = NOBODY;
    }
    r.read = now, r.read_site = site;
  }
}

void check(bool write, const void* pointer, std::size_t bytes, Address site, bool remote = false) {
  if (current == NOBODY || bytes == 0) return;
  const Address address = reinterpret_cast<Address>(pointer);
  const Address stack = reinterpret_cast<Address>(fibers[current].stack.get());
  if (stack <= address && address + bytes <= stack + STACK_BYTES) return;
  const Address base = reinterpret_cast<Address>(shared);
  if (base <= address && address + bytes <= base + SHARED_LIMIT) {
    check_shared(write, address, bytes, site, remote);
    return;
  }
  Fiber& fiber = fibers[current];
  if (launch.x.holds(address, bytes) || launch.weight.holds(address, bytes)) {
    const bool is_x = launch.x.holds(address, bytes);
    Address& first = is_x ? fiber.first_operand : fiber.first_weight;
    if (first == 0) first = site;
    if (write) {
      stop("only read there: " +
           accessed(true, address, bytes, is_x ? "x" : "weight", (is_x ? launch.x : launch.weight).begin, site));
    }
    return;
  }
  if (launch.y.holds(address, bytes)) {
    if (fiber.first_operand == 0) fiber.first_operand = site;
    if (!write && !updates_y) stop("only write there: " + accessed(false, address, bytes, "y", launch.y.begin, site));
    for (std::size_t i = address - launch.y.begin, end = i + bytes; i < end; ++i) {
      if (!write) {
        if (written_y[i]) stop("written before: " + accessed(false, address, bytes, "y", launch.y.begin, site));
        continue;
      }
      if (written_y[i]) stop("written twice: " + accessed(true, address, bytes, "y", launch.y.begin, site));
      written_y[i] = 1;
    }
    return;
  }
  const Range image{reinterpret_cast<Address>(&__ehdr_start), reinterpret_cast<Address>(&_end)};
  if (!write && (launch.argument_range.holds(address, bytes) || image.holds(address, bytes))) return;
  // Say beside which tensor it lies: the nearest one.
  const char* name = "x";
  Address begin = launch.x.begin;
  const auto distance = [&](const Range& r) { return address < r.begin ? r.begin - address : address - r.end; };
  std::uintptr_t nearest = distance(launch.x);
  if (distance(launch.weight) < nearest) name = "weight", begin = launch.weight.begin, nearest = distance(launch.weight);
  if (distance(launch.y) < nearest) name = "y", begin = launch.y.begin;
  stop("outside x, weight and y: " + accessed(write, address, bytes, name, begin, site));
}

void land(const Copy& copy) {
  const Address site = copy.site;
  for (std::size_t g = copy.shared / GRANULE; g < (copy.shared + copy.bytes) / GRANULE; ++g) {
    --records[g].copies;
  }
  check(true, shared + copy.shared, copy.bytes, site);
  std::memset(shared + copy.shared, 0, copy.bytes);
  if (copy.source_bytes) {
    check(false, copy.source, copy.source_bytes, site);
    std::memcpy(shared + copy.shared, copy.source, copy.source_bytes);
  }
}

std::string who_waits() {
  std::string text = "threads wait for each other for ever:";
  const struct {
    State state;
    const char* words;
  } kinds[] = {{State::AT_BARRIER, " at a barrier of the block"}, {State::AT_WARP, " for the lanes of its warp"},
               {State::DONE, " has ended"}};
  for (const auto& kind : kinds) {
    for (unsigned t = 0; t < launch.threads; ++t) {
      if (fibers[t].state != kind.state) continue;
      text += " thread " + std::to_string(t) + (kind.state == State::DONE ? "" : " waits") + kind.words + ";";
      break;
    }
  }
  text.back() = '.';
  return text;
}

void run_block() {
  Record untouched{};
  untouched.write.thread = untouched.read.thread = untouched.concurrent = NOBODY;
  std::fill_n(records.begin(), shared_end / GRANULE, untouched);
  std::memset(shared, 0xff, shared_end);  // NaN in every element type
  for (std::size_t base = 0; base < launch.threads / launch.block_threads * window(); base += window()) {
    for (std::size_t g = 0; g < launch.dynamic_bytes / GRANULE; ++g) records[base / GRANULE + g].allocated = true;
    shared_end = base + launch.dynamic_bytes;
  }
  warps.assign((launch.threads + 31) / 32, Warp{});
  concurrent_reads.clear();
  clocks.assign(std::size_t(launch.threads) * launch.threads, 0);
  for (unsigned t = 0; t < launch.threads; ++t) clocks_of(t)[t] = 1;
  for (Barrier& barrier : barriers) barrier.arrived = 0, barrier.waiting.clear();
  mbarriers.clear();
  ready.clear();
  for (unsigned t = 0; t < launch.threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.shared_cursor = rank_of(static_cast<int>(t)) * window() +
                          (launch.dynamic_bytes + 2 * RED_ZONE - 1) / RED_ZONE * RED_ZONE;
    fiber.uncommitted.clear(), fiber.groups.clear();
    fiber.begun = fiber.arrived_at_cluster = fiber.has_waited = fiber.has_let_in = false;
    fiber.first_operand = fiber.first_weight = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    wake(static_cast<int>(t));
  }
  std::size_t done = 0;
  std::vector<int> turn;
  while (done < launch.threads) {
    if (ready.empty()) {
      launch.error = who_waits();
      return;
    }
    turn.swap(ready);
    ready.clear();
    if (shuffled) std::shuffle(turn.begin(), turn.end(), random_order);
    for (const int thread : turn) {
      current = thread;
      resume(fibers[thread]);
      current = NOBODY;
      if (!launch.error.empty()) return;
      if (fibers[thread].state == State::DONE) ++done;
    }
  }
  for (const Barrier& barrier : barriers) {
    if (barrier.arrived > 0) {
      launch.error = "threads arrived at barrier " + std::to_string((&barrier - barriers) % BARRIERS) + ", and nobody waited for them";
    }
  }
}

}  // namespace

Index3 thread_index() { return {static_cast<unsigned>(current) % launch.block_threads, 0, 0}; }
Index3 block_index() { return {launch.block + rank_of(current), 0, 0}; }
Index3 grid_size() { return {launch.blocks, 1, 1}; }
Index3 block_size() { return {launch.block_threads, 1, 1}; }

void* dynamic_shared() { return shared + rank_of(current) * window(); }

void* static_shared(std::size_t bytes, std::size_t alignment) {
  std::size_t& cursor = fibers[current].shared_cursor;
  cursor = (cursor + alignment - 1) / alignment * alignment;
  const std::size_t at = cursor;
  cursor = (cursor + bytes + 2 * RED_ZONE - 1) / RED_ZONE * RED_ZONE;
  if (cursor > (rank_of(current) + 1) * window()) stop("the block's shared arrays are larger than any GPU's");
  shared_end = std::max(shared_end, cursor);
  for (std::size_t g = at / GRANULE; g < (at + bytes) / GRANULE; ++g) records[g].allocated = true;
  return shared + at;
}

std::uint32_t shared_offset(const void* address) {
  const std::ptrdiff_t offset = static_cast<const char*>(address) - shared;
  if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(SHARED_LIMIT)) {
    stop("an address outside shared memory is used as one in it");
  }
  return static_cast<std::uint32_t>(offset);
}

void block_barrier() { named_barrier(0, launch.block_threads); }

namespace {

void learn(std::vector<std::uint32_t>& what, const std::uint32_t* from) {
  for (unsigned u = 0; u < launch.threads; ++u) what[u] = std::max(what[u], from[u]);
}

Barrier& barrier_of_block(unsigned name) {
  if (name >= BARRIERS) fail("barrier %u: a block has barriers 0 to 15", name);
  return barriers[rank_of(current) * BARRIERS + name];
}

// The current thread comes to a barrier. Returns whether it was the last, after waking all who wait.
bool come(Barrier& barrier, unsigned count) {
  if (barrier.arrived == 0) barrier.count = count, barrier.known.assign(launch.threads, 0);
  if (barrier.count != count) {
    fail("barrier %u is to take %u threads for one and %u for another",
         static_cast<unsigned>(&barrier - barriers) % BARRIERS, barrier.count, count);
  }
  learn(barrier.known, clocks_of(current));
  ++clocks_of(current)[current];
  if (++barrier.arrived < count) return false;
  for (const int t : barrier.waiting) {
    std::vector<std::uint32_t> known(clocks_of(t), clocks_of(t) + launch.threads);
    learn(known, barrier.known.data());
    std::copy(known.begin(), known.end(), clocks_of(t));
    wake(t);
  }
  barrier.arrived = 0, barrier.waiting.clear();
  ++barrier.phase, barrier.before = barrier.known;
  return true;
}

// The current thread comes to a barrier and waits for all.
void meet_at(Barrier& barrier, unsigned count) {
  if (!come(barrier, count)) {
    barrier.waiting.push_back(current);
    return leave(State::AT_BARRIER);
  }
  std::vector<std::uint32_t> known(clocks_of(current), clocks_of(current) + launch.threads);
  learn(known, barrier.known.data());
  std::copy(known.begin(), known.end(), clocks_of(current));
}

}  // namespace

void named_barrier(unsigned name, unsigned count) { meet_at(barrier_of_block(name), count); }

void arrive_at_named_barrier(unsigned name, unsigned count) { come(barrier_of_block(name), count); }

void arrive_at_cluster_barrier() {
  Fiber& fiber = fibers[current];
  if (fiber.arrived_at_cluster) fail("a thread arrives twice at the cluster's barrier");
  Barrier& barrier = barriers[MOST_BLOCKS_OF_CLUSTER * BARRIERS];
  fiber.arrived_at_cluster = true, fiber.cluster_phase = barrier.phase;
  come(barrier, launch.threads);
}

void wait_at_cluster_barrier() {
  Fiber& fiber = fibers[current];
  if (!fiber.arrived_at_cluster) fail("a thread waits at the cluster's barrier and has not arrived");
  fiber.arrived_at_cluster = false;
  Barrier& barrier = barriers[MOST_BLOCKS_OF_CLUSTER * BARRIERS];
  if (barrier.phase == fiber.cluster_phase) {
    barrier.waiting.push_back(current);
    return leave(State::AT_BARRIER);
  }
  std::vector<std::uint32_t> known(clocks_of(current), clocks_of(current) + launch.threads);
  learn(known, barrier.before.data());
  std::copy(known.begin(), known.end(), clocks_of(current));
}

std::uint32_t shared_offset_in(std::uint32_t offset, unsigned rank) {
  if (rank >= launch.threads / launch.block_threads) fail("the cluster has no block %u", rank);
  return static_cast<std::uint32_t>(offset % window() + rank * window());
}

namespace {

char* shared_of_cluster(bool write, std::uint32_t at, std::size_t bytes, const void* caller) {
  if (at % bytes != 0) {
    fail("a shared address is not a multiple of the size that is %s there", write ? "written" : "read");
  }
  const unsigned rank = static_cast<unsigned>(at / window());
  for (unsigned t = rank * launch.block_threads; t < (rank + 1) * launch.block_threads; ++t) {
    if (fibers[t].state == State::DONE) fail("threads of block %u have ended: its shared memory may be gone", rank);
  }
  check(write, shared + at, bytes, reinterpret_cast<Address>(caller), true);
  return shared + at;
}

}  // namespace

const void* read_shared_of_cluster(std::uint32_t from, std::size_t bytes, const void* caller) {
  return shared_of_cluster(false, from, bytes, caller);
}

void* write_shared_of_cluster(std::uint32_t to, std::size_t bytes, const void* caller) {
  return shared_of_cluster(true, to, bytes, caller);
}

std::uint32_t described_address(std::uint32_t low) {
  return static_cast<std::uint32_t>(low % window() + rank_of(current) * window());
}

namespace {

Mbarrier& mbarrier_at(std::uint32_t at) {
  const auto it = mbarriers.find(at);
  if (it == mbarriers.end()) fail("no phase barrier was set up at byte %u of shared memory", at);
  return it->second;
}

// Ends the phase if all have arrived and all bytes are on their way: then these land.
void end_phase_if_due(Mbarrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes_missing != 0) return;
  for (const Copy& copy : barrier.copies) {
    for (std::size_t g = copy.shared / GRANULE; g < (copy.shared + copy.bytes) / GRANULE; ++g) {
      --records[g].copies;
      records[g].write = {current, clocks_of(current)[current]}, records[g].write_site = copy.site;
    }
    std::memcpy(shared + copy.shared, copy.source, copy.bytes);
  }
  barrier.copies.clear();
  learn(barrier.arriving, clocks_of(current));
  ++clocks_of(current)[current];
  barrier.missing = barrier.count, ++barrier.phase;
  barrier.known = barrier.arriving;
  for (const int t : barrier.waiting) wake(t);
  barrier.waiting.clear();
}

}  // namespace

void set_up_mbarrier(std::uint32_t at, unsigned count) {
  const std::vector<std::uint32_t> nothing(launch.threads, 0);
  mbarriers[at] = {count, count, 0, nothing, nothing, {}, 0, {}};
}

void arrive_at_mbarrier(std::uint32_t at) {
  Mbarrier& barrier = mbarrier_at(at);
  learn(barrier.arriving, clocks_of(current));
  ++clocks_of(current)[current];
  if (barrier.missing == 0) fail("a thread arrives at a phase that only waits for bytes");
  --barrier.missing;
  end_phase_if_due(barrier);
}

void expect_bytes(std::uint32_t at, unsigned bytes) { mbarrier_at(at).bytes_missing += bytes; }

void copy_in_bulk(std::uint32_t to, const void* from, unsigned bytes, std::uint32_t at, const void* caller) {
  const Address site = reinterpret_cast<Address>(caller);
  if (to % 16 || bytes % 16 || reinterpret_cast<Address>(from) % 16) {
    stop("a bulk copy's addresses and size are not all multiples of 16");
  }
  check(true, shared + to, bytes, site);
  check(false, from, bytes, site);
  for (std::size_t g = to / GRANULE; g < (to + bytes) / GRANULE; ++g) ++records[g].copies;
  std::memset(shared + to, 0xff, bytes);
  Mbarrier& barrier = mbarrier_at(at);
  barrier.copies.push_back({to, static_cast<const char*>(from), bytes, bytes, site});
  barrier.bytes_missing -= bytes;
  end_phase_if_due(barrier);
}

void wait_for_phase(std::uint32_t at, unsigned parity) {
  Mbarrier& barrier = mbarrier_at(at);
  while (barrier.phase % 2 == parity) {
    barrier.waiting.push_back(current);
    leave(State::AT_BARRIER);
  }
  std::vector<std::uint32_t> known(clocks_of(current), clocks_of(current) + launch.threads);
  learn(known, barrier.known.data());
  std::copy(known.begin(), known.end(), clocks_of(current));
}

void warp_collective(const char* name, void* operands, void (*execute)(void* const (&lanes)[32])) {
  Warp& warp = warps[current / 32];
  if (warp.arrived == 0) warp.name = name;
  if (std::strcmp(warp.name, name) != 0) {
    stop("the lanes of a warp part: one is at " + std::string(warp.name) + ", another at " + name);
  }
  warp.operands[current % 32] = operands;
  if (++warp.arrived < 32) return leave(State::AT_WARP);
  warp.arrived = 0;
  execute(warp.operands);
  for (int t = current / 32 * 32; t < current / 32 * 32 + 32; ++t) {
    if (t != current) wake(t);
  }
}

void warp_barrier() {
  static const auto execute = [](void* const (&)[32]) {
    std::vector<int> lanes(32);
    for (int t = 0; t < 32; ++t) lanes[t] = current / 32 * 32 + t;
    meet(lanes);
  };
  warp_collective("__syncwarp", nullptr, execute);
}

void copy_async(std::uint32_t to, const void* from, unsigned bytes, unsigned source_bytes,
                const void* caller) {
  const Address site = reinterpret_cast<Address>(caller);
  if (to % bytes != 0) stop("a background copy's shared address is not a multiple of its size");
  if (source_bytes && reinterpret_cast<Address>(from) % bytes != 0) {
    stop("a background copy's global address is not a multiple of its size");
  }
  // From here until it is waited for, the copy may write at any time.
  check(true, shared + to, bytes, site);
  if (source_bytes) check(false, from, source_bytes, site);
  for (std::size_t g = to / GRANULE; g < (to + bytes) / GRANULE; ++g) ++records[g].copies;
  std::memset(shared + to, 0xff, bytes);
  fibers[current].uncommitted.push_back({to, static_cast<const char*>(from), bytes, source_bytes, site});
}

void wait_for_kernel_ahead() {
  Fiber& fiber = fibers[current];
  if (fiber.has_waited) return;
  fiber.has_waited = true;
  if (fiber.has_let_in) stop("the next kernel is let in before the wait for the kernel ahead");
  if (fiber.first_operand) stop("x or y is accessed before the wait for the kernel ahead, at " + place(fiber.first_operand));
  if (fiber.first_weight && !weight_is_settled) {
    stop("a weight that the kernel ahead may write is read before the wait for it, at " + place(fiber.first_weight));
  }
}

void let_next_kernel_in() { fibers[current].has_let_in = true; }

const void* read_shared(std::uint32_t from, std::size_t bytes, const void* caller) {
  if (from % bytes != 0) stop("a shared address is not a multiple of the size that is read there");
  check(false, shared + from, bytes, reinterpret_cast<Address>(caller));
  return shared + from;
}

void* write_shared(std::uint32_t to, std::size_t bytes, const void* caller) {
  if (to % bytes != 0) stop("a shared address is not a multiple of the size that is written there");
  check(true, shared + to, bytes, reinterpret_cast<Address>(caller));
  return shared + to;
}

void commit_copies() {
  Fiber& fiber = fibers[current];
  fiber.groups.push_back(std::move(fiber.uncommitted));
  fiber.uncommitted.clear();
}

void wait_for_copies(unsigned pending) {
  Fiber& fiber = fibers[current];
  while (fiber.groups.size() > pending) {
    for (const Copy& copy : fiber.groups.front()) land(copy);
    fiber.groups.pop_front();
  }
}

void fail(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  stop(text);
}

}  // namespace emulate

// A range is [begin, end) in bytes. Returns 0, or 1 with a sentence in `message`.
extern "C" __attribute__((visibility("default"))) void emulate_updates(int updates) { emulate::updates_y = updates != 0; }
extern "C" __attribute__((visibility("default"))) void emulate_settled(int settled) {
  emulate::weight_is_settled = settled != 0;
}

extern "C" __attribute__((visibility("default"))) int emulate_launch(
    int kernel, const void* arguments, std::size_t argument_bytes, unsigned blocks, unsigned threads,
    std::size_t shared_bytes, unsigned seed, const emulate::Range* x, const emulate::Range* weight,
    const emulate::Range* y, char* message, std::size_t message_bytes) {
  using namespace emulate;
  const Address at = reinterpret_cast<Address>(arguments);
  const unsigned cluster = emulated_kernels[kernel].cluster;
  if (cluster < 1 || cluster > MOST_BLOCKS_OF_CLUSTER || blocks % cluster != 0 || threads % 32 != 0) {
    std::snprintf(message, message_bytes,
                  "%u blocks of %u threads in clusters of %u: blocks come in whole clusters, of at most %u, "
                  "and threads in whole warps",
                  blocks, threads, cluster, MOST_BLOCKS_OF_CLUSTER);
    return 1;
  }
  const unsigned block_threads = threads;
  threads *= cluster;
  launch = {&emulated_kernels[kernel], arguments, blocks, threads, block_threads, 0, shared_bytes,
            {at, at + argument_bytes}, *x, *weight, *y, ""};
  while (fibers.size() < threads) {
    // As it is: what no fiber touches takes no memory.
    fibers.emplace_back().stack = std::make_unique_for_overwrite<char[]>(STACK_BYTES);
  }
  if (shared_bytes > window() - 2 * RED_ZONE) {
    std::snprintf(message, message_bytes, "%zu bytes of shared memory are more than any GPU has", shared_bytes);
    return 1;
  }
  records.resize(SHARED_LIMIT / GRANULE);
  written_y.assign(y->end - y->begin, 0);
  if (!updates_y) std::memset(reinterpret_cast<void*>(y->begin), 0xff, y->end - y->begin);
  random_order.seed(seed);
  shuffled = seed != 0;
  std::vector<unsigned> order(blocks / cluster);
  for (unsigned b = 0; b < order.size(); ++b) order[b] = b * cluster;
  if (shuffled) std::shuffle(order.begin(), order.end(), random_order);

  for (const unsigned block : order) {
    launch.block = block;
    run_block();
    if (!launch.error.empty()) break;
  }
  if (launch.error.empty() && !updates_y) {
    const auto missing = std::find(written_y.begin(), written_y.end(), 0);
    if (missing != written_y.end()) {
      launch.error = "byte " + std::to_string(missing - written_y.begin()) + " of y was never written";
    }
  }
  if (launch.error.empty()) return 0;
  std::snprintf(message, message_bytes, "%s", launch.error.c_str());
  return 1;
}

// What the compiler calls before each access of device code.
#define SITE reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))
#define HOOKS(bytes)                                                                        \
  void __tsan_read##bytes(void* p) { emulate::check(false, p, bytes, SITE); }               \
  void __tsan_write##bytes(void* p) { emulate::check(true, p, bytes, SITE); }               \
  void __tsan_unaligned_read##bytes(void* p) { emulate::check(false, p, bytes, SITE); }     \
  void __tsan_unaligned_write##bytes(void* p) { emulate::check(true, p, bytes, SITE); }
extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, std::size_t bytes) { emulate::check(false, p, bytes, SITE); }
void __tsan_write_range(void* p, std::size_t bytes) { emulate::check(true, p, bytes, SITE); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// Of -fsanitize=alignment,bounds. Each description begins with file, line and column.
struct Source {
  const char* file;
  std::uint32_t line, column;
};
void __ubsan_handle_type_mismatch_v1(const Source* source, std::uintptr_t address) {
  emulate::fail("misaligned access, or one through a null pointer, at %s:%u: address ends in %#zx",
                source->file, source->line, address % 256);
}
void __ubsan_handle_out_of_bounds(const Source* source, std::uintptr_t index) {
  emulate::fail("index %td is beyond its array's bound at %s:%u", static_cast<std::ptrdiff_t>(index),
                source->file, source->line);
}
}
