// What emulated device code and emulated instructions may ask of the emulator (runtime.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulate {

struct Index3 {
  unsigned x, y, z;
};

Index3 thread_index();
Index3 block_index();
Index3 grid_size();
Index3 block_size();

// Addresses in the block's shared memory. The n-th call of each thread is the n-th array.
void* dynamic_shared();
void* static_shared(std::size_t bytes, std::size_t alignment);
std::uint32_t shared_offset(const void* address);

void block_barrier();
void named_barrier(unsigned name, unsigned count);  // of `count` threads; 0 is __syncthreads's
void arrive_at_named_barrier(unsigned name, unsigned count);  // without waiting
void warp_barrier();
void arrive_at_cluster_barrier();
void wait_at_cluster_barrier();

// A barrier in shared memory whose phases end when `count` threads have arrived (mbarrier). A wait
// ends as soon as the phase under way has another parity than the one waited for.
void set_up_mbarrier(std::uint32_t at, unsigned count);
void arrive_at_mbarrier(std::uint32_t at);
void wait_for_phase(std::uint32_t at, unsigned parity);

// A phase does not end before the bytes that it expects have been copied. They land when it ends.
void expect_bytes(std::uint32_t at, unsigned bytes);
void copy_in_bulk(std::uint32_t shared, const void* global, unsigned bytes, std::uint32_t at, const void* caller);

// Waits for all 32 lanes of the warp to call with the same name, then runs `execute` once on what
// they brought. The operands may lie on each lane's stack: no lane goes on before.
void warp_collective(const char* name, void* operands, void (*execute)(void* const (&lanes)[32]));

// Copies to shared memory whose bytes land when they are waited for, and not before. What lies
// beyond `source_bytes` becomes zero. `caller` is the place in device code that errors name.
void copy_async(std::uint32_t shared, const void* global, unsigned bytes, unsigned source_bytes,
                const void* caller);
void commit_copies();
void wait_for_copies(unsigned pending);

// Of a kernel that may be launched before the one ahead of it has ended.
void wait_for_kernel_ahead();
void let_next_kernel_in();

// Where `bytes` bytes of shared memory lie, checked as a read by this thread.
const void* read_shared(std::uint32_t shared, std::size_t bytes, const void* caller);
void* write_shared(std::uint32_t shared, std::size_t bytes, const void* caller);

// The same place in the shared memory of another block of the cluster, and accesses there.
std::uint32_t shared_offset_in(std::uint32_t offset, unsigned rank);
const void* read_shared_of_cluster(std::uint32_t shared, std::size_t bytes, const void* caller);
void* write_shared_of_cluster(std::uint32_t shared, std::size_t bytes, const void* caller);

// The address in this block's shared memory of which a descriptor has only the low 18 bits.
std::uint32_t described_address(std::uint32_t low);

// Ends the launch with a sentence. Emulated instructions call it for operands they do not take.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

struct Kernel {
  const char* name;
  unsigned cluster;  // blocks
  void (*run)(const void* arguments);
};

}  // namespace emulate

// The table of kernels, defined by the generated file.
extern "C" const emulate::Kernel emulated_kernels[];
extern "C" const int emulated_kernel_count;
