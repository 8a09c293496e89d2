// 16-bit factors on tensor cores, batch last (sm_80 and up).
//
// x is (N, batch) and y is (M, batch), so for fixed (i, j) the product is a matrix product,
// y[k, m] = sum_l w[k, l] x[l, m], whose rows of x and y are whole runs of memory, d of them apart.
// No permutation is needed at all; what is left is to move every byte once and at full speed.
//
// A block takes NB outputs k of one column (i, j) at a time, all of b where they fit, so that x is
// read once. It keeps their weights in shared memory, in the order of the tensor cores' fragments,
// and walks over tiles of BM batch columns. x streams through a ring of stages whose loads run
// ahead across the ends of tiles and columns; nothing waits for a store. Each warp turns its sums
// into runs of NT * 16 bytes in a buffer of its own before it writes them.
//
// The work is a list of (column, tile) pairs in that order. Every group of blocks takes an equal
// part of the list, so that all end together, and changes weights only where a column ends.
//
// Rows that do not start at multiples of 16 bytes (batches that are no multiple of 8) take the
// SHIFTED kernel: it copies the aligned chunks that cover a row, and moves them into place in
// shared memory. It is also right for any stride of x.
#pragma once

#include "problem.cuh"
#include "ptx.cuh"

template <typename P, int WARPS_K_, int WARPS_M_, int MT_, int NT_, int KL_, int STAGES_, int BLOCKS_,
          bool PACKED_, bool SHIFTED_>
struct BatchLast16Tile {
  static constexpr int WARPS_K = WARPS_K_, WARPS_M = WARPS_M_;
  static constexpr int MT = MT_, NT = NT_;  // 16-output and 8-column tiles of a warp
  static constexpr int KL = KL_;            // l in a stage
  static constexpr int BLOCKS = BLOCKS_;    // blocks that should fit on a multiprocessor
  static constexpr bool PACKED = PACKED_, SHIFTED = SHIFTED_;
  static constexpr int STAGES = SHIFTED ? STAGES_ - 1 : STAGES_;  // one buffer holds shifted rows
  static constexpr int WARPS = WARPS_K * WARPS_M, THREADS = 32 * WARPS;
  static constexpr int NB = WARPS_K * MT * 16, BM = WARPS_M * NT * 8;
  static constexpr int STEPS = (P::C + 15) / 16;  // tensor-core steps over l
  static constexpr int STEPS_PER_STAGE = KL / 16, STAGES_PER_TILE = STEPS / STEPS_PER_STAGE;
  static constexpr int CHUNKS = BM / 8;           // 16-byte chunks of a row of a stage
  static constexpr int PITCH = CHUNKS + 1;        // odd: 8 rows of a matrix meet all banks
  static constexpr int WEIGHT_BYTES = NB / 16 * STEPS * 512;
  static constexpr int STAGE_BYTES = KL * PITCH * 16;
  static constexpr int OUT_PITCH = NT + 1;        // chunks of a row of a warp's results
  static constexpr int OUT_BYTES = 16 * OUT_PITCH * 16;
  static constexpr int SHARED_BYTES = WEIGHT_BYTES + STAGES_ * STAGE_BYTES + WARPS * OUT_BYTES;
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB, COLUMNS = P::A * P::D;
  static_assert(KL % 16 == 0 && STEPS % STEPS_PER_STAGE == 0, "a tile is a number of whole stages");
  static_assert(NT % 2 == 0 && 32 % NT == 0, "matrices load in pairs, and lanes share rows evenly");
  static_assert(STAGES >= 2, "one stage fills while another is used");
};

// Where in the list of (column, tile) pairs a block is.
struct ColumnWalk {
  int column;
  int64 tile;
  __device__ __forceinline__ void advance(int64 tiles) {
    if (++tile == tiles) tile = 0, ++column;
  }
};

// Row l = 0 of a column's x.
template <typename P>
__device__ __forceinline__ const uint16* column_of_x(const Arguments& arguments, int column) {
  const int64 feature = int64(column / P::D) * P::C * P::D + column % P::D;
  return static_cast<const uint16*>(arguments.x) + feature * arguments.x_feature_stride;
}

// 16 bytes that start 2 * `first` bytes into `words`; reads up to the 4 bytes that follow them.
__device__ __forceinline__ uint4 load_shifted(const unsigned char* words, int first) {
  const uint32* const from = reinterpret_cast<const uint32*>(words) + (first >> 1);
  const int shift = first % 2 * 16;
  const uint32 w0 = from[0], w1 = from[1], w2 = from[2], w3 = from[3], w4 = shift ? from[4] : 0;
  return make_uint4(__funnelshift_r(w0, w1, shift), __funnelshift_r(w1, w2, shift),
                    __funnelshift_r(w2, w3, shift), __funnelshift_r(w3, w4, shift));
}

// Elements between an address and the multiple of 16 bytes at or below it.
__device__ __forceinline__ int misalignment(const uint16* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) % 16 / 2);
}

// Starts the copy of rows [l0, l0 + KL) and columns [m0, m0 + BM) of a column's x.
template <typename P, typename Tile>
__device__ __forceinline__ void load_stage(const Arguments& arguments, unsigned char* stage,
                                           const uint16* column, int l0, int64 m0) {
  const int64 row_stride = arguments.x_feature_stride * P::D;
  const int64 columns = arguments.batch - m0;  // that are left
  if (!Tile::SHIFTED) {
    // A thread keeps its chunk and walks down the rows.
    constexpr int ROWS = Tile::THREADS / Tile::CHUNKS;
    static_assert(Tile::SHIFTED || Tile::THREADS % Tile::CHUNKS == 0, "");
    const int chunk = threadIdx.x % Tile::CHUNKS, first_row = threadIdx.x / Tile::CHUNKS;
    const bool inside = chunk * 8 < columns;
    const uint16* from = column + (l0 + first_row) * row_stride + (inside ? m0 + chunk * 8 : 0);
    unsigned char* to = stage + (first_row * Tile::PITCH + chunk) * 16;
#pragma unroll
    for (int row = 0; row < Tile::KL; row += ROWS) {
      if (Tile::KL % ROWS == 0 || row + first_row < Tile::KL) {
        const bool exists = P::C % 16 == 0 || l0 + row + first_row < P::C;
        copy_async_16(to, exists ? from : column, inside && exists);
      }
      from += ROWS * row_stride;
      to += ROWS * Tile::PITCH * 16;
    }
  } else if (arguments.x_batch_stride == 1) {
    for (int e = threadIdx.x; e < Tile::KL * Tile::PITCH; e += Tile::THREADS) {
      const int row = e / Tile::PITCH, chunk = e % Tile::PITCH;
      const bool exists = P::C % 16 == 0 || l0 + row < P::C;
      const uint16* const from = column + (exists ? (l0 + row) * row_stride + m0 : 0);
      const int skipped = misalignment(from);
      const int64 left = exists ? columns + skipped - chunk * 8 : 0;
      const int bytes = left >= 8 ? 16 : left > 0 ? static_cast<int>(left) * 2 : 0;
      copy_async_up_to_16(stage + e * 16, from - skipped + (bytes > 0 ? chunk * 8 : 0), bytes);
    }
  } else {
    for (int e = threadIdx.x; e < Tile::KL * Tile::BM; e += Tile::THREADS) {
      const int row = e / Tile::BM, m = e % Tile::BM;
      uint16 value = 0;
      if (m < columns && (P::C % 16 == 0 || l0 + row < P::C)) {
        value = column[(l0 + row) * row_stride + (m0 + m) * arguments.x_batch_stride];
      }
      reinterpret_cast<uint16*>(stage + row * Tile::PITCH * 16)[m] = value;
    }
  }
}

// Moves a stage's rows from where their chunks lie in memory to the start of the rows of `aligned`.
template <typename P, typename Tile>
__device__ __forceinline__ void align_stage(const Arguments& arguments, unsigned char* aligned,
                                            const unsigned char* stage, const uint16* column, int l0,
                                            int64 m0) {
  for (int e = threadIdx.x; e < Tile::KL * Tile::CHUNKS; e += Tile::THREADS) {
    const int row = e / Tile::CHUNKS, chunk = e % Tile::CHUNKS;
    const uint16* const from = column + (l0 + row) * arguments.x_feature_stride * P::D + m0;
    const bool moved = arguments.x_batch_stride == 1 && (P::C % 16 == 0 || l0 + row < P::C);
    const int at = (row * Tile::PITCH + chunk) * 16;
    *reinterpret_cast<uint4*>(aligned + at) = load_shifted(stage + at, moved ? misalignment(from) : 0);
  }
}

// The weights of one column (i, j). Canonical, weight[a, b, c, d], their elements lie d apart; PACKED,
// weight[a, d, b, c], they are one run, and the strides of the arguments follow that order. VECTORS: the
// weight starts at a multiple of 16 bytes.
template <typename P, bool PACKED, bool VECTORS> struct ColumnWeights {
  const uint16* first;
  int64 output_stride, sum_stride;

  __device__ __forceinline__ ColumnWeights(const Arguments& arguments, int i, int j)
      : first(static_cast<const uint16*>(arguments.weight) + i * arguments.weight_stride_a +
              j * (PACKED ? arguments.weight_stride_b : arguments.weight_stride_d)),
        output_stride(PACKED ? P::C : arguments.weight_stride_b),
        sum_stride(PACKED ? 1 : arguments.weight_stride_c) {}

  __device__ __forceinline__ const uint16* at(int k, int l) const {
    return first + k * output_stride + l * sum_stride;
  }

  // Elements (k, l) and (k, l + 1), zeros beyond b and c.
  __device__ __forceinline__ uint32 pair(int k, int l) const {
    if (PACKED && VECTORS && P::C % 2 == 0) {
      return k < P::B && l < P::C ? *reinterpret_cast<const uint32*>(at(k, l)) : 0;
    }
    const uint32 low = k < P::B && l < P::C ? *at(k, l) : 0;
    const uint32 high = k < P::B && l + 1 < P::C ? *at(k, l + 1) : 0;
    return low | high << 16;
  }
};

// The weights of one column and NB outputs, in the order of the A operand's registers.
template <typename P, typename Tile>
__device__ __forceinline__ void load_weights(const Arguments& arguments, uint4* weights, int i, int j,
                                             int n0) {
  const ColumnWeights<P, Tile::PACKED, !Tile::SHIFTED> w(arguments, i, j);
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int f = threadIdx.x / 32; f < Tile::NB / 16 * Tile::STEPS; f += Tile::WARPS) {
    const int k = n0 + f / Tile::STEPS * 16 + lane / 4, l = f % Tile::STEPS * 16 + lane % 4 * 2;
    weights[f * 32 + lane] = make_uint4(w.pair(k, l), w.pair(k + 8, l), w.pair(k, l + 8), w.pair(k + 8, l + 8));
  }
}

// Writes 16 rows of a warp's results, `y` the first, of which `rows` rows and `columns` columns exist.
template <typename Tile>
__device__ __forceinline__ void store_rows(const unsigned char* out, uint16* y, int64 row_stride, int rows,
                                           int64 columns) {
  constexpr int GRANULES = Tile::SHIFTED ? Tile::NT + 1 : Tile::NT;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int e = lane; e < 16 * GRANULES; e += 32) {
    const int row = e / GRANULES, granule = e % GRANULES;
    if (row >= rows) break;
    uint16* const to = y + row * row_stride;
    const unsigned char* const from = out + row * Tile::OUT_PITCH * 16;
    if (!Tile::SHIFTED) {
      if (granule * 8 < columns) {
        *reinterpret_cast<uint4*>(to + granule * 8) = *reinterpret_cast<const uint4*>(from + granule * 16);
      }
      continue;
    }
    // A granule is 16 aligned bytes of y; those at the ends of the run are shared with other warps.
    const int first = granule * 8 - misalignment(to);
    const int64 end = columns < Tile::NT * 8 ? columns : Tile::NT * 8;
    if (first >= 0 && first + 8 <= end) {
      *reinterpret_cast<uint4*>(to + first) = load_shifted(from, first);
    } else {
      for (int m = first < 0 ? 0 : first; m < first + 8 && m < end; ++m) {
        to[m] = reinterpret_cast<const uint16*>(from)[m];
      }
    }
  }
}

template <typename T, typename P, typename Tile>
__device__ __forceinline__ void batch_last16_kernel(const Arguments& arguments) {
  constexpr int BM = Tile::BM, KL = Tile::KL, MT = Tile::MT, NT = Tile::NT;
  extern __shared__ __align__(128) unsigned char shared[];
  uint4* const weights = reinterpret_cast<uint4*>(shared);
  unsigned char* const ring = shared + Tile::WEIGHT_BYTES;
  unsigned char* const aligned = ring + Tile::STAGES * Tile::STAGE_BYTES;  // of SHIFTED alone
  unsigned char* const outs = aligned + (Tile::SHIFTED ? Tile::STAGE_BYTES : 0);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_k = warp % Tile::WARPS_K, warp_m = warp / Tile::WARPS_K;
  unsigned char* const out = outs + warp * Tile::OUT_BYTES;

  // Neighbouring blocks share x, then neighbouring groups share sectors of the weight.
  const int n0 = static_cast<int>(blockIdx.x % Tile::OUTPUT_TILES) * Tile::NB;
  const int64 group = blockIdx.x / Tile::OUTPUT_TILES, groups = gridDim.x / Tile::OUTPUT_TILES;
  const int64 tiles = (arguments.batch + BM - 1) / BM;
  const int64 items = tiles * Tile::COLUMNS;
  const int64 begin = items * group / groups, end = items * (group + 1) / groups;

  // Where the next load and the next product are: item, stage of its tile, slot of the ring.
  ColumnWalk loaded{static_cast<int>(begin / tiles), begin % tiles}, at = loaded;
  int64 to_load = end - begin, to_do = to_load;
  int load_part = 0, part = 0, load_slot = 0, slot = 0;
  const auto load_next_stage = [&] {
    load_stage<P, Tile>(arguments, ring + load_slot * Tile::STAGE_BYTES, column_of_x<P>(arguments, loaded.column),
                        load_part * KL, loaded.tile * BM);
    if (++load_slot == Tile::STAGES) load_slot = 0;
    if (++load_part == Tile::STAGES_PER_TILE) load_part = 0, --to_load, loaded.advance(tiles);
  };

#pragma unroll
  for (int s = 0; s < Tile::STAGES - 1; ++s) {
    if (to_load > 0) load_next_stage();
    commit_copies();
  }

  float sums[MT][NT][4];
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[mt][n][e] = 0.0f;

  // A lane's row and chunk in the four 8 x 8 matrices that it helps to load: two of l, two of m.
  const int lane_offset = (lane % 16 * Tile::PITCH + warp_m * NT + lane / 16) * 16;
  int column_of_weights = -1;
  while (to_do > 0) {
    if (at.column != column_of_weights) {
      __syncthreads();  // the weights before them are no longer in use
      column_of_weights = at.column;
      load_weights<P, Tile>(arguments, weights, at.column / P::D, at.column % P::D, n0);
    }
    wait_for_copies<Tile::STAGES - 2>();
    __syncthreads();  // the stage is filled for all, and the one before it is free for all
    if (to_load > 0) load_next_stage();
    commit_copies();

    const unsigned char* stage = ring + slot * Tile::STAGE_BYTES;
    if (++slot == Tile::STAGES) slot = 0;
    if (Tile::SHIFTED) {
      align_stage<P, Tile>(arguments, aligned, stage, column_of_x<P>(arguments, at.column), part * KL, at.tile * BM);
      __syncthreads();
      stage = aligned;
    }
    const uint32 matrices = shared_address(stage) + lane_offset;
    const uint4* const fragments = weights + (warp_k * MT * Tile::STEPS + part * Tile::STEPS_PER_STAGE) * 32 + lane;
#pragma unroll(Tile::STEPS_PER_STAGE <= 4 ? Tile::STEPS_PER_STAGE : 2)
    for (int step = 0; step < Tile::STEPS_PER_STAGE; ++step) {
      uint32 b[NT / 2][4];
#pragma unroll
      for (int pair = 0; pair < NT / 2; ++pair) {
        load_matrices_transposed(b[pair], matrices + (step * 16 * Tile::PITCH + pair * 2) * 16);
      }
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const uint4 fragment = fragments[(mt * Tile::STEPS + step) * 32];
        const uint32 a[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          multiply_add<T>(sums[mt][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
      }
    }

    if (++part < Tile::STAGES_PER_TILE) continue;
    // The tile is complete.
    const int k0 = n0 + warp_k * MT * 16;
    const int64 m0 = at.tile * BM + warp_m * NT * 8;
    const int64 feature = (int64(at.column / P::D) * P::B + k0) * P::D + at.column % P::D;
    const int64 row_stride = arguments.y_feature_stride * P::D;
    uint16* const y = static_cast<uint16*>(arguments.y) + feature * arguments.y_feature_stride + m0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      uint32* const words = reinterpret_cast<uint32*>(out) + lane / 4 * Tile::OUT_PITCH * 4 + lane % 4;
      __syncwarp();
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        words[n * 4] = pack_pair<T>(sums[mt][n][0], sums[mt][n][1]);
        words[8 * Tile::OUT_PITCH * 4 + n * 4] = pack_pair<T>(sums[mt][n][2], sums[mt][n][3]);
        sums[mt][n][0] = sums[mt][n][1] = sums[mt][n][2] = sums[mt][n][3] = 0.0f;
      }
      __syncwarp();
      store_rows<Tile>(out, y + mt * 16 * row_stride, row_stride, P::B - k0 - mt * 16, arguments.batch - m0);
    }
    part = 0, --to_do, at.advance(tiles);
  }
}
