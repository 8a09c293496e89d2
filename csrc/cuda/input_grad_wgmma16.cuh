// The gradient of what chains of two 16-bit factors read, in one launch, on Hopper's warpgroup tensor cores
// (batch first, sm_90a).
//
// (1, b1, c1, d1) * (a2, b2, c2, 1), with z between the factors:
//   dz[n, l, j] = sum over k of dY[n, k, j] K1[k, l, j],    z's features in the order (l, j) = l * d1 + j;
//   dx[n, i, c] = sum over k of dz[n, i, k] K2[i, k, c],    z's features in the order (i, k) = i * b2 + k.
// Both are written: dz is for the gradient of K2. Of several chains that read the same ("siblings") dx is the sum, and
// each has its own dz. Where they read an activation of h, dx is h's gradient, and the activation is computed again.
//
// A warpgroup that multiplies has 64 rows:
//   1. dz, of all classes j, sibling after sibling. A thread reads runs of 8 features of dY, sorts them by class in registers, and brings
//      them to products with the weights of a class. The summation runs over k in the order in which threads hold
//      them, and so do the weights.
//   2. The columns of dz's sums are ordered so that a thread holds runs of 8 neighbouring features: it rounds and
//      writes them, and keeps the words in registers. As they are they are its operands of the second product, for
//      any b2 that is a multiple of 32.
// Blocks of the right factor need each their own part of dz: SPLITS blocks share them without a word.
#pragma once

#include "chain_wgmma16.cuh"
#include "epilogue.cuh"
#include "input_grad_tile.cuh"

// Which rows and columns a block has.
template <typename Tile> struct InputGradPlace {
  int split, part;
  int64 first, end;  // rows
  __device__ __forceinline__ explicit InputGradPlace(const InputGradArguments& arguments) {
    const int of_rows = static_cast<int>(blockIdx.x) % Tile::OF_ROWS;
    split = of_rows / Tile::PARTS, part = of_rows % Tile::PARTS;
    first = blockIdx.x / Tile::OF_ROWS * arguments.rows_per_block;
    const int64 last = first + arguments.rows_per_block;
    end = last < arguments.batch ? last : arguments.batch;
  }
};

// A run of 64 bytes of a row lies at place `run`, or at that of its neighbour: eight threads that read two rows meet
// all banks.
template <typename Tile> __device__ __forceinline__ int place_of_run(int run, int row) {
  return Tile::CHUNKS_OF_ROW % 8 == 0 ? run ^ (row & 1) : run;
}

// Loads rows of dY and the left factor's weights for them.
template <typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void load_rows_of_grad(const InputGradArguments& arguments, AnyRing& ring, int64 row0,
                                                  int rows, const unsigned char* weights, int sibling) {
  using Walk = RowWalk<Tile::ROWS, Tile::CHUNKS_OF_ROW, Tile::LOADERS>;
  constexpr int COUNT = (Tile::ROWS + Walk::PASS_ROWS - 1) / Walk::PASS_ROWS;
  const int m0 = threadIdx.x / Walk::WIDTH, first_chunk = threadIdx.x % Walk::WIDTH;
  const int64 stride = arguments.grad_strides[sibling];
  const uint16* const first = static_cast<const uint16*>(arguments.grads[sibling]);
  const uint16* const grad = first + (row0 + m0) * stride;
#pragma unroll 1
  for (int slot = 0; slot < Tile::SLOTS_1; ++slot) {
    ring.wait_until_empty();
    if (threadIdx.x == 0) ring.load_weights(weights, Tile::GRAD_BYTES, Tile::WEIGHT_BYTES_1);
#pragma unroll
    for (int pass = 0; pass < Walk::CHUNK_PASSES; ++pass) {
      const int chunk = first_chunk + pass * Walk::WIDTH, feature = slot * Tile::KF + chunk * 8;
      const bool inside = P::OUT % Tile::KF == 0 || feature < P::OUT;
      const uint16* from = inside ? grad + feature : first;
#pragma unroll
      for (int step = 0; step < COUNT; ++step) {
        const int row = m0 + step * Walk::PASS_ROWS;
        if (row < Walk::end(m0)) {
          const int place = place_of_run<Tile>(chunk / 4, row) * 4 + chunk % 4;
          cp_async_16(ring.here() + row * Tile::ROW_BYTES + place * 16, from, inside && row < rows);
        }
        from += Walk::PASS_ROWS * stride;
      }
    }
    ring.full[ring.slot].cp_async_arrive();
    ring.next();
  }
}

// Prefetches a chunk of h to the L2 cache, as far ahead of its use as the ring is long: whole rows of all blocks would
// not fit into it.
template <typename P, typename Tile>
__device__ __forceinline__ void prefetch_chunk(const void* h, int64 row0, int64 end, int block, int column) {
  constexpr int LINE = 64;  // features, of 128 bytes
  const uint16* const first = static_cast<const uint16*>(h) + row0 * P::IN + block + column;
  for (int row = threadIdx.x; row < Tile::ROWS && row0 + row < end; row += Tile::LOADERS) {
#pragma unroll
    for (int at = 0; at < Tile::NC; at += LINE) {
      if (P::C2 % Tile::NC != 0 && column + at >= P::C2) break;
      asm volatile("prefetch.global.L2 [%0];\n" ::"l"(first + row * P::IN + at) : "memory");
    }
  }
}

// The first warpgroup's job.
template <typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void load_input_grad(const InputGradArguments& arguments, AnyRing ring) {
  const InputGradPlace<Tile> own(arguments);
  const unsigned char* const weights = static_cast<const unsigned char*>(arguments.weights);
  const unsigned char* const left = weights + int64(own.split) * Tile::SLOTS_1 * Tile::WEIGHT_BYTES_1;
  for (int64 row0 = own.first; row0 < own.end; row0 += Tile::ROWS) {
#pragma unroll
    for (int s = 0; s < P::SIBLINGS; ++s) {
      const int rows = rows_inside<Tile::ROWS>(own.end - row0);
      load_rows_of_grad<P, Tile>(arguments, ring, row0, rows, left + s * Tile::OF_ONE, s);
    }
#pragma unroll
    for (int s = 0; s < P::SIBLINGS; ++s) {
      prefetch_rows<P::OUT, Tile::ROWS>(arguments.grads[s], arguments.grad_strides[s], row0 + Tile::ROWS, own.end);
    }
#pragma unroll 1
    for (int of_share = 0; of_share < Tile::SHARE; ++of_share) {
      const int block = own.split * Tile::SHARE + of_share, first = own.part * Tile::COUNT;
      const unsigned char* const right =
          weights + Tile::LEFT_BYTES + int64(block * Tile::CHUNKS + first) * Tile::WEIGHT_BYTES_2;
      if constexpr (P::ACTIVATION == IDENTITY) {
        load_weight_slots(ring, right, Tile::COUNT, Tile::WEIGHT_BYTES_2);
      } else {
#pragma unroll 1
        for (int at = 0; at < Tile::COUNT; ++at) {
          load_weight_slots(ring, right + at * Tile::WEIGHT_BYTES_2, 1, Tile::WEIGHT_BYTES_2);
          prefetch_chunk<P, Tile>(arguments.h, row0, own.end, block * P::C2, (first + at) * Tile::NC);
        }
      }
    }
  }
}

// Two 16-bit halves side by side: both lower or both upper ones.
__device__ __forceinline__ uint32 halves_of(uint32 first, uint32 second, bool upper) {
  return upper ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
}

// What a thread has of a unit of dY, in its two rows.
template <typename P, typename Tile> struct GradUnit {
  static constexpr int PRODUCTS = Tile::STEPS_OF_UNIT * P::D1;  // of each 16 k of a class
  uint32 words[2][4 * Tile::LOADS];

  // `rows`: where the thread's first row of a slot begins, with its 16 bytes of a run of 64; `odd`: the row is.
  __device__ __forceinline__ void load(const unsigned char* rows, int unit, int odd) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int load = 0; load < Tile::LOADS; ++load) {
        const int run = place_of_run<Tile>(unit * Tile::LOADS + load, odd);
        const uint4 four = *reinterpret_cast<const uint4*>(rows + half * 8 * Tile::ROW_BYTES + run * 64);
        words[half][4 * load] = four.x, words[half][4 * load + 1] = four.y;
        words[half][4 * load + 2] = four.z, words[half][4 * load + 3] = four.w;
      }
  }

  // The operands of its products: classes side by side, step after step.
  __device__ __forceinline__ void sort(uint32 (&a)[PRODUCTS][4]) const {
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int step = product / P::D1, j = product % P::D1, first = 4 * step + 2 * (e / 2);  // of 8 or more k
        const uint32(&row)[4 * Tile::LOADS] = words[e % 2];
        if constexpr (P::D1 == 1) {
          a[product][e] = row[first / 2];
        } else {
          a[product][e] = halves_of(row[(first * P::D1 + j) / 2], row[((first + 1) * P::D1 + j) / 2], j % 2 != 0);
        }
      }
  }
};

// Phase 1: dz of a warpgroup's rows.
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_rows_of_grad(float (&sums)[P::D1][Tile::NL / 2], AnyRing& ring,
                                                      const ChainThread<Tile>& own) {
  using Unit = GradUnit<P, Tile>;
  const unsigned char* const rows = ring.slots + own.row * Tile::ROW_BYTES + own.quarter * 16;
  const uint64 first_weights =
      make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0) + Tile::GRAD_BYTES, Tile::N1 * 16, 128);
#pragma unroll
  for (int j = 0; j < P::D1; ++j)
#pragma unroll
    for (int e = 0; e < Tile::NL / 2; ++e) sums[j][e] = 0.0f;
  Unit unit;
  uint32 a[2][Unit::PRODUCTS][4] = {};
  // Words of one class are operands as they are, so they are loaded when no product reads the registers any more.
  // (Loaded before, they would be copied, and ptxas lets such a load write registers that a product still reads.)
  constexpr bool AS_THEY_ARE = P::D1 == 1;
  const auto load = [&](int u) {
    unit.load(rows + ring.slot * AnyRing::SLOT_BYTES, u, own.row & 1);
    if constexpr (AS_THEY_ARE) unit.sort(a[u % 2]);
  };
  ring.wait_until_full();
  load(0);
  int before = 0;
#pragma unroll 1
  for (int slot = 0; slot < Tile::SLOTS_1; ++slot) {
#pragma unroll
    for (int u = 0; u < Tile::UNITS; ++u) {
      if constexpr (!AS_THEY_ARE) unit.sort(a[u % 2]);
      const uint64 weights = first_weights + ring.slot * (AnyRing::SLOT_BYTES / 16) + u * (Unit::PRODUCTS * Tile::NL * 2);
      keep_operands(a[u % 2]);
      wgmma_fence();
#pragma unroll
      for (int product = 0; product < Unit::PRODUCTS; ++product) {
        const int step = product / P::D1, j = product % P::D1;
        multiply_columns<T, Tile::NL>(sums[j], a[u % 2][product], weights + step * Tile::N1 * 2 + j * Tile::NL, 1);
      }
      wgmma_commit_group();
      const int used = ring.slot;
      const auto load_next = [&] {
        if (u + 1 < Tile::UNITS) {
          load(u + 1);
        } else {
          ring.next();
          if (slot + 1 < Tile::SLOTS_1) {
            ring.wait_until_full();
            load(0);
          }
        }
      };
      if constexpr (!AS_THEY_ARE) load_next();
      // The group before is over: its operands' registers may be written, its slot released.
      wgmma_wait_group<1>();
      keep_operands(a[(u + 1) % 2]);
      if (u == 0 && slot > 0) ring.release(before);
      if (u + 1 == Tile::UNITS) before = used;
      if constexpr (AS_THEY_ARE) load_next();
    }
  }
  wgmma_wait_group<0>();
  keep_operands(a[1]);
  ring.release(before);
#pragma unroll
  for (int j = 0; j < P::D1; ++j) wgmma_fence_operand(sums[j]);
}

// Rounds dz: a thread's run of 8 features of each 32 are its words of two steps of the second product.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void round_between(uint32 (&z)[Tile::STEPS][4], const float (&sums)[P::D1][Tile::NL / 2]) {
#pragma unroll
  for (int step = 0; step < Tile::STEPS; ++step)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int run = step / 2, word = step % 2 * 2 + e / 2, half = e % 2;
      float values[2];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int feature = 2 * word + v, k = feature / P::D1;
        const int tile = P::D1 == 8 ? run / 2 : run * Tile::RUN_TILES + k / 2, column = P::D1 == 8 ? run % 2 : k % 2;
        values[v] = sums[feature % P::D1][tile * 4 + half * 2 + column];
      }
      z[step][e] = pack_pair<T>(values[0], values[1]);
    }
}

// Writes the thread's part of dz: `to` is its first feature in its first row, `left` rows are from there to the end.
template <typename P, typename Tile>
__device__ __forceinline__ void store_between(uint16* to, const uint32 (&z)[Tile::STEPS][4], int64 left) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 8 >= left) continue;
#pragma unroll
    for (int run = 0; run < Tile::STEPS / 2; ++run) {
      store_16_bytes(to + half * 8 * P::MIDDLE + run * 32, z[2 * run][half], z[2 * run][2 + half],
                     z[2 * run + 1][half], z[2 * run + 1][2 + half]);
    }
  }
}

// Of a chunk of dx, what was activated; `at` is the thread's first feature in its first row, `first` its column.
template <typename P, typename Tile> struct ChunkOfH {
  static constexpr bool NEEDED = P::ACTIVATION != IDENTITY;
  uint32 words[NEEDED ? Tile::NC / 32 : 1][2][4];
  __device__ __forceinline__ void load(const void* h, int64 at, int first, int64 left) {
    if constexpr (NEEDED) {
#pragma unroll
      for (int run = 0; run < Tile::NC / 32; ++run)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if ((P::C2 % Tile::NC != 0 && first + run * 32 >= P::C2) || half * 8 >= left) continue;
          load_16_bytes(words[run][half], static_cast<const uint16*>(h) + at + half * 8 * P::IN + run * 32);
        }
    }
  }
};

// Writes a chunk of dx, as above, and of what was read.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void store_input_grad(const InputGradArguments& arguments, int64 to,
                                                 const float (&sums)[Tile::NC / 2], const ChunkOfH<P, Tile>& h,
                                                 int first, int64 left) {
#pragma unroll
  for (int run = 0; run < Tile::NC / 32; ++run) {
    if (P::C2 % Tile::NC != 0 && first + run * 32 >= P::C2) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= left) continue;
      uint32 words[4], activated[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int at = (run * 4 + w) * 4 + half * 2;
        if constexpr (ChunkOfH<P, Tile>::NEEDED) {
          const Activated low = activate_with_slope<P::ACTIVATION>(half_of<T>(h.words[run][half][w], 0));
          const Activated high = activate_with_slope<P::ACTIVATION>(half_of<T>(h.words[run][half][w], 1));
          activated[w] = pack_pair<T>(low.value, high.value);
          words[w] = pack_pair<T>(sums[at] * low.slope, sums[at + 1] * high.slope);
        } else {
          words[w] = pack_pair<T>(sums[at], sums[at + 1]);
        }
      }
      const int64 place = to + half * 8 * P::IN + run * 32;
      store_16_bytes(static_cast<uint16*>(arguments.to) + place, words[0], words[1], words[2], words[3]);
      if constexpr (ChunkOfH<P, Tile>::NEEDED) {
        store_16_bytes(static_cast<uint16*>(arguments.activated) + place, activated[0], activated[1], activated[2],
                       activated[3]);
      }
    }
  }
}

// Phase 2: dx of the block's share of the right factor's blocks, a chunk of columns after the other; one is stored
// while the next is multiplied. `to`: the thread's first feature of the first block, in its first row. (The loop has no end to jump back
// from: there the compiler would wait for every product before it lets sums be read.)
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_between(const InputGradArguments& arguments,
                                                 uint32 (&z)[P::SIBLINGS][Tile::STEPS][4], AnyRing& ring, int64 to,
                                                 int column, int64 left) {
  constexpr int CHUNKS = Tile::SHARE * Tile::COUNT;
  const uint64 first_weights = make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0), Tile::NC * 16, 128);
  float sums[2][Tile::NC / 2];
  int before = 0;
  const auto store = [&](int chunk) {
    wgmma_fence_operand(sums[chunk % 2]);
    ring.release(before);
    const int of_block = chunk % Tile::COUNT * Tile::NC;
    store_input_grad<T, P, Tile>(arguments, to + chunk / Tile::COUNT * P::C2 + of_block, sums[chunk % 2],
                                 ChunkOfH<P, Tile>(), column + of_block, left);
  };
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    ring.wait_until_full();
    const uint64 weights = first_weights + ring.slot * (AnyRing::SLOT_BYTES / 16);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < P::SIBLINGS * Tile::STEPS_2; ++s) {
      const int step = chunk / Tile::COUNT * Tile::STEPS_2 + s % Tile::STEPS_2;
      multiply_columns<T, Tile::NC>(sums[chunk % 2], z[s / Tile::STEPS_2][step], weights + s * Tile::NC * 2, s);
    }
    wgmma_commit_group();
    if (chunk > 0) {
      wgmma_wait_group<1>();
      store(chunk - 1);
    }
    before = ring.slot;
    ring.next();
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int s = 0; s < P::SIBLINGS; ++s) keep_operands(z[s]);
  store(CHUNKS - 1);
}

// The same with an activation, whose code for all chunks would not fit into the caches of instructions: a loop, in which
// a chunk is stored before the next is multiplied, while other warpgroups multiply.
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_activated(const InputGradArguments& arguments,
                                                   uint32 (&z)[P::SIBLINGS][Tile::STEPS][4], AnyRing& ring, int64 to,
                                                   int column, int64 left) {
  const uint64 first_weights = make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0), Tile::NC * 16, 128);
#pragma unroll
  for (int of_share = 0; of_share < Tile::SHARE; ++of_share) {
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::COUNT; ++chunk) {
      const int64 place = to + of_share * P::C2 + chunk * Tile::NC;
      ChunkOfH<P, Tile> h;
      h.load(arguments.h, place, column + chunk * Tile::NC, left);
      float sums[Tile::NC / 2];
      ring.wait_until_full();
      const uint64 weights = first_weights + ring.slot * (AnyRing::SLOT_BYTES / 16);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < P::SIBLINGS * Tile::STEPS_2; ++s) {
        const int step = of_share * Tile::STEPS_2 + s % Tile::STEPS_2;
        multiply_columns<T, Tile::NC>(sums, z[s / Tile::STEPS_2][step], weights + s * Tile::NC * 2, s);
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();
#pragma unroll
      for (int s = 0; s < P::SIBLINGS; ++s) keep_operands(z[s]);
      wgmma_fence_operand(sums);
      ring.release(ring.slot);
      ring.next();
      store_input_grad<T, P, Tile>(arguments, place, sums, h, column + chunk * Tile::NC, left);
    }
  }
}

// The other warpgroups' job.
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_input_grad(const InputGradArguments& arguments, AnyRing ring) {
  const ChainThread<Tile> own(threadIdx.x - Tile::LOADERS);
  const InputGradPlace<Tile> place(arguments);
  for (int64 row0 = place.first; row0 < place.end; row0 += Tile::ROWS) {
    if (row0 + own.group * 64 >= place.end) {
      pass_slots_by(ring, Tile::SLOTS);
      continue;
    }
    const int64 row = row0 + own.row;
    uint32 z[P::SIBLINGS][Tile::STEPS][4];
#pragma unroll
    for (int s = 0; s < P::SIBLINGS; ++s) {
      float sums[P::D1][Tile::NL / 2];
      multiply_rows_of_grad<T, P, Tile>(sums, ring, own);
      round_between<T, P, Tile>(z[s], sums);
      if (place.part == 0) {
        uint16* const between = static_cast<uint16*>(arguments.between) + (s * arguments.batch + row) * P::MIDDLE;
        store_between<P, Tile>(between + place.split * Tile::N1 + own.quarter * 8, z[s], place.end - row);
      }
    }
    const int column = place.part * Tile::COUNT * Tile::NC + own.quarter * 8;
    const int64 to = row * P::IN + place.split * Tile::SHARE * P::C2 + column;
    if constexpr (P::ACTIVATION == IDENTITY) {
      multiply_between<T, P, Tile>(arguments, z, ring, to, column, place.end - row);
    } else {
      multiply_activated<T, P, Tile>(arguments, z, ring, to, column, place.end - row);
    }
  }
}

template <typename T, typename P, typename Tile>
__device__ __forceinline__ void input_grad_wgmma16_kernel(const InputGradArguments& arguments) {
  using TileRing = Ring<Tile::SLOT_BYTES, Tile::STAGES>;
  extern __shared__ __align__(128) unsigned char shared[];
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared);
  Mbarrier* const empty = full + Tile::STAGES;
  unsigned char* const slots = shared + Tile::BARRIER_BYTES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::STAGES; ++s) {
      full[s].init(Tile::LOADERS + 1);  // once more the one that asks for weights
      empty[s].init(Tile::MULTIPLIERS);
    }
    fence_view_async_shared();  // and for the copy engine
  }
  __syncthreads();
  griddepcontrol_wait();
  if (threadIdx.x < Tile::LOADERS) {
    if constexpr (Tile::AT_START < 240) setmaxnreg_dec<Tile::LOADER_REGISTERS>();
    load_input_grad<P, Tile>(arguments, TileRing(slots, full, empty, 1));
  } else {
    if constexpr (Tile::AT_START < 240) setmaxnreg_inc<Tile::MULTIPLIER_REGISTERS>();
    multiply_input_grad<T, P, Tile>(arguments, TileRing(slots, full, empty, 0));
  }
}
