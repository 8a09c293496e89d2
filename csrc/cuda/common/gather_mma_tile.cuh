// The work of a block of gather_mma.cuh, and the layout of its operands, weights and results.
#pragma once

#include "common/kernel_params.cuh"
#include "common/shared_elements.cuh"

enum class GatherWeights { STORED, PACKED, STREAMED };

template <typename T, typename P, int WARPS_, int BM_, int MT_, int NT_, int NS_, int JT_, int GROUPS_, int JC_,
          int PARTS_, int STAGES_, int BLOCKS_, int PRODUCTS_, GatherWeights WEIGHTS_>
struct GatherMmaTile {
  using Element = T;
  static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS;
  static constexpr int BM = BM_;
  static constexpr int MT = MT_, NT = NT_;  // 16-row and 8-output tiles of a warp's unit
  static constexpr int NS = NS_;            // units side by side that have all outputs of a block
  static constexpr int JT = JT_;            // neighbouring j of a unit, which share loads and stores
  static constexpr int TILES = MT * JT;
  static constexpr int GROUPS = GROUPS_, JC = JC_;
  static constexpr int PARTS = PARTS_, STAGES = STAGES_;
  static constexpr int BLOCKS = BLOCKS_;  // blocks that should fit on a multiprocessor
  static constexpr int PRODUCTS = PRODUCTS_;
  static constexpr bool PACKED = WEIGHTS_ != GatherWeights::STORED,
                        STREAMED = WEIGHTS_ == GatherWeights::STREAMED;
  static constexpr int SIZE = sizeof(T), VECTOR = 16 / SIZE;
  static constexpr int STEP = PRODUCTS == 0 ? 1 : 32 / SIZE;  // l that are added at a time
  static constexpr bool WHOLE_J = JC == P::D;
  // Two neighbouring l are a word of x, and two neighbouring k one of y.
  static constexpr bool L_PAIRS = SIZE == 2 && P::D == 1 && P::C % 2 == 0;
  static constexpr bool K_PAIRS = SIZE == 2 && P::D == 1 && P::B % 2 == 0;
  // Whether the l of a step may lie in chunks of x, for all rows and groups.
  static constexpr bool MAY_BE_CHUNKS = PRODUCTS > 0 && P::D == 1 && (GROUPS == 1 || P::C % VECTOR == 0);
  static constexpr bool NARROW = PRODUCTS == 0 && P::B <= 4;  // a lane has all outputs of a row
  static constexpr int NB = NS * NT * 8, OUTPUT_TILES = (P::B + NB - 1) / NB, KB = NB < P::B ? NB : P::B;
  static constexpr int STEPS = (P::C + STEP - 1) / STEP, PART_STEPS = (STEPS + PARTS - 1) / PARTS;
  static constexpr int KL = PARTS == 1 ? P::C : PART_STEPS * STEP;  // l of a part
  static constexpr int PLANES = GROUPS * JC;                        // products of matrices, one for each (i, j)
  static constexpr int ROW_TILES = BM / (16 * MT), UNITS = PLANES / JT * ROW_TILES * NS;
  static constexpr int HELD = PARTS == 1 ? 1 : (UNITS + WARPS - 1) / WARPS;  // units whose sums a warp keeps
  // What is read and written of a row: runs of features that lie side by side, at any address.
  static constexpr int X_RUNS = WHOLE_J ? 1 : KL, X_RUN = WHOLE_J ? GROUPS * KL * P::D : JC;
  static constexpr int X_CHUNKS = (X_RUN + 2 * (VECTOR - 1)) / VECTOR;
  static constexpr int L_PITCH = WHOLE_J ? P::D * SIZE : X_CHUNKS * 16;  // bytes from l to l + 1
  static constexpr int X_PITCH = (X_RUNS * X_CHUNKS | 1) * 16;           // odd: eight rows meet all banks
  static constexpr int Y_RUNS = WHOLE_J ? 1 : KB, Y_RUN = WHOLE_J ? GROUPS * KB * P::D : JC;
  static constexpr int Y_CHUNKS = (Y_RUN + 2 * (VECTOR - 1)) / VECTOR;
  static constexpr int K_PITCH = WHOLE_J ? P::D * SIZE : Y_CHUNKS * 16;
  static constexpr int Y_PITCH = (Y_RUNS * Y_CHUNKS | 1) * 16;
  static constexpr int STEP_BYTES = PRODUCTS == 0 ? NB * SIZE : NS * NT * 256;  // weights of a step and plane
  static constexpr int PLANE_BYTES = PART_STEPS * STEP_BYTES, PART_BYTES = PLANES * PLANE_BYTES,
                       COLUMN_BYTES = PARTS * PART_BYTES;
  static constexpr int W_BYTES = STREAMED ? 0 : COLUMN_BYTES;
  static constexpr int X_BYTES = BM * X_PITCH, STAGE_BYTES = X_BYTES + (STREAMED ? PART_BYTES : 0);
  static constexpr int SHARED_BYTES = W_BYTES + STAGES * STAGE_BYTES + BM * Y_PITCH;
  static constexpr int WINDOWS = (P::D + JC - 1) / JC, GROUP_TILES = (P::A + GROUPS - 1) / GROUPS;
  static constexpr int COLUMNS = GROUP_TILES * WINDOWS * OUTPUT_TILES;
  static constexpr int64 PACKED_BYTES = int64(COLUMNS) * COLUMN_BYTES;
  static_assert(BM % (16 * MT) == 0 && JC <= P::D && (PARTS - 1) * PART_STEPS < STEPS && STAGES >= 2, "");
  static_assert(GROUPS == 1 || (WHOLE_J && OUTPUT_TILES == 1 && PARTS == 1), "whole blocks i, or one");
  static_assert(PRODUCTS < 3 || SIZE == 4, "16-bit numbers are multiplied once");
  static_assert(PRODUCTS != 0 || PARTS == 1, "only short sums are added without tensor cores");
  static_assert(JT == 1 || (JT == 2 && P::D % 2 == 0 && JC % 2 == 0 && PRODUCTS > 0), "two j, by tensor cores");
  static_assert(!STREAMED || PARTS > 1, "what comes in one part need not come again");
  static_assert(!NARROW || (MT == 2 && NT == 1 && NS == 1), "32 rows have a lane each");
};

// Elements from the beginning of an address's chunk to the address.
template <typename T>
__device__ __forceinline__ int into_chunk(const T* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) % 16 / sizeof(T));
}

// A warp's unit: MT tiles of rows of one or two planes, and NT tiles of outputs.
template <typename P, typename Tile>
struct GatherUnit {
  int first_row, g, j, plane, k0;  // the lane's first row, and the first plane
  __device__ __forceinline__ explicit GatherUnit(int index) {
    k0 = index % Tile::NS * Tile::NT * 8;
    first_row = index / Tile::NS % Tile::ROW_TILES * Tile::MT * 16 + threadIdx.x % 32 / 4;
    plane = index / Tile::NS / Tile::ROW_TILES * Tile::JT, g = plane / Tile::JC, j = plane % Tile::JC;
  }
};

// The column of a block: its first i, j and k, and the number of each.
template <typename P, typename Tile>
struct GatherColumn {
  int i0, j0, k0, groups, js, outputs;
  __device__ __forceinline__ explicit GatherColumn(int index) {
    k0 = index % Tile::OUTPUT_TILES * Tile::NB;
    j0 = index / Tile::OUTPUT_TILES % Tile::WINDOWS * Tile::JC;
    i0 = index / Tile::OUTPUT_TILES / Tile::WINDOWS * Tile::GROUPS;
    groups = P::A - i0 < Tile::GROUPS ? P::A - i0 : Tile::GROUPS;
    js = P::D - j0 < Tile::JC ? P::D - j0 : Tile::JC;
    outputs = P::B - k0 < Tile::NB ? P::B - k0 : Tile::NB;
  }
};

// The address of a weight of a column: weights are in the order in which the lanes of a warp load them.
template <typename Tile>
__device__ __forceinline__ int weight_place(int g, int k, int l, int j) {
  const int step = l / Tile::STEP, within = l % Tile::STEP;
  const int part = step / Tile::PART_STEPS, of_part = step % Tile::PART_STEPS;
  const int of_step = ((part * Tile::PLANES + g * Tile::JC + j) * Tile::PART_STEPS + of_part) * Tile::STEP_BYTES;
  if constexpr (Tile::PRODUCTS == 0) {
    return of_step + k * Tile::SIZE;
  } else {  // a lane has column k % 8 and two words, which are half a step apart
    constexpr int WORD = 4 / Tile::SIZE;
    const int lane = k % 8 * 4 + within / WORD % 4;
    return of_step + (k / 8 * 32 + lane) * 8 + within / (4 * WORD) * 4 + within % WORD * Tile::SIZE;
  }
}

// Addresses of a column's operands and results. Rows are those of the batch.
template <typename P, typename Tile>
struct GatherAddresses {
  using T = typename Tile::Element;
  const Arguments& arguments;
  const GatherColumn<P, Tile> column;
  const T* const x;
  T* const y;
  const T* const x_end;               // of the whole operand
  const unsigned char* const packed;  // the column's weights, if they are

  __device__ __forceinline__ GatherAddresses(const Arguments& launch, int index)
      : arguments(launch),
        column(index),
        x(static_cast<const T*>(launch.x) +
          (int64(column.i0) * P::C * P::D + column.j0) * launch.x_feature_stride),
        y(static_cast<T*>(launch.y) + (int64(column.i0) * P::B + column.k0) * P::D + column.j0),
        x_end(static_cast<const T*>(launch.x) + (launch.batch - 1) * launch.x_batch_stride +
              int64(P::A) * P::C * P::D),
        packed(static_cast<const unsigned char*>(launch.weight) + int64(index) * Tile::COLUMN_BYTES) {}

  __device__ __forceinline__ const T* x_row(int64 row) const { return x + row * arguments.x_batch_stride; }
  __device__ __forceinline__ T* y_row(int64 row) const { return y + row * arguments.y_batch_stride; }
  __device__ __forceinline__ T weight(int g, int k, int l, int j) const {
    if constexpr (Tile::PACKED) return *reinterpret_cast<const T*>(packed + weight_place<Tile>(g, k, l, j));
    return static_cast<const T*>(
        arguments
            .weight)[(column.i0 + g) * arguments.weight_stride_a + (column.k0 + k) * arguments.weight_stride_b +
                     l * arguments.weight_stride_c + (column.j0 + j) * arguments.weight_stride_d];
  }
};

// How many elements into its chunk a run begins, in a tile: by row, and by l of x or k of y.
template <typename Tile>
struct IntoChunk {
  unsigned first, by_row, by_run;
  __device__ __forceinline__ IntoChunk(int of_first, int64 row_stride, int64 run_stride)
      : first(of_first),
        by_row(static_cast<unsigned>(row_stride) % Tile::VECTOR),
        by_run(Tile::WHOLE_J ? 0 : static_cast<unsigned>(run_stride) % Tile::VECTOR) {}
  __device__ __forceinline__ int at(int row, int run) const {
    return static_cast<int>((first + row * by_row + run * by_run) % Tile::VECTOR);
  }
  __device__ __forceinline__ bool are_even() const { return (first | by_row | by_run) % 2 == 0; }
  __device__ __forceinline__ bool are_chunks() const { return (first | by_row | by_run) == 0; }
};
