// Factors of any size on tensor cores, rows of x and y at any address (batch first, sm_80 and up).
//
// The other families load consecutive j in 16-byte chunks, which needs certain d and aligned rows. Here
// aligned chunks of x are copied to shared memory unchanged, so that a run of features keeps its offset
// in its first chunk, and threads gather the elements of the tensor cores' operands one by one. Sums are
// padded with zeros to whole steps and outputs to whole tiles, only in registers. Results are stored in
// shared memory in the order of y, and written in chunks. The first and last chunk of a run contain
// elements of other runs, too: their parts are written in pieces of 8, 4 and 2 bytes.
//
// A block computes a column: GROUPS whole blocks i, or JC values of j and NB outputs k of one i. It iterates over
// tiles of BM rows. Long sums are computed in PARTS and stay in registers between them. x streams through a ring of
// stages, one part of a tile each. The column's weights are in shared memory in fragment order (GatherWeights): the
// block arranges them, or copies them as `gather_mma_pack_kernel` packed them, once or with each part of a tile.
//
// PRODUCTS of two numbers: 1; 3 of TF32 numbers for fp32, as in mma_tf32x3.cuh; or 0 for short sums, which
// are added by ordinary arithmetic.
#pragma once

#include "common/gather_mma_tile.cuh"
#include "common/pdl.cuh"
#include "common/smem_layout.cuh"
#include "common/tf32_split.cuh"
#include "common/weight_order.cuh"

// Stores the column's weights in fragment order, with zeros behind them.
template <typename P, typename Tile>
__device__ __forceinline__ void load_weights(unsigned char* weights, const GatherAddresses<P, Tile>& at) {
  using T = typename Tile::Element;
  for (int chunk = threadIdx.x; chunk < Tile::W_BYTES / 16; chunk += Tile::THREADS) {
    *reinterpret_cast<uint4*>(weights + chunk * 16) = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const Arguments& a = at.arguments;
  const int elements = at.column.groups * at.column.outputs * P::C * Tile::JC;
  const bool in_order = a.weight_stride_d == 1 && a.weight_stride_c == P::D &&
                        a.weight_stride_b == int64(P::C) * P::D && a.weight_stride_a == int64(P::B) * P::C * P::D;
  if (Tile::WHOLE_J && in_order) {  // one run of elements
    const T* const first =
        static_cast<const T*>(a.weight) + (int64(at.column.i0) * P::B + at.column.k0) * P::C * P::D;
    const T* const end = static_cast<const T*>(a.weight) + int64(P::A) * P::B * P::C * P::D;
    const int into = into_chunk(first), chunks = (into + elements + Tile::VECTOR - 1) / Tile::VECTOR;
    constexpr int AHEAD = 4;  // chunks on their way
#pragma unroll 1
    for (int chunk0 = threadIdx.x; chunk0 < chunks; chunk0 += AHEAD * Tile::THREADS) {
      uint4 words[AHEAD];
      bool is_chunk[AHEAD];
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        const int chunk = chunk0 + u * Tile::THREADS;
        const T* const from = first + (chunk * Tile::VECTOR - into);
        is_chunk[u] = chunk < chunks && from >= static_cast<const T*>(a.weight) && from + Tile::VECTOR <= end;
        if (is_chunk[u]) words[u] = *reinterpret_cast<const uint4*>(from);
      }
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        const int begin = (chunk0 + u * Tile::THREADS) * Tile::VECTOR - into;
        if (begin >= elements) continue;
        alignas(16) T values[Tile::VECTOR];
        if (is_chunk[u]) *reinterpret_cast<uint4*>(values) = words[u];
        const int of_first = begin < 0 ? 0 : begin;  // the first element that is there
        int j = of_first % P::D, l = of_first / P::D % P::C, k = of_first / (P::D * P::C);
#pragma unroll
        for (int e = 0; e < Tile::VECTOR; ++e) {
          const int n = begin + e;
          if (n < 0 || n >= elements) continue;
          *reinterpret_cast<T*>(weights + weight_place<Tile>(k / Tile::KB, k % Tile::KB, l, j)) =
              is_chunk[u] ? values[e] : first[n];
          if (++j == P::D) {
            j = 0;
            if (++l == P::C) l = 0, ++k;
          }
        }
      }
    }
    return;
  }
#pragma unroll 8
  for (int e = threadIdx.x; e < elements; e += Tile::THREADS) {
    const int j = e % Tile::JC, l = e / Tile::JC % P::C, k = e / (Tile::JC * P::C) % at.column.outputs;
    const int g = e / (Tile::JC * P::C) / at.column.outputs;
    if (j < at.column.js) *reinterpret_cast<T*>(weights + weight_place<Tile>(g, k, l, j)) = at.weight(g, k, l, j);
  }
}

// Starts the copies of packed weights.
template <typename Tile, int BYTES>
__device__ __forceinline__ void copy_packed(uint32 to, const unsigned char* from) {
#pragma unroll 4
  for (int at = threadIdx.x * 16; at < BYTES; at += Tile::THREADS * 16) cp_async_16(to + at, from + at, true);
}

// Fills the ring's stages, part after part and tile after tile, ahead of the products. All chunks of a stage are
// written: those of rows and features that do not exist with zeros.
template <typename P, typename Tile>
struct GatherLoader {
  using T = typename Tile::Element;
  static constexpr uint64 RUN_BYTES = uint64(P::D) * Tile::SIZE;  // from a run to the next
  const GatherAddresses<P, Tile>& at;
  const uint32 ring;
  const int64 row_tiles;
  int64 tile, step;
  int part = 0, slot = 0;

  __device__ __forceinline__ GatherLoader(const GatherAddresses<P, Tile>& addresses, uint32 stages)
      : at(addresses),
        ring(stages),
        row_tiles((addresses.arguments.batch + Tile::BM - 1) / Tile::BM),
        tile(blockIdx.x / Tile::COLUMNS),
        step(gridDim.x / Tile::COLUMNS) {}

  // Whether all chunks of a tile are inside the operand, and all features contiguous.
  __device__ __forceinline__ bool is_inside(const T* first, int rows, int runs, int length) const {
    const int64 stride = at.arguments.x_batch_stride;
    const T* const last = first + (rows - 1) * stride + (runs - 1) * P::D;
    const int behind = (into_chunk(last) + length) % Tile::VECTOR;
    const T* const end = last + length + (behind == 0 ? 0 : Tile::VECTOR - behind);
    return at.arguments.x_feature_stride == 1 && stride >= 0 && stride < 1 << 28 &&
           first - into_chunk(first) >= static_cast<const T*>(at.arguments.x) && end <= at.x_end;
  }

  // A chunk of a tile that is inside. `x` and `row_bytes` are in bytes.
  __device__ __forceinline__ void copy_inside(uint32 stage, const char* x, uint32 row_bytes, int rows, int runs,
                                              int length_bytes, unsigned item) const {
    const unsigned chunk = item % Tile::X_CHUNKS, run = item / Tile::X_CHUNKS % Tile::X_RUNS;
    const unsigned row = item / (Tile::X_CHUNKS * Tile::X_RUNS);
    const char* first = x + uint64(row) * row_bytes;
    if constexpr (!Tile::WHOLE_J) first += run * RUN_BYTES;
    const int into = static_cast<int>(reinterpret_cast<uint64>(first) % 16), begin = static_cast<int>(chunk * 16);
    const bool is_there = row < rows && begin < into + length_bytes && (Tile::WHOLE_J || run < runs);
    cp_async_16(stage + row * Tile::X_PITCH + (run * Tile::X_CHUNKS + chunk) * 16, first - into + begin,
                is_there);
  }

  // A chunk of any tile, whose first element is the `begin`th of a run.
  __device__ __forceinline__ void copy_elements(uint32 to, const T* first, int begin, int length) const {
#pragma unroll 1
    for (int e = 0; e < Tile::VECTOR; ++e) {
      const bool is_there = 0 <= begin + e && begin + e < length;
      const T value = is_there ? first[(begin + e) * at.arguments.x_feature_stride] : from_float<T>(0.0f);
      store_shared(to + e * Tile::SIZE, value);
    }
  }

  // Starts the copies of the next stage, if there is one.
  __device__ __forceinline__ void next() {
    if (tile < row_tiles) {
      const uint32 stage = ring + slot * Tile::STAGE_BYTES;
      const int rows = rows_inside<Tile::BM>(at.arguments.batch - tile * Tile::BM), l0 = part * Tile::KL;
      const int ls = P::C - l0 < Tile::KL ? P::C - l0 : Tile::KL, runs = Tile::WHOLE_J ? 1 : ls;
      const int length = Tile::WHOLE_J ? (Tile::GROUPS > 1 ? at.column.groups * P::C : ls) * P::D : at.column.js;
      const T* const x = at.x_row(tile * Tile::BM) + int64(l0) * P::D * at.arguments.x_feature_stride;
      constexpr int ITEMS = Tile::BM * Tile::X_RUNS * Tile::X_CHUNKS, ROUNDS = ITEMS / Tile::THREADS;
      if (is_inside(x, rows, runs, length)) {
        const char* const bytes = reinterpret_cast<const char*>(x);
        const uint32 row_bytes = static_cast<uint32>(at.arguments.x_batch_stride * Tile::SIZE);
#pragma unroll 4
        for (int round = 0; round < ROUNDS; ++round) {
          copy_inside(stage, bytes, row_bytes, rows, runs, length * Tile::SIZE,
                      threadIdx.x + round * Tile::THREADS);
        }
        if (static_cast<int>(threadIdx.x) < ITEMS % Tile::THREADS) {
          copy_inside(stage, bytes, row_bytes, rows, runs, length * Tile::SIZE,
                      threadIdx.x + ROUNDS * Tile::THREADS);
        }
      } else {
#pragma unroll 1
        for (int item = threadIdx.x; item < ITEMS; item += Tile::THREADS) {
          const int chunk = item % Tile::X_CHUNKS, run = item / Tile::X_CHUNKS % Tile::X_RUNS;
          const int row = item / (Tile::X_CHUNKS * Tile::X_RUNS);
          const T* const first =
              x + row * at.arguments.x_batch_stride + run * P::D * at.arguments.x_feature_stride;
          const int begin = chunk * Tile::VECTOR - into_chunk(first);
          const uint32 to = stage + row * Tile::X_PITCH + (run * Tile::X_CHUNKS + chunk) * 16;
          const bool is_dense = at.arguments.x_feature_stride == 1, is_there = row < rows && run < runs;
          const T* const from = first + begin;
          if (is_dense && from >= static_cast<const T*>(at.arguments.x) && from + Tile::VECTOR <= at.x_end) {
            cp_async_16(to, from, is_there && begin < length);
          } else {
            copy_elements(to, first, begin, is_there ? length : 0);
          }
        }
      }
      if constexpr (Tile::STREAMED) {
        copy_packed<Tile, Tile::PART_BYTES>(stage + Tile::X_BYTES, at.packed + part * Tile::PART_BYTES);
      }
      if (++slot == Tile::STAGES) slot = 0;
      if (++part == Tile::PARTS) part = 0, tile += step;
    }
    cp_async_commit_group();
  }
};

// How the elements of the tensor cores' operand are loaded: one by one; as words of two, which begin at even offsets;
// or by `ldmatrix`, where those of a step are contiguous in chunks.
enum class GatherPlaces { ANY, EVEN, IN_CHUNKS };

// The address of a lane's elements of a row of x in a stage: the word of its first l in a step. Later steps have the
// same offset in their chunks, because a step is a multiple of a chunk.
template <typename Tile>
struct GatherRow {
  static constexpr int WORD = 4 / Tile::SIZE;  // l of a word
  int at[WORD];
  __device__ __forceinline__ void locate(const IntoChunk<Tile>& into, int row, int l) {
#pragma unroll
    for (int e = 0; e < WORD; ++e) {
      at[e] = row * Tile::X_PITCH + (l + e) * Tile::L_PITCH + into.at(row, l + e) * Tile::SIZE;
    }
  }
};

// A word of an operand: in 16 bit two neighbouring l, of fp32 one. `left` is how many l there are. Of a unit of
// two planes, the words of both. EVEN: two elements that lie side by side, the first at an even place, come at
// once.
template <typename P, typename Tile, bool EVEN>
__device__ __forceinline__ void gather(uint32 (&words)[Tile::JT], uint32 x, const GatherRow<Tile>& row,
                                       int left) {
  constexpr int SIZE = Tile::SIZE;
  if constexpr (Tile::JT == 2) {
    const auto pair = [&](uint32 at, bool is_there) {  // of two j
      if constexpr (SIZE == 4) {
        if (!is_there) return make_uint2(0, 0);
        return EVEN ? load_shared_2_words(at) : make_uint2(load_shared_word(at), load_shared_word(at + SIZE));
      } else {
        if (!is_there) return 0u;
        return EVEN ? load_shared_word(at) : load_shared_16_bits(at) | load_shared_16_bits(at + SIZE) << 16;
      }
    };
    if constexpr (SIZE == 4) {
      const uint2 both = pair(x + row.at[0], left > 0);
      words[0] = both.x, words[1] = both.y;
    } else {
      const uint32 low = pair(x + row.at[0], left > 0), high = pair(x + row.at[1], left > 1);
      words[0] = (low & 0xffffu) | high << 16, words[1] = low >> 16 | (high & 0xffff0000u);
    }
  } else if constexpr (SIZE == 4 || (EVEN && Tile::L_PAIRS)) {
    words[0] = left > 0 ? load_shared_word(x + row.at[0]) : 0;
  } else {
    const uint32 low = left > 0 ? load_shared_16_bits(x + row.at[0]) : 0;
    const uint32 high = left > 1 ? load_shared_16_bits(x + row.at[1]) : 0;
    words[0] = low | high << 16;
  }
}

// sums += x w over a step, for the tiles of a unit; over the first `length` of its l, if not IS_WHOLE.
template <typename P, typename Tile, GatherPlaces PLACES, bool IS_WHOLE>
__device__ __forceinline__ void multiply_step(float (&sums)[Tile::TILES][Tile::NT][4], uint32 x,
                                              const GatherRow<Tile> (&rows)[Tile::MT][2], uint32 weights,
                                              int length) {
  constexpr int TILES = Tile::TILES, NT = Tile::NT, HALF = Tile::STEP / 2, JT = Tile::JT;
  const int left = length - threadIdx.x % 4 * GatherRow<Tile>::WORD;
  uint32 a[TILES][4];
  [[maybe_unused]] uint32 small[TILES][4];
#pragma unroll
  for (int m = 0; m < Tile::MT; ++m) {
    [[maybe_unused]] uint32 matrices[4];
    constexpr bool BY_MATRICES = PLACES == GatherPlaces::IN_CHUNKS && IS_WHOLE;
    if constexpr (BY_MATRICES) {  // lanes name the rows of 16 bytes, other ones than those of their words
      const int lane = threadIdx.x % 32, rows_on = lane % 16 - lane / 4;
      ldmatrix_x4(matrices, x + rows[m][0].at[0] + rows_on * Tile::X_PITCH + lane / 16 * 16 - lane % 4 * 4);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int l = e / 2 * HALF;
      uint32 words[JT];
      if constexpr (BY_MATRICES) {
        words[0] = matrices[e];
      } else {
        gather<P, Tile, PLACES != GatherPlaces::ANY>(words, x + l * Tile::L_PITCH, rows[m][e % 2],
                                                     IS_WHOLE ? Tile::STEP : left - l);
      }
#pragma unroll
      for (int j = 0; j < JT; ++j) {
        a[m * JT + j][e] = words[j];
        if constexpr (Tile::SIZE == 4) {
          const Split<Tile::PRODUCTS> split(__uint_as_float(words[j]));
          a[m * JT + j][e] = split.big, small[m * JT + j][e] = split.small;
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < JT; ++j) {
      const uint2 b = load_shared_2_words(weights + j * Tile::PLANE_BYTES + n * 256);
      if constexpr (Tile::SIZE == 2) {
#pragma unroll
        for (int m = j; m < TILES; m += JT) mma_m16n8k16<typename Tile::Element>(sums[m][n], a[m], b.x, b.y);
      } else {
        const Split<Tile::PRODUCTS> w0(__uint_as_float(b.x)), w1(__uint_as_float(b.y));
#pragma unroll
        for (int m = j; m < TILES; m += JT) {
          if constexpr (Tile::PRODUCTS == 1) {
            mma_m16n8k8_tf32(sums[m][n], a[m], w0.big, w1.big);
          } else {  // the smallest first
            float part[4] = {};
            mma_m16n8k8_tf32(part, small[m], w0.big, w1.big);
            mma_m16n8k8_tf32(part, a[m], w0.small, w1.small);
            mma_m16n8k8_tf32(part, a[m], w0.big, w1.big);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][n][e] += part[e];
          }
        }
      }
    }
}

// The same over the l of a part.
template <typename P, typename Tile, GatherPlaces PLACES>
__device__ __forceinline__ void multiply_steps(float (&sums)[Tile::TILES][Tile::NT][4], uint32 x,
                                               const GatherRow<Tile> (&rows)[Tile::MT][2], uint32 weights,
                                               int length) {
#pragma unroll 2
  for (int s = 0; s < length / Tile::STEP; ++s) {
    multiply_step<P, Tile, PLACES, true>(sums, x, rows, weights, Tile::STEP);
    x += Tile::STEP * Tile::L_PITCH, weights += Tile::STEP_BYTES;
  }
  if (P::C % Tile::STEP != 0 && length % Tile::STEP != 0) {
    multiply_step<P, Tile, PLACES, false>(sums, x, rows, weights, length % Tile::STEP);
  }
}

// sums += x w over the l of a part, for a unit.
template <typename P, typename Tile>
__device__ __forceinline__ void multiply_part(float (&sums)[Tile::TILES][Tile::NT][4], uint32 stage,
                                              uint32 weights, const IntoChunk<Tile>& into, int index,
                                              int length) {
  const GatherUnit<P, Tile> unit(index);
  const int quarter = threadIdx.x % 4, first_row = unit.first_row;
  uint32 x = stage + (unit.g * P::C * P::D + unit.j) * Tile::SIZE;
  uint32 w = weights + unit.plane * Tile::PLANE_BYTES + unit.k0 * (Tile::PRODUCTS == 0 ? Tile::SIZE : 32);
  GatherRow<Tile> rows[Tile::MT][2];
  if constexpr (Tile::NARROW) {
    using T = typename Tile::Element;
    const int row = first_row - threadIdx.x % 32 / 4 + threadIdx.x % 32;
#pragma unroll 2
    for (int l = 0; l < length; ++l) {
      rows[0][0].locate(into, row, l);
      const float value = load_shared<T>(x + rows[0][0].at[0]);
#pragma unroll
      for (int k = 0; k < P::B; ++k) {
        sums[0][0][k] = fmaf(value, load_shared<T>(w + l * Tile::STEP_BYTES + k * Tile::SIZE), sums[0][0][k]);
      }
    }
  } else if constexpr (Tile::PRODUCTS == 0) {
    using T = typename Tile::Element;
    w += quarter * 2 * Tile::SIZE;
#pragma unroll 2
    for (int l = 0; l < length; ++l) {
      float values[Tile::MT][2];
#pragma unroll
      for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows[m][half].locate(into, first_row + m * 16 + half * 8, l);
          values[m][half] = load_shared<T>(x + rows[m][half].at[0]);
        }
#pragma unroll
      for (int n = 0; n < Tile::NT; ++n) {
        const uint32 of_l = w + l * Tile::STEP_BYTES + n * 8 * Tile::SIZE;
        const float w0 = load_shared<T>(of_l), w1 = load_shared<T>(of_l + Tile::SIZE);
#pragma unroll
        for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[m][n][e] = fmaf(values[m][e / 2], e % 2 == 0 ? w0 : w1, sums[m][n][e]);
      }
    }
  } else {
    w += threadIdx.x % 32 * 8;
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[m][half].locate(into, first_row + m * 16 + half * 8, quarter * GatherRow<Tile>::WORD);
    if (Tile::MAY_BE_CHUNKS && into.are_chunks()) {
      constexpr GatherPlaces PLACES = Tile::MAY_BE_CHUNKS ? GatherPlaces::IN_CHUNKS : GatherPlaces::ANY;
      multiply_steps<P, Tile, PLACES>(sums, x, rows, w, length);
    } else if ((Tile::JT == 2 || Tile::L_PAIRS) && into.are_even()) {
      multiply_steps<P, Tile, GatherPlaces::EVEN>(sums, x, rows, w, length);
    } else {
      multiply_steps<P, Tile, GatherPlaces::ANY>(sums, x, rows, w, length);
    }
  }
}

// Stores a unit's results in shared memory, from where they are written to y.
template <typename P, typename Tile>
__device__ __forceinline__ void put_unit(uint32 results, const IntoChunk<Tile>& into, int index, int outputs,
                                         const float (&sums)[Tile::TILES][Tile::NT][4]) {
  using T = typename Tile::Element;
  constexpr bool ARE_ALL = P::B % Tile::NB == 0;
  const GatherUnit<P, Tile> unit(index);
  const int quarter = threadIdx.x % 4, first_row = unit.first_row;
  const uint32 of_plane = results + (unit.g * Tile::KB * P::D + unit.j) * Tile::SIZE;
  if constexpr (Tile::NARROW) {
    const int row = first_row - threadIdx.x % 32 / 4 + threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < P::B; ++k) {
      const uint32 to = of_plane + row * Tile::Y_PITCH + k * Tile::K_PITCH + into.at(row, k) * Tile::SIZE;
      store_shared(to, from_float<T>(sums[0][0][k]));
    }
  } else {
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + m * 16 + half * 8;
        const uint32 to = of_plane + row * Tile::Y_PITCH;
#pragma unroll
        for (int n = 0; n < Tile::NT; ++n) {
          const int k0 = unit.k0 + n * 8 + quarter * 2;
          const float (&first)[4] = sums[m * Tile::JT][n];
          if constexpr (Tile::K_PAIRS) {  // an even number of outputs, at even places
            if (ARE_ALL || k0 < outputs) {
              store_shared_word(to + k0 * Tile::K_PITCH + into.at(row, k0) * Tile::SIZE,
                                pack_pair<T>(first[half * 2], first[half * 2 + 1]));
            }
          } else {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int k = k0 + e;
              const uint32 place = to + k * Tile::K_PITCH + into.at(row, k) * Tile::SIZE;
              if (ARE_ALL || k < outputs) {
                if constexpr (Tile::JT == 1) {
                  store_shared(place, from_float<T>(first[half * 2 + e]));
                } else {
                  store_pair<T>(place, first[half * 2 + e], sums[m * 2 + 1][n][half * 2 + e]);
                }
              }
            }
          }
        }
      }
  }
}

// One element of y. If three products of TF32 numbers gave a value that is not finite, it is computed again, because
// they turn an infinity into NaN.
template <typename P, typename Tile>
__device__ __forceinline__ void write_element(float value, const GatherAddresses<P, Tile>& at, int64 row, int run,
                                              int n, typename Tile::Element* to) {
  if (Tile::PRODUCTS == 3 && !is_finite(value)) {
    const int g = Tile::WHOLE_J ? n / P::D / Tile::KB : 0, k = Tile::WHOLE_J ? n / P::D % Tile::KB : run;
    const int j = Tile::WHOLE_J ? n % P::D : n;
    const typename Tile::Element* const x = at.x_row(row) + (g * P::C * P::D + j) * at.arguments.x_feature_stride;
    value = 0.0f;
#pragma unroll 1
    for (int l = 0; l < P::C; ++l) {
      value = fmaf(to_float(x[l * P::D * at.arguments.x_feature_stride]), to_float(at.weight(g, k, l, j)), value);
    }
  }
  *to = from_float<typename Tile::Element>(value);
}

// Copies elements [low, high) of a chunk, which begins or ends with them, from shared memory in at most three pieces
// of 8, 4 and 2 bytes (of fp32 two), each at a multiple of its size.
template <typename T>
__device__ __forceinline__ void copy_end(T* chunk, uint32 from, int low, int high) {
  constexpr int SIZE = sizeof(T), HALF = 8 / SIZE;  // elements of 8 bytes
  const bool is_first = low == 0;                   // the piece at the beginning of the chunk
  const int count = high - low;
  if (count & HALF) {
    const int at = is_first ? 0 : HALF;
    const uint2 words = load_shared_2_words(from + at * SIZE);
    store_8_bytes(chunk + at, words.x, words.y);
  }
  if constexpr (SIZE == 2) {
    if (count & 2) {
      const int at = is_first ? count & HALF : (low + 1) / 2 * 2;
      *reinterpret_cast<uint32*>(chunk + at) = load_shared_word(from + at * SIZE);
    }
  }
  if (count & 1) {
    const int at = is_first ? count - 1 : low;
    if constexpr (SIZE == 2) {
      chunk[at].bits = static_cast<uint16>(load_shared_16_bits(from + at * SIZE));
    } else {
      chunk[at] = load_shared<T>(from + at * SIZE);
    }
  }
}

// Writes a tile's results to y: whole chunks, and then the ends of runs.
template <typename P, typename Tile>
__device__ __forceinline__ void write_results(uint32 results, const GatherAddresses<P, Tile>& at, int64 row0,
                                              int rows) {
  using T = typename Tile::Element;
  constexpr int VECTOR = Tile::VECTOR;
  const int length =
      Tile::WHOLE_J ? (Tile::GROUPS > 1 ? at.column.groups * P::B : at.column.outputs) * P::D : at.column.js;
  const int runs = Tile::WHOLE_J ? 1 : at.column.outputs;
  T* const y = at.y_row(row0);
  const uint64 row_bytes = at.arguments.y_batch_stride * Tile::SIZE;
  const auto run_at = [&](unsigned row, unsigned run) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(y) + row * row_bytes) + run * P::D;
  };
  const auto write_one_by_one = [&](uint32 from, unsigned row, unsigned run, int begin, int low, int high) {
#pragma unroll 1
    for (int e = low; e < high; ++e) {
      write_element<P, Tile>(load_shared<T>(from + e * Tile::SIZE), at, row0 + row, run, begin + e,
                             run_at(row, run) + begin + e);
    }
  };
#pragma unroll 2
  for (unsigned item = threadIdx.x; item < rows * Tile::Y_RUNS * Tile::Y_CHUNKS; item += Tile::THREADS) {
    const unsigned chunk = item % Tile::Y_CHUNKS, run = item / Tile::Y_CHUNKS % Tile::Y_RUNS;
    const unsigned row = item / (Tile::Y_CHUNKS * Tile::Y_RUNS);
    T* const first = run_at(row, run);
    const int begin = static_cast<int>(chunk * VECTOR) - into_chunk(first);
    if (begin < 0 || begin + VECTOR > length || (!Tile::WHOLE_J && run >= runs)) continue;
    const uint32 from = results + row * Tile::Y_PITCH + (run * Tile::Y_CHUNKS + chunk) * 16;
    const uint4 words = load_shared_4_words(from);
    if constexpr (Tile::PRODUCTS == 3) {  // what is not finite is added again
      if (!(is_finite(__uint_as_float(words.x)) && is_finite(__uint_as_float(words.y)) &&
            is_finite(__uint_as_float(words.z)) && is_finite(__uint_as_float(words.w)))) {
        write_one_by_one(from, row, run, begin, 0, VECTOR);
        continue;
      }
    }
    store_16_bytes(first + begin, words.x, words.y, words.z, words.w);
  }
  // The first and the last chunk of a run, whose other elements belong to other runs.
  const uint64 all = reinterpret_cast<uint64>(y) | row_bytes | (Tile::WHOLE_J ? 0 : uint64(P::D) * Tile::SIZE);
  if (all % 16 == 0 && length % VECTOR == 0) return;
#pragma unroll 2
  for (unsigned item = threadIdx.x; item < rows * Tile::Y_RUNS * 2; item += Tile::THREADS) {
    const unsigned run = item / 2 % Tile::Y_RUNS, row = item / 2 / Tile::Y_RUNS;
    T* const first = run_at(row, run);
    const int into = into_chunk(first), last = (into + length) / VECTOR;  // a chunk that is not filled
    const int chunk = item % 2 == 0 ? 0 : last, begin = chunk * VECTOR - into;
    const int low = begin < 0 ? -begin : 0, high = length - begin < VECTOR ? length - begin : VECTOR;
    if ((!Tile::WHOLE_J && run >= runs) || high <= low || high - low == VECTOR) continue;
    if (item % 2 != 0 && last == 0) continue;  // the same chunk as the first
    const uint32 from = results + row * Tile::Y_PITCH + (run * Tile::Y_CHUNKS + chunk) * 16;
    if (Tile::PRODUCTS < 3 && (low == 0 || high == VECTOR)) {
      copy_end(first + begin, from, low, high);
    } else {  // inside a chunk, too
      write_one_by_one(from, row, run, begin, low, high);
    }
  }
}

// The grid is a multiple of the columns, and columns run fastest: blocks that run together share rows of x.
template <typename P, typename Tile>
__device__ __forceinline__ void gather_mma_kernel(const Arguments& arguments) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32 weights = __shfl_sync(~0u, shared_address(shared), 0);
  const uint32 ring = weights + Tile::W_BYTES, results = ring + Tile::STAGES * Tile::STAGE_BYTES;
  const int warp = threadIdx.x / 32;
  const GatherAddresses<P, Tile> at(arguments, blockIdx.x % Tile::COLUMNS);
  GatherLoader<P, Tile> loader(at, ring);
  if constexpr (Tile::PACKED) {
    prefetch_share<Tile::THREADS>(at.packed, Tile::COLUMN_BYTES, blockIdx.x / Tile::COLUMNS,
                                  gridDim.x / Tile::COLUMNS);
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if constexpr (Tile::PACKED && !Tile::STREAMED) copy_packed<Tile, Tile::COLUMN_BYTES>(weights, at.packed);
#pragma unroll
  for (int s = 0; s < Tile::STAGES - 1; ++s) loader.next();
  if constexpr (!Tile::PACKED) load_weights<P, Tile>(shared, at);

  const int64 tiles = loader.row_tiles;
  int slot = 0;
#pragma unroll 1
  for (int64 tile = blockIdx.x / Tile::COLUMNS; tile < tiles; tile += loader.step) {
    const int64 row0 = tile * Tile::BM;
    const IntoChunk<Tile> of_y(into_chunk(at.y_row(row0)), arguments.y_batch_stride, P::D);
    [[maybe_unused]] float held[Tile::HELD][Tile::TILES][Tile::NT][4] = {};
#pragma unroll 1
    for (int part = 0; part < Tile::PARTS; ++part) {
      cp_async_wait_group<Tile::STAGES - 2>();
      __syncthreads();  // the stage is filled for all, and the one before it is free for all
      loader.next();
      const uint32 stage = ring + slot * Tile::STAGE_BYTES;
      const uint32 of_part = Tile::STREAMED ? stage + Tile::X_BYTES : weights + part * Tile::PART_BYTES;
      if (++slot == Tile::STAGES) slot = 0;
      const int l0 = part * Tile::KL, length = P::C - l0 < Tile::KL ? P::C - l0 : Tile::KL;
      const int64 l_stride = P::D * arguments.x_feature_stride;
      const IntoChunk<Tile> of_x(into_chunk(at.x_row(row0) + l0 * l_stride), arguments.x_batch_stride, l_stride);
      if constexpr (Tile::PARTS == 1) {
#pragma unroll 1
        for (int unit = warp; unit < Tile::UNITS; unit += Tile::WARPS) {
          float sums[Tile::TILES][Tile::NT][4] = {};
          multiply_part<P, Tile>(sums, stage, of_part, of_x, unit, length);
          put_unit<P, Tile>(results, of_y, unit, at.column.outputs, sums);
        }
      } else {
#pragma unroll
        for (int u = 0; u < Tile::HELD; ++u) {
          const int unit = warp + u * Tile::WARPS;
          if (unit < Tile::UNITS) multiply_part<P, Tile>(held[u], stage, of_part, of_x, unit, length);
        }
      }
    }
    if constexpr (Tile::PARTS > 1) {
#pragma unroll
      for (int u = 0; u < Tile::HELD; ++u) {
        const int unit = warp + u * Tile::WARPS;
        if (unit < Tile::UNITS) put_unit<P, Tile>(results, of_y, unit, at.column.outputs, held[u]);
      }
    }
    __syncthreads();
    write_results<P, Tile>(results, at, row0, rows_inside<Tile::BM>(arguments.batch - row0));
  }
}

// Writes the weights, of any strides, to `arguments.y`, column by column, with zeros for padding. Neighbouring threads
// take neighbours in memory: of a transposed weight neighbouring k, else neighbouring l.
template <typename P, typename Tile>
__device__ __forceinline__ void gather_mma_pack_kernel(const Arguments& arguments) {
  using T = typename Tile::Element;
  constexpr int KS = Tile::NB, LS = Tile::PARTS * Tile::PART_STEPS * Tile::STEP;  // of a plane
  const T* const weight = static_cast<const T*>(arguments.weight);
  const Strided<1> order(arguments);
  const bool is_transposed = order.b < order.c;
  unsigned char* const packed = static_cast<unsigned char*>(arguments.y);
  const int64 all = int64(Tile::COLUMNS) * Tile::PLANES * KS * LS;
  for (int64 e = int64(blockIdx.x) * blockDim.x + threadIdx.x; e < all; e += int64(gridDim.x) * blockDim.x) {
    const int of_column = static_cast<int>(e % (Tile::PLANES * KS * LS)),
              index = static_cast<int>(e / (Tile::PLANES * KS * LS));
    const int j = of_column % Tile::JC, of_plane = of_column / Tile::JC % (KS * LS);
    const int l = is_transposed ? of_plane / KS : of_plane % LS, k = is_transposed ? of_plane % KS : of_plane / LS;
    const int g = of_column / (Tile::JC * LS * KS);
    const GatherColumn<P, Tile> column(index);
    T value = from_float<T>(0.0f);
    if (g < column.groups && k < column.outputs && l < P::C && j < column.js) {
      value = weight[order.at(column.i0 + g, column.k0 + k, l, column.j0 + j)];
    }
    *reinterpret_cast<T*>(packed + int64(index) * Tile::COLUMN_BYTES + weight_place<Tile>(g, k, l, j)) = value;
  }
}
