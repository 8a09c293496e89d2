// Factors of any size on tensor cores, rows of x and y at any address (batch first, sm_80 and up).
//
// The other families take j as it lies in 16-byte chunks, which needs certain d and aligned rows. Here
// elements are sorted one by one: from the chunks of memory in which they come, into a plane of shared
// memory for each (i, j), whose rows hold l side by side. There, sums are padded with zeros to whole
// steps of the tensor cores, and outputs to whole tiles. Results are sorted back in shared memory, and
// leave in chunks; only the elements at the ends of a run, whose chunks hold others, too, leave one by one.
//
// A block has a column: GROUPS whole blocks i, or JC values of j and NB outputs k of one i. It walks over
// tiles of BM rows. Long sums come in PARTS, and stay in registers meanwhile. RESIDENT weights are
// sorted once for a column, others with each part.
//
// PRODUCTS of an fp32 number: 3, of TF32 numbers, as in mma_tf32x3.cuh; 1; or 0 for short sums, which are
// added by ordinary arithmetic.
#pragma once

#include "kernel_params.cuh"
#include "smem_layout.cuh"
#include "tf32_split.cuh"

template <typename T, typename P, int WARPS_, int BM_, int MT_, int NT_, int GROUPS_, int JC_, int PARTS_,
          bool RESIDENT_, int BLOCKS_, int PRODUCTS_>
struct PaddedMmaTile {
  using Element = T;
  static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS;
  static constexpr int BM = BM_;
  static constexpr int MT = MT_, NT = NT_;  // 16-row and 8-output tiles of a warp's unit
  static constexpr int GROUPS = GROUPS_, JC = JC_;
  static constexpr int PARTS = PARTS_;
  static constexpr bool RESIDENT = RESIDENT_;
  static constexpr int BLOCKS = BLOCKS_;  // blocks that should fit on a multiprocessor
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr int SIZE = sizeof(T), VECTOR = 16 / SIZE;
  static constexpr int STEP = 32 / SIZE;  // l of a product of the tensor cores
  static constexpr bool WHOLE_J = JC == P::D;
  static constexpr int NB = NT * 8, OUTPUT_TILES = (P::B + NB - 1) / NB, KB = NB < P::B ? NB : P::B;
  static constexpr int STEPS = (P::C + STEP - 1) / STEP, PART_STEPS = (STEPS + PARTS - 1) / PARTS;
  static constexpr int KL = PART_STEPS * STEP;  // l of a part
  static constexpr int PLANES = GROUPS * JC;
  static constexpr int ROW_TILES = BM / (16 * MT), UNITS = PLANES * ROW_TILES;
  static constexpr int HELD = (UNITS + WARPS - 1) / WARPS;  // units of a warp
  // A row is an odd number of chunks, so that eight rows meet all banks.
  static constexpr int X_PITCH = KL * SIZE + 16, X_PLANE = BM * X_PITCH + 16, X_BYTES = PLANES * X_PLANE;
  static constexpr int W_LENGTH = RESIDENT ? STEPS * STEP : KL, W_ROWS = (NT + 1) / 2 * 16;
  static constexpr int W_PITCH = W_LENGTH * SIZE + 16, W_PLANE = W_ROWS * W_PITCH + 16;
  static constexpr int W_BYTES = PLANES * W_PLANE;
  // What is read and written of a row: runs of features that lie side by side.
  static constexpr int X_RUN = WHOLE_J ? GROUPS * (PARTS == 1 ? P::C : KL) * P::D : JC;
  static constexpr int Y_RUNS = WHOLE_J ? 1 : KB, Y_RUN = WHOLE_J ? GROUPS * KB * P::D : JC;
  static constexpr int Y_RUN_CHUNKS = (Y_RUN + 2 * (VECTOR - 1)) / VECTOR;  // at any address
  static constexpr int Y_PITCH = (Y_RUNS * Y_RUN_CHUNKS | 1) * 16, Y_BYTES = BM * Y_PITCH;
  static constexpr int SHARED_BYTES = X_BYTES + W_BYTES + Y_BYTES;
  static constexpr int WINDOWS = (P::D + JC - 1) / JC, GROUP_TILES = (P::A + GROUPS - 1) / GROUPS;
  static constexpr int COLUMNS = GROUP_TILES * WINDOWS * OUTPUT_TILES;
  static_assert(BM % (16 * MT) == 0 && JC <= P::D && (PARTS - 1) * PART_STEPS < STEPS, "");
  static_assert(GROUPS == 1 || (WHOLE_J && OUTPUT_TILES == 1 && PARTS == 1), "whole blocks i, or one");
  static_assert(PRODUCTS == 1 || SIZE == 4, "16-bit numbers are multiplied once");
  static_assert(PRODUCTS != 0 || (MT == 2 && PARTS == 1), "each lane has one of 32 rows");
  static_assert(PARTS > 1 || RESIDENT, "the only part's weights stay");
};

// What a block computes beside rows: its first i, j and k, and how many of each there are.
template <typename P, typename Tile> struct PaddedColumn {
  int i0, j0, k0, groups, js, outputs;
  __device__ __forceinline__ explicit PaddedColumn(int index) {
    k0 = index % Tile::OUTPUT_TILES * Tile::NB;
    j0 = index / Tile::OUTPUT_TILES % Tile::WINDOWS * Tile::JC;
    i0 = index / Tile::OUTPUT_TILES / Tile::WINDOWS * Tile::GROUPS;
    groups = P::A - i0 < Tile::GROUPS ? P::A - i0 : Tile::GROUPS;
    js = P::D - j0 < Tile::JC ? P::D - j0 : Tile::JC;
    outputs = P::B - k0 < Tile::NB ? P::B - k0 : Tile::NB;
  }
};

// How a warp takes a tile's chunks: up to four neighbours of each of some rows, so that it reads or writes
// whole sectors, and eight rows meet all banks of shared memory.
template <int ROWS, int RUNS, int CHUNKS> struct WarpWalk {
  static constexpr int WIDTH = CHUNKS >= 4 ? 4 : CHUNKS >= 2 ? 2 : 1, HEIGHT = 32 / WIDTH;
  static constexpr int CHUNK_PASSES = (CHUNKS + WIDTH - 1) / WIDTH, ROW_PASSES = (ROWS + HEIGHT - 1) / HEIGHT;
  static constexpr int ITEMS = ROW_PASSES * RUNS * CHUNK_PASSES;  // of all warps
  int row, run, chunk;
  __device__ __forceinline__ WarpWalk(int item, int lane) {
    chunk = item % CHUNK_PASSES * WIDTH + lane % WIDTH;
    run = item / CHUNK_PASSES % RUNS;
    row = item / CHUNK_PASSES / RUNS * HEIGHT + lane / WIDTH;
  }
};

// Elements from the beginning of an address's chunk to the address.
template <typename T> __device__ __forceinline__ int into_chunk(const T* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) % 16 / sizeof(T));
}

// Element e of a chunk.
template <typename T> __device__ __forceinline__ T element_of(const uint32 (&words)[4], int e);
template <> __device__ __forceinline__ float element_of<float>(const uint32 (&words)[4], int e) {
  return __uint_as_float(words[e]);
}
template <> __device__ __forceinline__ Float16 element_of<Float16>(const uint32 (&words)[4], int e) {
  return {static_cast<uint16>(words[e / 2] >> e % 2 * 16)};
}
template <> __device__ __forceinline__ BFloat16 element_of<BFloat16>(const uint32 (&words)[4], int e) {
  return {static_cast<uint16>(words[e / 2] >> e % 2 * 16)};
}

// An operand as sort_rows reads it: elements of a row by l and j, in chunks where they lie side by side and
// the chunk is not beyond the operand's first or last element.
template <typename T> struct Operand {
  const T *begin, *end;
  int64 l_stride, j_stride;
  bool is_dense;
};

// What runs hold: l and j of each l, or, GROUPED, l of several i, C of each.
template <int LENGTH_, int J_, int C_, bool GROUPED_> struct RunOrder {
  static constexpr int LENGTH = LENGTH_, J = J_, C = C_;
  static constexpr bool GROUPED = GROUPED_;
};

// Sorts ROWS x RUNS runs of elements into planes of shared memory, PLANE bytes apart. `first_of` and
// `length_of` say where the run of a row begins and how many elements it has, `place_of` where the element
// of its first l, of j = 0, belongs.
template <typename T, int ROWS, int RUNS, typename Order, int PLANE, int THREADS, typename FirstOf, typename LengthOf,
          typename PlaceOf>
__device__ __forceinline__ void sort_rows(const Operand<T>& operand, FirstOf first_of, LengthOf length_of,
                                          PlaceOf place_of) {
  constexpr int VECTOR = 16 / sizeof(T), SIZE = sizeof(T), WARPS = THREADS / 32, AHEAD = 4, J = Order::J;
  constexpr int GROUP = J * PLANE - Order::C * SIZE;  // to the next i, from the l behind the last
  constexpr int PERIOD = Order::GROUPED ? Order::C * J : J, BEFORE = (VECTOR + PERIOD - 1) / PERIOD;
  using Walk = WarpWalk<ROWS, RUNS, (Order::LENGTH + 2 * (VECTOR - 1)) / VECTOR>;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int item0 = threadIdx.x / 32; item0 < Walk::ITEMS; item0 += WARPS * AHEAD) {
    uint32 words[AHEAD][4];
    bool is_chunk[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const Walk at(item0 + u * WARPS, lane);
      is_chunk[u] = false;
      if (item0 + u * WARPS >= Walk::ITEMS || at.row >= ROWS) continue;
      const T* const first = first_of(at.row, at.run);
      const int begin = at.chunk * VECTOR - into_chunk(first);  // of the chunk, in the run
      if (begin >= length_of(at.row, at.run)) continue;
      is_chunk[u] = operand.is_dense && first + begin >= operand.begin && first + begin + VECTOR <= operand.end;
      if (is_chunk[u]) load_16_bytes(words[u], first + begin);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const Walk at(item0 + u * WARPS, lane);
      if (item0 + u * WARPS >= Walk::ITEMS || at.row >= ROWS) continue;
      const T* const first = first_of(at.row, at.run);
      const int begin = at.chunk * VECTOR - into_chunk(first), length = length_of(at.row, at.run);
      if (begin >= length) continue;
      unsigned char* place = place_of(at.row, at.run);
      if (J == 1 && !Order::GROUPED && is_chunk[u] && into_chunk(first) == 0 && begin + VECTOR <= length) {
        *reinterpret_cast<uint4*>(place + begin * SIZE) = make_uint4(words[u][0], words[u][1], words[u][2], words[u][3]);
        continue;
      }
      const int counted = begin + BEFORE * PERIOD;  // not below zero
      int j = counted % J, l = Order::GROUPED ? counted / J % Order::C : 0;
      place += j * PLANE + (Order::GROUPED ? (counted / PERIOD - BEFORE) * (J * PLANE) + l * SIZE
                                           : (counted / J - BEFORE) * SIZE);
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        const int n = begin + e;
        if (0 <= n && n < length) {
          *reinterpret_cast<T*>(place) = is_chunk[u] ? element_of<T>(words[u], e)
                                                     : first[n / J * operand.l_stride + n % J * operand.j_stride];
        }
        place += PLANE;
        if (++j == J) {
          j = 0, place += SIZE - J * PLANE;
          if (Order::GROUPED && ++l == Order::C) l = 0, place += GROUP;
        }
      }
    }
  }
}

// Where a tile's operands and results are in memory.
template <typename T, typename P, typename Tile> struct PaddedAddresses {
  const Arguments& arguments;
  const T* const x;
  const T* const weight;
  T* const y;
  Operand<T> of_x, of_weight;
  PaddedColumn<P, Tile> column{0};
  int64 row0 = 0;

  __device__ __forceinline__ explicit PaddedAddresses(const Arguments& a)
      : arguments(a), x(static_cast<const T*>(a.x)), weight(static_cast<const T*>(a.weight)), y(static_cast<T*>(a.y)) {
    constexpr int64 IN = int64(P::A) * P::C * P::D, OF_K = int64(P::C) * P::D, WEIGHTS = P::A * P::B * OF_K;
    of_x = {x, x + (a.batch - 1) * a.x_batch_stride + IN, a.x_feature_stride * P::D, a.x_feature_stride,
            a.x_feature_stride == 1};
    const bool in_order = a.weight_stride_d == 1 && a.weight_stride_c == P::D && a.weight_stride_b == OF_K &&
                          a.weight_stride_a == P::B * OF_K;
    of_weight = {weight, weight + WEIGHTS, a.weight_stride_c, a.weight_stride_d, in_order};
  }

  __device__ __forceinline__ const T* x_at(int row, int g, int l, int j) const {
    return x + (row0 + row) * arguments.x_batch_stride +
           ((int64(column.i0 + g) * P::C + l) * P::D + column.j0 + j) * arguments.x_feature_stride;
  }
  __device__ __forceinline__ const T* weight_at(int g, int k, int l, int j) const {
    return weight + (column.i0 + g) * arguments.weight_stride_a + (column.k0 + k) * arguments.weight_stride_b +
           l * arguments.weight_stride_c + (column.j0 + j) * arguments.weight_stride_d;
  }
  // Of the first i: later ones follow its last k.
  __device__ __forceinline__ T* y_at(int row, int k) const {
    return y + (row0 + row) * arguments.y_batch_stride + (int64(column.i0) * P::B + column.k0 + k) * P::D + column.j0;
  }
};

// Brings `length` values of l, from l0 on, of a tile's rows of x into their planes.
template <typename P, typename Tile, typename At>
__device__ __forceinline__ void sort_x(unsigned char* planes, const At& at, int l0, int length, int rows) {
  using T = typename Tile::Element;
  using Order = RunOrder<Tile::X_RUN, Tile::JC, P::C, (Tile::GROUPS > 1)>;
  const int run_length = Tile::WHOLE_J ? at.column.groups * length * P::D : at.column.js;
  sort_rows<T, Tile::BM, Tile::WHOLE_J ? 1 : Tile::KL, Order, Tile::X_PLANE, Tile::THREADS>(
      at.of_x, [&](int row, int run) { return at.x_at(row, 0, l0 + run, 0); },
      [&](int row, int run) { return row < rows && (Tile::WHOLE_J || run < length) ? run_length : 0; },
      [&](int row, int run) { return planes + row * Tile::X_PITCH + run * Tile::SIZE; });
}

// Brings `length` values of l, from l0 on, of a column's weights into their planes.
template <typename P, typename Tile, typename At>
__device__ __forceinline__ void sort_weights(unsigned char* planes, const At& at, int l0, int length) {
  using T = typename Tile::Element;
  constexpr int L = Tile::RESIDENT ? P::C : Tile::KL;
  using Order = RunOrder<(Tile::WHOLE_J ? L * P::D : Tile::JC), Tile::JC, P::C, false>;
  const int run_length = Tile::WHOLE_J ? length * P::D : at.column.js;
  sort_rows<T, Tile::GROUPS * Tile::KB, Tile::WHOLE_J ? 1 : L, Order, Tile::W_PLANE, Tile::THREADS>(
      at.of_weight, [&](int row, int run) { return at.weight_at(row / Tile::KB, row % Tile::KB, l0 + run, 0); },
      [&](int row, int run) {
        const bool inside = row / Tile::KB < at.column.groups && row % Tile::KB < at.column.outputs;
        return inside && (Tile::WHOLE_J || run < length) ? run_length : 0;
      },
      [&](int row, int run) {
        return planes + row / Tile::KB * (Tile::JC * Tile::W_PLANE) + row % Tile::KB * Tile::W_PITCH + run * Tile::SIZE;
      });
}

// Zeros behind the last of `length` values of l, up to whole steps, in planes of rows.
template <typename Tile, int PLANE_ROWS, int PITCH, int PLANE>
__device__ __forceinline__ void pad_rows(unsigned char* planes, int length) {
  using T = typename Tile::Element;
  const int pad = (Tile::STEP - length % Tile::STEP) % Tile::STEP;
  for (int e = threadIdx.x; e < Tile::PLANES * PLANE_ROWS * pad; e += Tile::THREADS) {
    const int row = e / pad % PLANE_ROWS, plane = e / pad / PLANE_ROWS;
    *reinterpret_cast<T*>(planes + plane * PLANE + row * PITCH + (length + e % pad) * Tile::SIZE) = from_float<T>(0.0f);
  }
}

// sums += x w over some steps, for MT x NT tiles of a plane.
template <typename Tile>
__device__ __forceinline__ void multiply_plane(float (&sums)[Tile::MT][Tile::NT][4], uint32 x_at, uint32 w_at,
                                               int steps) {
  using T = typename Tile::Element;
  constexpr int MT = Tile::MT, NT = Tile::NT;
#pragma unroll 2
  for (int s = 0; s < steps; ++s) {
    uint32 a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) load_matrices(a[m], x_at + m * 16 * Tile::X_PITCH + s * 32);
    [[maybe_unused]] uint32 a_small[MT][4];
    if constexpr (Tile::SIZE == 4) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Split<Tile::PRODUCTS> split(__uint_as_float(a[m][e]));
          a[m][e] = split.big, a_small[m][e] = split.small;
        }
    }
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += 2) {
      uint32 b[4];
      load_matrices(b, w_at + n0 * 8 * Tile::W_PITCH + s * 32);
#pragma unroll
      for (int n = n0; n < n0 + 2 && n < NT; ++n) {
        const uint32 b0 = b[(n - n0) * 2], b1 = b[(n - n0) * 2 + 1];
        if constexpr (Tile::SIZE == 2) {
#pragma unroll
          for (int m = 0; m < MT; ++m) multiply_add<T>(sums[m][n], a[m], b0, b1);
        } else {
          const Split<Tile::PRODUCTS> w0(__uint_as_float(b0)), w1(__uint_as_float(b1));
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            if constexpr (Tile::PRODUCTS == 1) {
              multiply_add_tf32(sums[m][n], a[m], w0.big, w1.big);
            } else {  // the smallest first
              float part[4] = {};
              multiply_add_tf32(part, a_small[m], w0.big, w1.big);
              multiply_add_tf32(part, a[m], w0.small, w1.small);
              multiply_add_tf32(part, a[m], w0.big, w1.big);
#pragma unroll
              for (int e = 0; e < 4; ++e) sums[m][n][e] += part[e];
            }
          }
        }
      }
    }
  }
}

// Puts results where they leave from. `row` and k in the tile, `plane` in the column.
template <typename P, typename Tile, typename At>
__device__ __forceinline__ void put_result(unsigned char* results, const At& at, int plane, int row, int k, float value) {
  using T = typename Tile::Element;
  if (k >= at.column.outputs) return;
  const int run = Tile::WHOLE_J ? 0 : k;
  const int n = Tile::WHOLE_J ? (plane / Tile::JC * Tile::KB + k) * P::D + plane % Tile::JC : plane;
  unsigned char* const chunks = results + row * Tile::Y_PITCH + run * (Tile::Y_RUN_CHUNKS * 16);
  *reinterpret_cast<T*>(chunks + (into_chunk(at.y_at(row, run)) + n) * Tile::SIZE) = from_float<T>(value);
}

template <typename P, typename Tile, typename At>
__device__ __forceinline__ void put_unit(unsigned char* results, const At& at, int unit,
                                         const float (&sums)[Tile::MT][Tile::NT][4]) {
  const int lane = threadIdx.x % 32, plane = unit / Tile::ROW_TILES, row0 = unit % Tile::ROW_TILES * Tile::MT * 16;
#pragma unroll
  for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + m * 16 + e / 2 * 8 + lane / 4, k = n * 8 + lane % 4 * 2 + e % 2;
        put_result<P, Tile>(results, at, plane, row, k, sums[m][n][e]);
      }
}

// Results of 32 rows of a plane by ordinary arithmetic: a lane has a row.
template <typename P, typename Tile, typename At>
__device__ __forceinline__ void add_plane(unsigned char* results, const At& at, int unit, const unsigned char* x_planes,
                                          const unsigned char* w_planes) {
  const int plane = unit / Tile::ROW_TILES, row = unit % Tile::ROW_TILES * 32 + threadIdx.x % 32;
  const unsigned char* const x_row = x_planes + plane * Tile::X_PLANE + row * Tile::X_PITCH;
  const unsigned char* const w_rows = w_planes + plane * Tile::W_PLANE;
#pragma unroll 1
  for (int n = 0; n < Tile::NT; ++n) {
    float sums[8] = {};
#pragma unroll 2
    for (int l = 0; l < P::C; l += 4) {
      const float4 x = *reinterpret_cast<const float4*>(x_row + l * 4);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float4 w = *reinterpret_cast<const float4*>(w_rows + (n * 8 + k) * Tile::W_PITCH + l * 4);
        sums[k] = fmaf(x.w, w.w, fmaf(x.z, w.z, fmaf(x.y, w.y, fmaf(x.x, w.x, sums[k]))));
      }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) put_result<P, Tile>(results, at, plane, row, n * 8 + k, sums[k]);
  }
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __uint_as_float(0x7f800000u); }

// Writes a tile's results to y.
template <typename P, typename Tile, typename At>
__device__ __forceinline__ void write_results(const unsigned char* results, const At& at, int rows) {
  using T = typename Tile::Element;
  constexpr int VECTOR = Tile::VECTOR;
  using Walk = WarpWalk<Tile::BM, Tile::Y_RUNS, Tile::Y_RUN_CHUNKS>;
  const int run_length = Tile::WHOLE_J ? at.column.groups * at.column.outputs * P::D : at.column.js;
#pragma unroll 2
  for (int item = threadIdx.x / 32; item < Walk::ITEMS; item += Tile::WARPS) {
    const Walk walk(item, threadIdx.x % 32);
    if (walk.row >= rows || (!Tile::WHOLE_J && walk.run >= at.column.outputs)) continue;
    T* const first = at.y_at(walk.row, walk.run);
    const int begin = walk.chunk * VECTOR - into_chunk(first);
    if (begin >= run_length) continue;
    const unsigned char* const chunk =
        results + walk.row * Tile::Y_PITCH + (walk.run * Tile::Y_RUN_CHUNKS + walk.chunk) * 16;
    if (begin >= 0 && begin + VECTOR <= run_length) {
      const uint4 words = *reinterpret_cast<const uint4*>(chunk);
      bool is_right = true;  // three products make NaN of an infinity
      if constexpr (Tile::PRODUCTS == 3) {
        is_right = is_finite(__uint_as_float(words.x)) && is_finite(__uint_as_float(words.y)) &&
                   is_finite(__uint_as_float(words.z)) && is_finite(__uint_as_float(words.w));
      }
      if (is_right) {
        store_16_bytes(first + begin, words.x, words.y, words.z, words.w);
        continue;
      }
    }
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      const int n = begin + e;
      if (n < 0 || n >= run_length) continue;
      T value = reinterpret_cast<const T*>(chunk)[e];
      if constexpr (Tile::PRODUCTS == 3) {
        if (!is_finite(value)) {
          const int g = Tile::WHOLE_J ? n / P::D / Tile::KB : 0, k = Tile::WHOLE_J ? n / P::D % Tile::KB : walk.run;
          const int j = Tile::WHOLE_J ? n % P::D : n;
          value = 0.0f;
#pragma unroll 1
          for (int l = 0; l < P::C; ++l) value = fmaf(*at.x_at(walk.row, g, l, j), *at.weight_at(g, k, l, j), value);
        }
      }
      first[n] = value;
    }
  }
}

template <typename P, typename Tile>
__device__ __forceinline__ void padded_mma_kernel(const Arguments& arguments) {
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const x_planes = shared;
  unsigned char* const w_planes = x_planes + Tile::X_BYTES;
  unsigned char* const results = w_planes + Tile::W_BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Matrices of ldmatrix: of x, rows 0 to 7 and 8 to 15 of the first half of a step, then of the second; of the
  // weights, both halves of rows 0 to 7, then of 8 to 15.
  const uint32 x_lane = shared_address(x_planes) + lane % 16 * Tile::X_PITCH + lane / 16 * 16;
  const uint32 w_lane =
      shared_address(w_planes) + (lane % 8 + lane / 16 * 8) * Tile::W_PITCH + lane / 8 % 2 * 16;

  // What no element is sorted to.
  for (int chunk = threadIdx.x; chunk < (Tile::X_BYTES + Tile::W_BYTES) / 16; chunk += Tile::THREADS) {
    *reinterpret_cast<uint4*>(shared + chunk * 16) = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  PaddedAddresses<typename Tile::Element, P, Tile> at(arguments);
  const int64 tiles = (arguments.batch + Tile::BM - 1) / Tile::BM * Tile::COLUMNS;
  int sorted = -1;  // the column whose weights are there
#pragma unroll 1
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int index = static_cast<int>(tile % Tile::COLUMNS);
    at.column = PaddedColumn<P, Tile>(index), at.row0 = tile / Tile::COLUMNS * Tile::BM;
    const int rows = rows_inside<Tile::BM>(arguments.batch - at.row0);
    if (Tile::RESIDENT && index != sorted) sort_weights<P, Tile>(w_planes, at, 0, P::C), sorted = index;
    if constexpr (Tile::PARTS == 1) {
      sort_x<P, Tile>(x_planes, at, 0, P::C, rows);
      __syncthreads();
#pragma unroll 1
      for (int unit = warp; unit < Tile::UNITS; unit += Tile::WARPS) {
        if constexpr (Tile::PRODUCTS == 0) {
          add_plane<P, Tile>(results, at, unit, x_planes, w_planes);
        } else {
          float sums[Tile::MT][Tile::NT][4] = {};
          const int plane = unit / Tile::ROW_TILES, row = unit % Tile::ROW_TILES * Tile::MT * 16;
          multiply_plane<Tile>(sums, x_lane + plane * Tile::X_PLANE + row * Tile::X_PITCH,
                               w_lane + plane * Tile::W_PLANE, Tile::STEPS);
          put_unit<P, Tile>(results, at, unit, sums);
        }
      }
    } else {
      float sums[Tile::HELD][Tile::MT][Tile::NT][4] = {};
#pragma unroll 1
      for (int part = 0; part < Tile::PARTS; ++part) {
        const int l0 = part * Tile::KL, length = P::C - l0 < Tile::KL ? P::C - l0 : Tile::KL;
        if (part > 0) __syncthreads();  // all have read the part before
        sort_x<P, Tile>(x_planes, at, l0, length, rows);
        pad_rows<Tile, Tile::BM, Tile::X_PITCH, Tile::X_PLANE>(x_planes, length);
        if constexpr (!Tile::RESIDENT) {
          sort_weights<P, Tile>(w_planes, at, l0, length);
          pad_rows<Tile, Tile::W_ROWS, Tile::W_PITCH, Tile::W_PLANE>(w_planes, length);
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < Tile::HELD; ++u) {
          const int unit = warp + u * Tile::WARPS;
          if (unit >= Tile::UNITS) break;
          const int plane = unit / Tile::ROW_TILES, row = unit % Tile::ROW_TILES * Tile::MT * 16;
          multiply_plane<Tile>(sums[u], x_lane + plane * Tile::X_PLANE + row * Tile::X_PITCH,
                               w_lane + plane * Tile::W_PLANE + (Tile::RESIDENT ? l0 * Tile::SIZE : 0),
                               (length + Tile::STEP - 1) / Tile::STEP);
        }
      }
#pragma unroll
      for (int u = 0; u < Tile::HELD; ++u) {
        const int unit = warp + u * Tile::WARPS;
        if (unit < Tile::UNITS) put_unit<P, Tile>(results, at, unit, sums[u]);
      }
    }
    __syncthreads();
    write_results<P, Tile>(results, at, rows);
  }
}
