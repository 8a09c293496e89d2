// A few rows of x by ordinary arithmetic: fp32, and 16 bit for those d that decode_mma16.cuh does not
// support (batch first, sm_80 and up).
//
// A row (i, k) of the weight and group i of a row of x lie in memory alike: c*d values, of which
// value n belongs to j = n mod d. So a product is element by element, and a thread that goes along a
// row in steps of whole periods, the least common multiple of d and a 16-byte chunk, keeps its j. A
// block owns KB outputs k of a group i, and of a large d a window of JW chunks of j; LT threads share
// the sum over l, each with KR outputs of M rows of x at a time. Their sums are added in shared
// memory, always in the same order.
#pragma once

#include "common/factor_epilogue.cuh"
#include "common/pdl.cuh"
#include "common/kernel_params.cuh"
#include "common/ptx.cuh"
#include "common/smem_layout.cuh"

template <typename T, typename P, int JW_, int LT_, int KT_, int KR_, int M_, int UNITS_>
struct DecodeFmaTile {
  static constexpr int common(int m, int n) { return n == 0 ? m : common(n, m % n); }
  static constexpr int VECTOR = 16 / sizeof(T);
  static constexpr int PERIOD = P::D / common(P::D, VECTOR);  // chunks after which j starts again
  static constexpr bool WHOLE = P::D % VECTOR == 0;           // a chunk has one l
  static constexpr bool FOLD = VECTOR % P::D == 0;            // a chunk has all j of several l
  static constexpr int JW = JW_;        // chunks of a period that a block owns
  static constexpr int LT = LT_;        // threads that share the sum over l
  static constexpr int KT = KT_;        // threads with different outputs
  static constexpr int KR = KR_;        // outputs of a thread
  static constexpr int M = M_;          // rows of x
  static constexpr int UNITS = UNITS_;  // periods whose weights a thread loads at a time
  static constexpr int THREADS = JW * LT * KT, KB = KT * KR;
  static constexpr int PERIODS = P::C * P::D / VECTOR / PERIOD;  // in a row
  static constexpr int X_CHUNKS = PERIODS * JW, X_BYTES = M * X_CHUNKS * 16;
  static constexpr int SUMS = FOLD ? P::D : VECTOR;           // of a thread, for one row and output
  static constexpr int PLACES = FOLD ? P::D : JW * VECTOR;    // of the threads with one share of l
  static constexpr int J = WHOLE ? JW * VECTOR : P::D;        // values of j that a block owns
  static constexpr int PART = M * KB * PLACES;
  static constexpr int SUM_BYTES = LT * PART * 4;
  static constexpr int SHARED_BYTES = X_BYTES > SUM_BYTES ? X_BYTES : SUM_BYTES;  // one after the other
  static constexpr int OUTPUT_TILES = (P::B + KB - 1) / KB;
  static constexpr int COLUMNS = P::A * (PERIOD / JW) * OUTPUT_TILES;
  static constexpr int GROUPS = LT < 8 ? LT : 8;  // of threads' sums that are added apart
  static_assert(P::C * P::D % VECTOR == 0 && PERIOD % JW == 0 && (WHOLE || JW == PERIOD), "");
  static_assert(THREADS % 32 == 0, "whole warps");
};

// Element e of a chunk.
template <typename T> __device__ __forceinline__ float element(const uint32 (&words)[4], int e);
template <> __device__ __forceinline__ float element<float>(const uint32 (&words)[4], int e) {
  return __uint_as_float(words[e]);
}
template <> __device__ __forceinline__ float element<Float16>(const uint32 (&words)[4], int e) {
  return to_float(Float16{static_cast<uint16>(words[e / 2] >> e % 2 * 16)});
}
template <> __device__ __forceinline__ float element<BFloat16>(const uint32 (&words)[4], int e) {
  return to_float(BFloat16{static_cast<uint16>(words[e / 2] >> e % 2 * 16)});
}

__device__ __forceinline__ void load_chunk(uint32 (&words)[4], const void* from) {
  const uint4 chunk = *static_cast<const uint4*>(from);
  words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
}

template <typename T, typename P, typename Tile, typename After = NoEpilogue>
__device__ __forceinline__ void decode_fma_kernel(const typename After::Arguments& arguments) {
  constexpr int V = Tile::VECTOR, JW = Tile::JW, LT = Tile::LT, KR = Tile::KR, KB = Tile::KB;
  constexpr int M = Tile::M, UNITS = Tile::UNITS, THREADS = Tile::THREADS;
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = threadIdx.x;
  const int chunk = thread % JW, share = thread / JW % LT, first_k = thread / (JW * LT) * KR;

  const int column = static_cast<int>(blockIdx.x % Tile::COLUMNS);
  const int64 row0 = static_cast<int64>(blockIdx.x / Tile::COLUMNS) * M;
  constexpr int WINDOWS = Tile::PERIOD / JW;
  const int window = column % WINDOWS * JW * V;  // its first value in a period
  const int k0 = column / WINDOWS % Tile::OUTPUT_TILES * KB;
  const int i = column / WINDOWS / Tile::OUTPUT_TILES;
  const int rows = rows_inside<M>(arguments.batch - row0), outputs = P::B - k0;

  // Weights that are read at once before the wait need no request ahead.
  constexpr bool AT_ONCE = Tile::PERIODS <= LT * UNITS;
  const bool settled = arguments.weight_is_settled;
  if (row0 == 0 && !(AT_ONCE && settled)) {
    prefetch_share<THREADS>(arguments.weight, int64(P::A) * P::B * P::C * P::D * int64(sizeof(T)), column,
                            Tile::COLUMNS);
  }
  if (!settled) follow_kernel_ahead();

  const T* const w = static_cast<const T*>(arguments.weight) +
                     (int64(i) * P::B + k0 + first_k) * P::C * P::D + window + chunk * V;
  uint32 words[UNITS][KR][4];
  const auto load_weights = [&](int first) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int period = first + u * LT;
#pragma unroll
      for (int r = 0; r < KR; ++r) {
        words[u][r][0] = words[u][r][1] = words[u][r][2] = words[u][r][3] = 0;
        if (period < Tile::PERIODS && first_k + r < outputs) {
          load_chunk(words[u][r], w + r * int64(P::C * P::D) + period * Tile::PERIOD * V);
        }
      }
    }
  };
  load_weights(share);
  if (settled) follow_kernel_ahead();

  // Where all of a thread's results have the same bias, it is read ahead of the products.
  constexpr bool SAME_BIAS = THREADS % (KB * Tile::J) == 0;
  [[maybe_unused]] float bias = 0.0f;
  if constexpr (After::BIAS && SAME_BIAS) {
    const int k = thread / Tile::J % KB;
    const int64 feature = (int64(i) * P::B + k0 + k) * P::D + (Tile::WHOLE ? window : 0) + thread % Tile::J;
    if (k < outputs) bias = bias_of<T, After>(arguments, feature);
  }

  const T* const x = static_cast<const T*>(arguments.x) + row0 * arguments.x_batch_stride +
                     int64(i) * P::C * P::D + window;
  for (int e = thread; e < rows * Tile::X_CHUNKS; e += THREADS) {
    const int m = e / Tile::X_CHUNKS, at = e % Tile::X_CHUNKS;
    cp_async_16(shared + e * 16,
                x + m * arguments.x_batch_stride + at / JW * Tile::PERIOD * V + at % JW * V, true);
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();

  float sums[M][KR][Tile::SUMS] = {};
  for (int first = share; first < Tile::PERIODS; first += LT * UNITS) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int period = first + u * LT;
      if (period >= Tile::PERIODS) break;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        if (m >= rows) break;
        uint32 values[4];
        load_chunk(values, shared + ((m * Tile::PERIODS + period) * JW + chunk) * 16);
#pragma unroll
        for (int r = 0; r < KR; ++r)
#pragma unroll
          for (int e = 0; e < V; ++e) {
            float& sum = sums[m][r][e % Tile::SUMS];
            sum = fmaf(element<T>(words[u][r], e), element<T>(values, e), sum);
          }
      }
    }
    if (first + LT * UNITS < Tile::PERIODS) load_weights(first + LT * UNITS);
  }

  __syncthreads();  // all have read x, whose place the sums take
  float* const parts = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < M; ++m) {
    if (m >= rows) break;
#pragma unroll
    for (int r = 0; r < KR; ++r)
#pragma unroll
      for (int e = 0; e < Tile::SUMS; ++e) {
        parts[share * Tile::PART + (m * KB + first_k + r) * Tile::PLACES + (Tile::FOLD ? 0 : chunk * V) +
              e] = sums[m][r][e];
      }
  }
  __syncthreads();

  const int places = rows * KB * Tile::PLACES;
  if (LT > Tile::GROUPS) {
    for (int e = thread; e < Tile::GROUPS * places; e += THREADS) {
      const int group = e / places, place = e % places;
      float sum = 0.0f;
#pragma unroll 8
      for (int part = group; part < LT; part += Tile::GROUPS) sum += parts[part * Tile::PART + place];
      parts[group * Tile::PART + place] = sum;
    }
    __syncthreads();
  }
  T* const y = static_cast<T*>(arguments.y) + row0 * arguments.y_batch_stride +
               (int64(i) * P::B + k0) * P::D + (Tile::WHOLE ? window : 0);
  for (int e = thread; e < rows * KB * Tile::J; e += THREADS) {
    const int j = e % Tile::J, k = e / Tile::J % KB, m = e / (Tile::J * KB);
    if (k >= outputs) continue;
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < Tile::GROUPS; ++group) {
#pragma unroll
      for (int place = 0; place < Tile::PLACES; place += Tile::J) {  // that have this j
        sum += parts[group * Tile::PART + (m * KB + k) * Tile::PLACES + place + j];
      }
    }
    if constexpr (!After::IS_EMPTY) {
      const int64 feature = (int64(i) * P::B + k0 + k) * P::D + (Tile::WHOLE ? window : 0) + j;
      if constexpr (!SAME_BIAS) bias = bias_of<T, After>(arguments, feature);
      sum = with_epilogue<T, After>(sum, bias, arguments, (row0 + m) * arguments.y_batch_stride + feature);
    }
    T* const to = y + (m * arguments.y_batch_stride + k * P::D + j);
    if constexpr (After::IN_FLOAT32) {
      static_cast<float*>(arguments.y)[to - static_cast<T*>(arguments.y)] = sum;
    } else {
      *to = from_float<T>(sum);
    }
  }
}
