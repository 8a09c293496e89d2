// Chains of any length and size in one launch (sm_80 and up): x is read once and y written once, in either layout.
// The values between the factors stay in shared memory, and so do the activated features between two layers.
//
// A block computes BM rows. Each factor is a stage (chain_mma_tile.cuh), whose units are divided among the warps. A
// warp loads its operands by `ldmatrix`, because the stage before has stored them contiguously. It loads weights from
// the caches, packed in the order in which lanes load them. 16-bit results are rounded between factors, as by PyTorch.
#pragma once

#include "common/chain_arguments.cuh"
#include "common/chain_mma_tile.cuh"
#include "common/epilogue.cuh"
#include "common/pdl.cuh"
#include "common/shared_elements.cuh"
#include "common/smem_layout.cuh"
#include "common/tf32_split.cuh"

// The offset in elements, in the packed weights of a stage, of a plane, a column and a value of l.
template <typename Stage>
__device__ __forceinline__ int64 packed_place(int plane, int column, int l) {
  const int tile = column / 8;
  if constexpr (Stage::PRODUCTS == 0) {
    return ((int64(plane) * Stage::C + l) * Stage::TILES + tile) * 8 + column % 8;
  } else {  // a lane has column % 8 and two words, which are half a step apart
    constexpr int WORD = 4 / Stage::SIZE;  // l of a word
    const int step = l / Stage::STEP, within = l % Stage::STEP, lane = column % 8 * 4 + within / WORD % 4;
    const int64 of_step = (int64(plane) * Stage::TILES + tile) * Stage::STEPS + step;
    return of_step * (256 / Stage::SIZE) + (lane * 8 + within / (4 * WORD) * 4) / Stage::SIZE + within % WORD;
  }
}

// Writes the zeros that pad the values of each sum in a row of features.
template <typename Tile, typename Row>
__device__ __forceinline__ void fill_up(uint32 region) {
  constexpr int MISSING = Row::FILLED - Row::C;
  if constexpr (MISSING > 0) {
#pragma unroll 1
    for (int at = threadIdx.x; at < Tile::BM * Row::PLANES * MISSING; at += Tile::THREADS) {
      const int row = at / (Row::PLANES * MISSING), plane = at / MISSING % Row::PLANES, l = Row::C + at % MISSING;
      store_shared(region + row * Row::PITCH + (plane * Row::FILLED + l) * Tile::SIZE,
                   from_float<typename Tile::Element>(0.0f));
    }
  }
}

// A chunk of x in registers, on its way from global to shared memory.
template <typename T>
union Chunk {
  uint4 words;
  T values[16 / sizeof(T)];
};

// The 16 bytes at an address; of fewer than 16 existing bytes, or not aligned ones, the `there` elements and zeros.
template <typename T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* from, int there, bool is_aligned) {
  constexpr int VECTOR = 16 / sizeof(T);
  Chunk<T> chunk;
  chunk.words = make_uint4(0, 0, 0, 0);
  if (is_aligned && there >= VECTOR) {
    chunk.words = *reinterpret_cast<const uint4*>(from);
  } else {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      if (e < there) chunk.values[e] = from[e];
    }
  }
  return chunk;
}

// Batch last: two neighbouring threads load the two chunks of one feature's sector, the next two those of the next.
template <int FEATURES>
__device__ __forceinline__ int feature_of(int item) {
  return item / 2 % FEATURES;
}
template <int FEATURES, int VECTOR>
__device__ __forceinline__ int row_of(int item) {
  return (item / 2 / FEATURES * 2 + item % 2) * VECTOR;
}

constexpr int CHUNKS_AHEAD = 4;  // that a thread asks for before it lays the first

// Stores a tile's rows of x where the first stage reads them, and zeros for rows beyond the batch.
template <typename Tile>
__device__ __forceinline__ void load_x(uint32 region, const MlpArguments& arguments, int64 row0, int rows) {
  using T = typename Tile::Element;
  using Row = typename Tile::X;
  constexpr int VECTOR = Tile::VECTOR, FEATURES = Row::FEATURES;
  if constexpr (Tile::BATCH_LAST) {
    const T* const x = static_cast<const T*>(arguments.x) + row0;
    const bool is_aligned = arguments.x_stride % VECTOR == 0;
    constexpr int ITEMS = FEATURES * (Tile::BM / VECTOR);
#pragma unroll 1
    for (int item0 = threadIdx.x; item0 < ITEMS; item0 += CHUNKS_AHEAD * Tile::THREADS) {
      Chunk<T> chunks[CHUNKS_AHEAD];
#pragma unroll
      for (int u = 0; u < CHUNKS_AHEAD; ++u) {
        const int item = item0 + u * Tile::THREADS, feature = feature_of<FEATURES>(item);
        const int row = row_of<FEATURES, VECTOR>(item);
        if (item < ITEMS) {
          chunks[u] = load_chunk(x + feature * arguments.x_stride + row, between(0, rows - row, VECTOR), is_aligned);
        }
      }
#pragma unroll
      for (int u = 0; u < CHUNKS_AHEAD; ++u) {
        const int item = item0 + u * Tile::THREADS, feature = feature_of<FEATURES>(item);
        const int row = row_of<FEATURES, VECTOR>(item);
        if (item < ITEMS) {
          const uint32 to = region + row * Row::PITCH + Row::place(feature);
#pragma unroll
          for (int e = 0; e < VECTOR; ++e) store_shared(to + e * Row::PITCH, chunks[u].values[e]);
        }
      }
    }
  } else if constexpr (Row::IN_CHUNKS && Row::AS_IN_MEMORY) {
    constexpr int CHUNKS = FEATURES / VECTOR;
    const T* const x = static_cast<const T*>(arguments.x) + row0 * arguments.x_stride;
#pragma unroll 4
    for (int item = threadIdx.x; item < Tile::BM * CHUNKS; item += Tile::THREADS) {
      const int row = item / CHUNKS, chunk = item % CHUNKS;
      const bool is_there = row < rows;
      cp_async_16(region + row * Row::PITCH + chunk * 16,
                  x + (is_there ? row : 0) * arguments.x_stride + chunk * VECTOR, is_there);
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
  } else {  // rows of whole chunks, at any stride; or others, side by side, as one run
    constexpr int ITEMS = Tile::BM * FEATURES / VECTOR, OF_ROW = Row::IN_CHUNKS ? FEATURES / VECTOR : 1;
    const int64 stride = Row::IN_CHUNKS ? arguments.x_stride : VECTOR;  // from a row, or a chunk, to the next
    const int there = Row::IN_CHUNKS ? rows : rows * FEATURES;
    const T* const x = static_cast<const T*>(arguments.x) + row0 * arguments.x_stride;
#pragma unroll 1
    for (int item0 = threadIdx.x; item0 < ITEMS; item0 += CHUNKS_AHEAD * Tile::THREADS) {
      Chunk<T> chunks[CHUNKS_AHEAD];
#pragma unroll
      for (int u = 0; u < CHUNKS_AHEAD; ++u) {
        const int item = item0 + u * Tile::THREADS;
        const int left = Row::IN_CHUNKS ? (item / OF_ROW < there ? VECTOR : 0) : there - item * VECTOR;
        if (item < ITEMS) {
          chunks[u] = load_chunk(x + item / OF_ROW * stride + item % OF_ROW * VECTOR, left, true);
        }
      }
#pragma unroll
      for (int u = 0; u < CHUNKS_AHEAD; ++u) {
        const int item = item0 + u * Tile::THREADS;
        if (item >= ITEMS) continue;
        int row = item * VECTOR / FEATURES, feature = item * VECTOR % FEATURES;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
          store_shared(region + row * Row::PITCH + Row::place(feature), chunks[u].values[e]);
          if (++feature == FEATURES) feature = 0, ++row;
        }
      }
    }
  }
}

// A warp's unit of work: its first plane, 8-output tile and row.
template <typename Tile, typename Stage>
struct ChainUnit {
  static constexpr int ROW_TILES = Tile::BM / (16 * Stage::MT);
  static constexpr int COUNT = Stage::PLANES / Stage::JT * ROW_TILES * Stage::UNITS_OF_PLANE;
  int tile, row, plane;
  __device__ __forceinline__ explicit ChainUnit(int index)
      : tile(index % Stage::UNITS_OF_PLANE * Stage::NT),
        row(index / Stage::UNITS_OF_PLANE % ROW_TILES * Stage::MT * 16),
        plane(index / Stage::UNITS_OF_PLANE / ROW_TILES * Stage::JT) {}
  // Of its first row and value in the region that the stage reads.
  __device__ __forceinline__ uint32 address(uint32 from) const {
    return from + row * Stage::Row::PITCH + plane * Stage::Row::FILLED * Stage::SIZE;
  }
};

template <typename Stage>
using ChainSums = float[Stage::JT][Stage::MT][Stage::NT][4];

// The weights of a step of a unit: a lane's two words of each tile. They are loaded one step ahead, those of a
// unit's first step during the previous unit.
template <typename Stage>
struct StepWeights {
  uint2 words[Stage::JT][Stage::NT];
  // `weights`: the lane's of the stage.
  template <typename Tile>
  __device__ __forceinline__ void load(const unsigned char* weights, const ChainUnit<Tile, Stage>& unit, int step) {
    constexpr int OF_TILE = Stage::STEPS * 256;
    const unsigned char* const first =
        weights + (int64(unit.plane) * Stage::TILES + unit.tile) * OF_TILE + step * 256;
#pragma unroll
    for (int j = 0; j < Stage::JT; ++j)
#pragma unroll
      for (int n = 0; n < Stage::NT; ++n) {
        // A tile that does not exist gets the weights of another one; its results are not stored.
        const bool is_there = Stage::TILES % Stage::NT == 0 || unit.tile + n < Stage::TILES;
        words[j][n] =
            *reinterpret_cast<const uint2*>(first + int64(j * Stage::TILES + (is_there ? n : 0)) * OF_TILE);
      }
  }
};

// sums += x w over a step, by tensor cores. `from` is the lane's address for `ldmatrix`, in the unit's first plane.
template <typename Tile, typename Stage>
__device__ __forceinline__ void multiply_step(ChainSums<Stage>& sums, uint32 from, const StepWeights<Stage>& b) {
  constexpr int MT = Stage::MT, NT = Stage::NT;
#pragma unroll
  for (int j = 0; j < Stage::JT; ++j)
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      uint32 a[4];
      ldmatrix_x4(a, from + m * 16 * Stage::Row::PITCH + j * Stage::Row::FILLED * Stage::SIZE);
      if constexpr (Stage::SIZE == 2) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          mma_m16n8k16<typename Tile::Element>(sums[j][m][n], a, b.words[j][n].x, b.words[j][n].y);
        }
      } else {
        uint32 big[4], small[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Split<Stage::PRODUCTS> split(__uint_as_float(a[e]));
          big[e] = split.big, small[e] = split.small;
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const Split<Stage::PRODUCTS> w0(__uint_as_float(b.words[j][n].x)), w1(__uint_as_float(b.words[j][n].y));
          if constexpr (Stage::PRODUCTS == 1) {
            mma_m16n8k8_tf32(sums[j][m][n], big, w0.big, w1.big);
          } else {  // the smallest first
            float part[4] = {};
            mma_m16n8k8_tf32(part, small, w0.big, w1.big);
            mma_m16n8k8_tf32(part, big, w0.small, w1.small);
            mma_m16n8k8_tf32(part, big, w0.big, w1.big);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[j][m][n][e] += part[e];
          }
        }
      }
    }
}

template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T values[2];
};

// The same by ordinary arithmetic, with the outputs distributed over lanes as by tensor cores. `from` is the address of the lane's
// first row; `weights` are those of its two columns of the unit's first tile.
template <typename Tile, typename Stage>
__device__ __forceinline__ void add_products(ChainSums<Stage>& sums, uint32 from, const unsigned char* weights,
                                             int tile) {
  using T = typename Tile::Element;
  constexpr int OF_L = Stage::TILES * 8 * Stage::SIZE;
#pragma unroll 4
  for (int l = 0; l < Stage::C; ++l)
#pragma unroll
    for (int j = 0; j < Stage::JT; ++j) {
      float x[Stage::MT][2];
#pragma unroll
      for (int m = 0; m < Stage::MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          x[m][half] = load_shared<T>(from + (m * 16 + half * 8) * Stage::Row::PITCH +
                                      (j * Stage::Row::FILLED + l) * Stage::SIZE);
        }
#pragma unroll
      for (int n = 0; n < Stage::NT; ++n) {
        const bool is_there = Stage::TILES % Stage::NT == 0 || tile + n < Stage::TILES;
        const T* const w = reinterpret_cast<const T*>(weights + int64(j * Stage::C + l) * OF_L) + (is_there ? n : 0) * 8;
        const Pair<T> both = *reinterpret_cast<const Pair<T>*>(w);
        const float w0 = to_float(both.values[0]), w1 = to_float(both.values[1]);
#pragma unroll
        for (int m = 0; m < Stage::MT; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sums[j][m][n][e] = fmaf(x[m][e / 2], e % 2 == 0 ? w0 : w1, sums[j][m][n][e]);
          }
      }
    }
}

// The results of a unit, and where in the next row of features they are stored.
template <typename Tile, typename After, int AT>
struct ChainResults {
  using T = typename Tile::Element;
  using Stage = typename Tile::template StageAt<AT>;
  using Into = typename Tile::template RowAt<AT + 1>;
  using Results = typename Tile::template ResultsOf<AT>;
  static constexpr bool IS_LAST = AT + 1 == Tile::LENGTH, IS_HIDDEN = AT + 1 == Tile::AHEAD;
  const MlpArguments& arguments;
  const unsigned char* const weights;  // of the stage
  const uint32 from, into;
  const int64 row0;
  const int rows;

  __device__ __forceinline__ float finished(float sum, int row, int feature, float bias) const {
    if constexpr (IS_HIDDEN) sum = activate<After::MIDDLE>(sum + bias);
    if constexpr (IS_LAST) {
      sum = activate<After::ACTIVATION>(sum + bias);
      if (After::RESIDUAL && row < rows) {
        const T* const residual = static_cast<const T*>(arguments.residual);
        const int64 stride = arguments.residual_stride;
        sum += to_float(Tile::BATCH_LAST ? residual[feature * stride + row0 + row]
                                         : residual[(row0 + row) * stride + feature]);
      }
    }
    return sum;
  }

  __device__ __forceinline__ float bias_of(int feature) const {
    if constexpr (IS_LAST && After::BIAS) return to_float(static_cast<const T*>(arguments.bias)[feature]);
    if constexpr (IS_HIDDEN && After::HIDDEN_BIAS) return to_float(static_cast<const T*>(arguments.hidden_bias)[feature]);
    return 0.0f;
  }

  // Stores the results. Returns whether all sums are finite, if three TF32 products computed them.
  __device__ __forceinline__ bool put(const ChainSums<Stage>& sums, const ChainUnit<Tile, Stage>& unit) const {
    const int row = unit.row + threadIdx.x % 32 / 4, column0 = unit.tile * 8 + threadIdx.x % 4 * 2;
    constexpr bool IN_PAIRS = Results::COLUMN_PAIRS || Results::J_PAIRS;
    constexpr int SECOND_J = Results::J_PAIRS ? 1 : 0;
    bool are_finite = true;
#pragma unroll
    for (int n = 0; n < Stage::NT; ++n)
#pragma unroll
      for (int j = 0; j < Stage::JT; j += 1 + SECOND_J)
#pragma unroll
        for (int e = 0; e < (Results::COLUMN_PAIRS ? 1 : 2); ++e) {
          const int plane = unit.plane + j, k = Results::output_of(column0 + n * 8 + e);
          if (Stage::B % (8 * Stage::NT) != 0 && k >= Stage::B) continue;
          const int feature = Results::feature(plane, k);
          const int next = Results::J_PAIRS ? feature + 1 : Results::feature(plane, k + Results::APART);
          const uint32 to = into + row * Into::PITCH + Into::place(feature);
          const float bias = bias_of(feature), next_bias = IN_PAIRS ? bias_of(next) : 0.0f;
#pragma unroll
          for (int m = 0; m < Stage::MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int below = m * 16 + half * 8;
              const float first = sums[j][m][n][half * 2 + e];
              if constexpr (IN_PAIRS) {
                const float second = sums[j + SECOND_J][m][n][half * 2 + (Results::COLUMN_PAIRS ? 1 : e)];
                if (Stage::PRODUCTS == 3) are_finite = are_finite && is_finite(first) && is_finite(second);
                store_pair<T>(to + below * Into::PITCH, finished(first, row + below, feature, bias),
                              finished(second, row + below, next, next_bias));
              } else {
                if (Stage::PRODUCTS == 3) are_finite = are_finite && is_finite(first);
                store_shared(to + below * Into::PITCH, from_float<T>(finished(first, row + below, feature, bias)));
              }
            }
        }
    return are_finite;
  }

  // Recomputes results that are NaN only because three TF32 products turn an infinity into NaN.
  __device__ __noinline__ void mend() const {
    constexpr int COLUMNS = Stage::TILES * 8;
    const float* const w = reinterpret_cast<const float*>(weights);
#pragma unroll 1
    for (int at = threadIdx.x; at < Tile::BM * Stage::PLANES * COLUMNS; at += Tile::THREADS) {
      const int column = at % COLUMNS, plane = at / COLUMNS % Stage::PLANES, row = at / COLUMNS / Stage::PLANES;
      const int k = Results::output_of(column), feature = Results::feature(plane, k);
      const uint32 to = into + row * Into::PITCH + Into::place(feature);
      if (k >= Stage::B || is_finite(load_shared<float>(to))) continue;
      float sum = 0.0f;
#pragma unroll 1
      for (int l = 0; l < Stage::C; ++l) {
        const uint32 x = from + row * Stage::Row::PITCH + (plane * Stage::Row::FILLED + l) * Stage::SIZE;
        sum = fmaf(load_shared<float>(x), w[packed_place<Stage>(plane, column, l)], sum);
      }
      store_shared(to, finished(sum, row, feature, bias_of(feature)));
    }
  }
};

// All stages from one on. A stage's results are there for all threads when it has ended.
template <typename Tile, typename After, int AT>
__device__ __forceinline__ void run_stages(uint32 from, uint32 into, const MlpArguments& arguments, int64 row0,
                                           int rows) {
  using Stage = typename Tile::template StageAt<AT>;
  const unsigned char* const weights =
      static_cast<const unsigned char*>(arguments.weights) + Tile::template packed_before<AT>();
  const ChainResults<Tile, After, AT> results{arguments, weights, from, into, row0, rows};
  const int lane = threadIdx.x % 32;
  bool are_finite = true;
  fill_up<Tile, typename Tile::template RowAt<AT + 1>>(into);
  const int warp = threadIdx.x / 32;
  using Unit = ChainUnit<Tile, Stage>;
  if constexpr (Stage::PRODUCTS == 0) {
#pragma unroll 1
    for (int index = warp; index < Unit::COUNT; index += Tile::WARPS) {
      const Unit unit(index);
      const unsigned char* const w =
          weights + packed_place<Stage>(unit.plane, unit.tile * 8 + lane % 4 * 2, 0) * Stage::SIZE;
      ChainSums<Stage> sums = {};
      add_products<Tile, Stage>(sums, unit.address(from) + lane / 4 * Stage::Row::PITCH, w, unit.tile);
      results.put(sums, unit);
    }
  } else {
    StepWeights<Stage> ahead;
    if (warp < Unit::COUNT) ahead.load(weights + lane * 8, Unit(warp), 0);
#pragma unroll 1
    for (int index = warp; index < Unit::COUNT; index += Tile::WARPS) {
      const Unit unit(index), next(index + Tile::WARPS);
      const uint32 x = unit.address(from) + lane % 16 * Stage::Row::PITCH + lane / 16 * 16;
      ChainSums<Stage> sums = {};
#pragma unroll 2
      for (int step = 0; step < Stage::STEPS; ++step) {
        const StepWeights<Stage> b = ahead;
        if (step + 1 < Stage::STEPS) {
          ahead.load(weights + lane * 8, unit, step + 1);
        } else if (index + Tile::WARPS < Unit::COUNT) {
          ahead.load(weights + lane * 8, next, 0);
        }
        multiply_step<Tile, Stage>(sums, x + step * 32, b);
      }
      are_finite = results.put(sums, unit) && are_finite;
    }
  }
  if constexpr (Stage::PRODUCTS == 3) {
    if (__syncthreads_or(!are_finite)) {
      results.mend();
      __syncthreads();
    }
  } else {
    __syncthreads();
  }
  if constexpr (AT + 1 < Tile::LENGTH) run_stages<Tile, After, AT + 1>(into, from, arguments, row0, rows);
}

// Writes a tile's results.
template <typename Tile>
__device__ __forceinline__ void store_y(uint32 region, const MlpArguments& arguments, int64 row0, int rows) {
  using T = typename Tile::Element;
  using Row = typename Tile::Y;
  constexpr int VECTOR = Tile::VECTOR, FEATURES = Row::FEATURES;
  if constexpr (Tile::BATCH_LAST) {
    T* const y = static_cast<T*>(arguments.y) + row0;
    const bool is_aligned = arguments.y_stride % VECTOR == 0;
#pragma unroll 2
    for (int item = threadIdx.x; item < FEATURES * (Tile::BM / VECTOR); item += Tile::THREADS) {
      const int feature = feature_of<FEATURES>(item), row = row_of<FEATURES, VECTOR>(item);
      const int there = between(0, rows - row, VECTOR);
      Chunk<T> chunk;
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        const uint32 from = region + (row + e) * Row::PITCH + feature * Tile::SIZE;
        if constexpr (Tile::SIZE == 4) {
          chunk.values[e] = load_shared<T>(from);
        } else {
          chunk.values[e].bits = static_cast<uint16>(load_shared_16_bits(from));
        }
      }
      T* const to = y + feature * arguments.y_stride + row;
      if (is_aligned && there == VECTOR) {
        store_16_bytes(to, chunk.words.x, chunk.words.y, chunk.words.z, chunk.words.w);
      } else {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
          if (e < there) to[e] = chunk.values[e];
        }
      }
    }
  } else {
    constexpr int OF_ROW = Row::IN_CHUNKS ? FEATURES / VECTOR : 1;
    const int chunks = Row::IN_CHUNKS ? rows * OF_ROW : rows * FEATURES / VECTOR;
    T* const y = static_cast<T*>(arguments.y) + row0 * arguments.y_stride;
#pragma unroll 4
    for (int item = threadIdx.x; item < chunks; item += Tile::THREADS) {
      const int at = Row::IN_CHUNKS ? item / OF_ROW * Row::PITCH + item % OF_ROW * 16 : item * 16;
      const uint4 words = load_shared_4_words(region + at);
      T* const to = Row::IN_CHUNKS ? y + item / OF_ROW * arguments.y_stride + item % OF_ROW * VECTOR
                                   : y + int64(item) * VECTOR;
      store_16_bytes(to, words.x, words.y, words.z, words.w);
    }
    if constexpr (!Row::IN_CHUNKS) {
      const int at = chunks * VECTOR + threadIdx.x;
      if (static_cast<int>(threadIdx.x) < VECTOR && at < rows * FEATURES) {
        if constexpr (Tile::SIZE == 4) {
          y[at] = load_shared<T>(region + at * Tile::SIZE);
        } else {
          y[at].bits = static_cast<uint16>(load_shared_16_bits(region + at * Tile::SIZE));
        }
      }
    }
  }
}

// The arguments of a block that has a share of the outputs: those of one sibling, or a group's of them.
template <typename Tile>
__device__ __forceinline__ MlpArguments of_share(const MlpArguments& all, int share) {
  using T = typename Tile::Element;
  if constexpr (Tile::SHARES == 1) return all;
  const auto from = [&](const void* first, int features, int64 stride) {
    return static_cast<const T*>(first) + int64(features) * (Tile::BATCH_LAST ? stride : 1);
  };
  MlpArguments own = all;
  own.x = from(all.x, share % Tile::GROUPS * Tile::X::FEATURES, all.x_stride);
  own.weights = static_cast<const unsigned char*>(all.weights) + share * Tile::PACKED_BYTES;
  own.bias = static_cast<const T*>(all.bias) + share * Tile::Y::FEATURES;
  own.hidden_bias = static_cast<const T*>(all.hidden_bias) + share * Tile::HIDDEN_FEATURES;
  own.residual = from(all.residual, share * Tile::Y::FEATURES, all.residual_stride);
  own.y = const_cast<T*>(from(all.y, share * Tile::Y::FEATURES, all.y_stride));
  return own;
}

// Blocks that compute shares of the same row tile are neighbours in the grid.
template <typename Tile, typename After>
__device__ __forceinline__ void chain_mma_kernel(const MlpArguments& all) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32 first = __shfl_sync(~0u, shared_address(shared), 0), second = first + Tile::FIRST_BYTES;
  prefetch_share<Tile::THREADS>(all.weights, Tile::SHARES * Tile::PACKED_BYTES, blockIdx.x, gridDim.x);
  const MlpArguments arguments = of_share<Tile>(all, blockIdx.x % Tile::SHARES);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64 begin = blockIdx.x / Tile::SHARES * arguments.rows_per_block;
  const int64 end =
      begin + arguments.rows_per_block < arguments.batch ? begin + arguments.rows_per_block : arguments.batch;
#pragma unroll 1
  for (int64 row0 = begin; row0 < end; row0 += Tile::BM) {
    const int rows = rows_inside<Tile::BM>(end - row0);
    load_x<Tile>(first, arguments, row0, rows);
    fill_up<Tile, typename Tile::X>(first);
    __syncthreads();
    run_stages<Tile, After, 0>(first, second, arguments, row0, rows);
    store_y<Tile>(Tile::LENGTH % 2 == 0 ? first : second, arguments, row0, rows);
    __syncthreads();
  }
}

// Packs a stage's weights, with zeros where a tile or a step exceeds the pattern.
template <typename Tile, int AT>
__device__ __forceinline__ void pack_stages(const ChainPackArguments& arguments) {
  using T = typename Tile::Element;
  using Stage = typename Tile::template StageAt<AT>;
  constexpr int COLUMNS = Stage::TILES * 8, LS = Stage::STEPS * Stage::STEP;
  T* const packed = reinterpret_cast<T*>(static_cast<unsigned char*>(arguments.packed) + Tile::template packed_before<AT>());
  const int64 of_share = int64(Stage::PLANES) * COLUMNS * LS, all = Tile::SHARES * of_share;
  for (int64 at = int64(blockIdx.x) * blockDim.x + threadIdx.x; at < all; at += int64(gridDim.x) * blockDim.x) {
    const int l = static_cast<int>(at % LS), column = static_cast<int>(at / LS % COLUMNS);
    const int share = static_cast<int>(at / of_share), plane = static_cast<int>(at % of_share / LS / COLUMNS);
    const int sibling = share / Tile::GROUPS, k = Tile::template ResultsOf<AT>::output_of(column);
    T value = from_float<T>(0.0f);
    if (k < Stage::B && l < Stage::C) {
      const int64 i = share % Tile::GROUPS * Stage::A + plane / Stage::D;
      const int chain = Tile::AHEAD > 0 ? Tile::template chain_of<AT>() : sibling;
      constexpr int PLACE = Tile::template place_of<AT>();
      const int64* const stride = arguments.strides[chain][PLACE];
      value = static_cast<const T*>(
          arguments.weights[chain][PLACE])[i * stride[0] + k * stride[1] + l * stride[2] + plane % Stage::D * stride[3]];
    }
    packed[share * (Tile::PACKED_BYTES / Stage::SIZE) + packed_place<Stage>(plane, column, l)] = value;
  }
  if constexpr (AT + 1 < Tile::LENGTH) pack_stages<Tile, AT + 1>(arguments);
}

template <typename Tile> __device__ __forceinline__ void chain_mma_pack_kernel(const ChainPackArguments& arguments) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  pack_stages<Tile, 0>(arguments);
}
