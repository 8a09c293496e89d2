// The gradient of what chains of two 16-bit factors read, in one launch, on Hopper's warpgroup tensor cores
// (batch first, sm_90a).
//
// (1, b1, c1, d1) * (a2, b2, c2, 1), with z between the factors:
//   dz[n, l, j] = sum over k of dY[n, k, j] K1[k, l, j],    z's features in the order (l, j) = l * d1 + j;
//   dx[n, i, c] = sum over k of dz[n, i, k] K2[i, k, c],    z's features in the order (i, k) = i * b2 + k.
// Both are written: dz is for the gradient of K2. Of several chains that read the same ("siblings") dx is the sum, and
// each has its own dz. Where a chain reads an activation of h = the product by a factor (1, b0, c0, d0) and a bias, dx
// is h's gradient, and h is computed again, from what that factor read.
//
// A warpgroup that multiplies has 64 rows:
//   1. dz, of all classes j, sibling after sibling. A thread reads runs of 8 features of dY, sorts them by class in
//      registers, and brings them to products with the weights of a class. The summation runs over k in the order in
//      which threads hold them, and so do the weights.
//   2. The columns of dz's sums are ordered so that a thread holds runs of 8 neighbouring features: it rounds and
//      writes them, and keeps the words in registers. As they are they are its operands of the second product, for
//      any b2 that is a multiple of 32.
// Blocks of the right factor need each their own part of dz: SPLITS blocks share them without a word.
#pragma once

#include "common/epilogue.cuh"
#include "common/input_grad_tile.cuh"
#include "common/warpgroup_ring.cuh"

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
      load_weight_slots(ring, right, Tile::COUNT, Tile::WEIGHT_BYTES_2);
    }
  }
}

// Two 16-bit halves side by side: both lower or both upper ones.
__device__ __forceinline__ uint32 halves_of(uint32 first, uint32 second, bool upper) {
  return upper ? first >> 16 | (second & 0xffff0000u) : (first & 0xffffu) | second << 16;
}

// What a thread has of a unit of features, in its two rows.
template <int D> struct UnitOfRows {
  using Unit = GradUnit<D>;
  uint32 words[2][4 * Unit::LOADS];

  __device__ __forceinline__ void set(int half, int load, const uint4& four) {
    words[half][4 * load] = four.x, words[half][4 * load + 1] = four.y;
    words[half][4 * load + 2] = four.z, words[half][4 * load + 3] = four.w;
  }

  // The operands of its products, from place `at` on: classes side by side, step after step.
  template <int COUNT> __device__ __forceinline__ void sort(uint32 (&a)[COUNT][4], int at = 0) const {
#pragma unroll
    for (int product = 0; product < Unit::PRODUCTS; ++product)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int step = product / D, j = product % D, first = 4 * step + 2 * (e / 2);  // of 8 or more k
        const uint32(&row)[4 * Unit::LOADS] = words[e % 2];
        if constexpr (D == 1) {
          a[at + product][e] = row[first / 2];
        } else {
          a[at + product][e] = halves_of(row[(first * D + j) / 2], row[((first + 1) * D + j) / 2], j % 2 != 0);
        }
      }
  }
};

// Of dY. `rows`: where the thread's first row of a slot begins, with its 16 bytes of a run of 64; `odd`: the row is.
template <typename Tile, int D>
__device__ __forceinline__ void load_unit(UnitOfRows<D>& unit, const unsigned char* rows, int at, int odd) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int load = 0; load < GradUnit<D>::LOADS; ++load) {
      const int run = place_of_run<Tile>(at * GradUnit<D>::LOADS + load, odd);
      unit.set(half, load, *reinterpret_cast<const uint4*>(rows + half * 8 * Tile::ROW_BYTES + run * 64));
    }
}

// Phase 1: dz of a warpgroup's rows.
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_rows_of_grad(float (&sums)[P::D1][Tile::NL / 2], AnyRing& ring,
                                                      const WarpgroupThread<Tile>& own) {
  using Unit = typename Tile::Unit;
  const unsigned char* const rows = ring.slots + own.row * Tile::ROW_BYTES + own.quarter * 16;
  const uint64 first_weights =
      make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0) + Tile::GRAD_BYTES, Tile::N1 * 16, 128);
#pragma unroll
  for (int j = 0; j < P::D1; ++j)
#pragma unroll
    for (int e = 0; e < Tile::NL / 2; ++e) sums[j][e] = 0.0f;
  UnitOfRows<P::D1> unit;
  uint32 a[2][Unit::PRODUCTS][4] = {};
  // Words of one class are operands as they are, so they are loaded when no product reads the registers any more.
  // (Loaded before, they would be copied, and ptxas lets such a load write registers that a product still reads.)
  constexpr bool AS_THEY_ARE = P::D1 == 1;
  const auto load = [&](int u) {
    load_unit<Tile>(unit, rows + ring.slot * AnyRing::SLOT_BYTES, u, own.row & 1);
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
      const uint64 of_slot = first_weights + ring.slot * (AnyRing::SLOT_BYTES / 16);
      const uint64 weights = of_slot + u * (Unit::PRODUCTS * Tile::NL * 2);
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

// Feature `at` of a thread's run of 8, of each 32 features, in its first row or the other, from sums of D classes.
template <int D, int COUNT>
__device__ __forceinline__ float value_of_run(const float (&sums)[D][COUNT], int run, int half, int at) {
  constexpr int RUN_TILES = D >= 4 ? 1 : 4 / D;  // of 8 columns, that make whole runs of 8 features
  const int k = at / D;
  const int tile = D == 8 ? run / 2 : run * RUN_TILES + k / 2, column = D == 8 ? run % 2 : k % 2;
  return sums[at % D][tile * 4 + half * 2 + column];
}

// Rounds dz: a thread's runs are its words of two steps of the second product each.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void round_between(uint32 (&z)[Tile::STEPS][4], const float (&sums)[P::D1][Tile::NL / 2]) {
#pragma unroll
  for (int step = 0; step < Tile::STEPS; ++step)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int run = step / 2, first = (step % 2 * 2 + e / 2) * 2, half = e % 2;
      z[step][e] = pack_pair<T>(value_of_run(sums, run, half, first), value_of_run(sums, run, half, first + 1));
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

// Writes a chunk of dx, as above; `values`: of a run, its half and a place.
template <typename T, typename P, typename Tile, typename Values>
__device__ __forceinline__ void store_input_grad(uint16* to, int first, int64 left, const Values& values) {
#pragma unroll
  for (int run = 0; run < Tile::NC / 32; ++run) {
    if (P::C2 % Tile::NC != 0 && first + run * 32 >= P::C2) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= left) continue;
      uint32 words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = pack_pair<T>(values(run, half, 2 * w), values(run, half, 2 * w + 1));
      store_16_bytes(to + half * 8 * P::IN + run * 32, words[0], words[1], words[2], words[3]);
    }
  }
}

// The value of dx in a thread's run.
template <int COUNT> __device__ __forceinline__ float of_run(const float (&sums)[COUNT], int run, int half, int at) {
  return sums[(run * 4 + at / 2) * 4 + half * 2 + at % 2];
}

// Phase 2: dx of the block's share of the right factor's blocks, a chunk of columns after the other; one is stored
// while the next is multiplied. `to`: the thread's first feature of the first block, in its first row. (The loop has no
// end to jump back from: there the compiler would wait for every product before it lets sums be read.)
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_between(uint32 (&z)[P::SIBLINGS][Tile::STEPS][4], AnyRing& ring, uint16* to,
                                                 int column, int64 left) {
  constexpr int CHUNKS = Tile::SHARE * Tile::COUNT;
  const uint64 first_weights = make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0), Tile::NC * 16, 128);
  float sums[2][Tile::NC / 2];
  int before = 0;
  const auto store = [&](int chunk) {
    wgmma_fence_operand(sums[chunk % 2]);
    ring.release(before);
    const int of_block = chunk % Tile::COUNT * Tile::NC;
    store_input_grad<T, P, Tile>(
        to + chunk / Tile::COUNT * P::C2 + of_block, column + of_block, left,
        [&](int run, int half, int at) { return of_run(sums[chunk % 2], run, half, at); });
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

// What the factor below read, as operands of its products: a thread's two rows, of which `left` are inside.
template <typename P> struct RowsBelow {
  using Unit = GradUnit<P::D0>;
  static constexpr int UNITS = P::IS_ACTIVATED ? P::BELOW / Unit::FEATURES : 1;
  UnitOfRows<P::D0> units[UNITS];

  // `from`: the thread's 16 bytes of its first row.
  __device__ __forceinline__ void load(const uint16* from, int64 left) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int load = 0; load < UNITS * Unit::LOADS; ++load) {
        uint32 words[4] = {};
        if (half * 8 < left) load_16_bytes(words, from + half * 8 * P::BELOW + load * 32);
        units[load / Unit::LOADS].set(half, load % Unit::LOADS, uint4{words[0], words[1], words[2], words[3]});
      }
  }
};

// The same where the chain reads an activation: each chunk of h is multiplied beside dx's. The code of an activation
// for all chunks would not fit into the caches of instructions: this is a loop, in which a chunk is stored before the
// next is multiplied, while other warpgroups multiply. `feature`: the thread's first one of the first block.
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_activated(const InputGradArguments& arguments, uint32 (&z)[Tile::STEPS][4],
                                                   const RowsBelow<P>& rows, AnyRing& ring, int64 row, int feature,
                                                   int column, int64 left) {
  using Unit = GradUnit<P::D0>;
  constexpr int UNITS = RowsBelow<P>::UNITS, NL = Tile::NC / P::D0;
  const uint64 first_weights = make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0), Tile::NC * 16, 128);
  uint32 below[UNITS * Unit::PRODUCTS][4];
#pragma unroll
  for (int u = 0; u < UNITS; ++u) rows.units[u].sort(below, u * Unit::PRODUCTS);
#pragma unroll
  for (int of_share = 0; of_share < Tile::SHARE; ++of_share) {
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::COUNT; ++chunk) {
      const int of_block = chunk * Tile::NC, at_chunk = feature + of_share * P::C2 + of_block;
      uint32 bias[Tile::NC / 32][4] = {};
      if (arguments.bias != nullptr) {
#pragma unroll
        for (int run = 0; run < Tile::NC / 32; ++run) {
          if (P::C2 % Tile::NC != 0 && column + of_block + run * 32 >= P::C2) continue;
          load_16_bytes(bias[run], static_cast<const uint16*>(arguments.bias) + at_chunk + run * 32);
        }
      }
      float sums[Tile::NC / 2], h[P::D0][NL / 2];
      ring.wait_until_full();
      const uint64 weights = first_weights + ring.slot * (AnyRing::SLOT_BYTES / 16);
      keep_operands(below);
      wgmma_fence();
#pragma unroll
      for (int product = 0; product < UNITS * Unit::PRODUCTS; ++product) {
        const int step = product / P::D0, j = product % P::D0;
        multiply_columns<T, NL>(h[j], below[product], weights + Tile::RIGHT_BYTES / 16 + step * Tile::NC * 2 + j * NL,
                                step);
      }
#pragma unroll
      for (int s = 0; s < Tile::STEPS_2; ++s) {
        multiply_columns<T, Tile::NC>(sums, z[of_share * Tile::STEPS_2 + s], weights + s * Tile::NC * 2, s);
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();
      keep_operands(z);
      keep_operands(below);
      wgmma_fence_operand(sums);
#pragma unroll
      for (int j = 0; j < P::D0; ++j) wgmma_fence_operand(h[j]);
      ring.release(ring.slot);
      ring.next();
      store_input_grad<T, P, Tile>(
          static_cast<uint16*>(arguments.to) + row * P::IN + at_chunk, column + of_block, left,
          [&](int run, int half, int at) {
            const float value = value_of_run(h, run, half, at) + half_of<T>(bias[run][at / 2], at % 2);
            return of_run(sums, run, half, at) * slope_of<P::ACTIVATION>(value);
          });
    }
  }
}

// The other warpgroups' job.
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_input_grad(const InputGradArguments& arguments, AnyRing ring) {
  const WarpgroupThread<Tile> own(threadIdx.x - Tile::LOADERS);
  const InputGradPlace<Tile> place(arguments);
  for (int64 row0 = place.first; row0 < place.end; row0 += Tile::ROWS) {
    if (row0 + own.group * 64 >= place.end) {
      pass_slots_by(ring, Tile::SLOTS);
      continue;
    }
    const int64 row = row0 + own.row;
    RowsBelow<P> below;
    if constexpr (P::IS_ACTIVATED) {
      const uint16* const from = static_cast<const uint16*>(arguments.below) + row * P::BELOW;
      below.load(from + own.quarter * 8, place.end - row);
    }
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
    const int feature = place.split * Tile::SHARE * P::C2 + column;
    if constexpr (P::IS_ACTIVATED) {
      multiply_activated<T, P, Tile>(arguments, z[0], below, ring, row, feature, column, place.end - row);
    } else {
      uint16* const to = static_cast<uint16*>(arguments.to) + row * P::IN + feature;
      multiply_between<T, P, Tile>(z, ring, to, column, place.end - row);
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
