// The stages of chain_mma.cuh, one per factor: the work of a warp, and the layout of operands, weights and results.
#pragma once

#include "common/numeric_types.cuh"

constexpr int divided_up(int n, int by) { return (n + by - 1) / by; }

// A row of features in shared memory. For each (i, j) the C values that are the operands of one sum are contiguous
// and padded with zeros to FILLED. ARE_RESULTS: a row of results, in the order of global memory.
template <int SIZE, int A, int C_, int D_, int FILLED_, bool ARE_RESULTS = false>
struct FeatureRow {
  static constexpr int C = C_, D = D_, FILLED = FILLED_, PLANES = A * D, FEATURES = PLANES * C;
  static constexpr int BYTES = PLANES * FILLED * SIZE;
  static constexpr bool IN_CHUNKS = FEATURES * SIZE % 16 == 0;  // of 16 bytes, in memory
  static constexpr bool AS_IN_MEMORY = D == 1 && FILLED == C;
  // An odd number of chunks, so that eight rows use all banks. Results that are not whole chunks are stored as one run.
  static constexpr int PITCH = ARE_RESULTS && !IN_CHUNKS ? BYTES : (divided_up(BYTES, 16) | 1) * 16;
  // The offset of a feature in bytes from the start of the row.
  static __device__ __forceinline__ int place(int feature) {
    if constexpr (AS_IN_MEMORY) return feature * SIZE;
    return ((feature / (C * D) * D + feature % D) * FILLED + feature / D % C) * SIZE;
  }
};

// PRODUCTS of two numbers, by tensor cores: 1; 3 of TF32 numbers for fp32, as in mma_tf32x3.cuh; or 0: ordinary
// arithmetic, for short sums. A warp's unit has MT tiles of 16 rows, NT tiles of 8 outputs and JT neighbouring j.
template <int SIZE_, int A_, int B_, int C_, int D_, int PRODUCTS_, int MT_, int NT_, int JT_>
struct ChainStage {
  static constexpr int SIZE = SIZE_, A = A_, B = B_, C = C_, D = D_, PRODUCTS = PRODUCTS_;
  static constexpr int MT = MT_, NT = NT_, JT = JT_;
  static constexpr int STEP = PRODUCTS == 0 ? 1 : 32 / SIZE;  // l that are added at a time
  static constexpr int STEPS = divided_up(C, STEP), PLANES = A * D;
  static constexpr int TILES = divided_up(B, 8), UNITS_OF_PLANE = divided_up(TILES, NT);
  static constexpr int STEP_BYTES = PRODUCTS == 0 ? 8 * SIZE : 256;  // weights of a step and 8 outputs
  static constexpr int64 PACKED_BYTES = int64(PLANES) * TILES * STEPS * STEP_BYTES;
  using Row = FeatureRow<SIZE, A, C, D, STEPS * STEP>;  // what it reads
  static_assert(JT == 1 || D % JT == 0, "neighbouring j of one i");
  static_assert(PRODUCTS < 3 || SIZE == 4, "16-bit numbers are multiplied once");
};

// The layout of a stage's results in the row of the next stage. Where possible, the two columns 2q and 2q + 1 of a
// tensor-core tile that one lane has are outputs that are neighbours in that row.
template <typename Stage, typename Into>
struct StageResults {
  static constexpr int APART = Into::D % Stage::D == 0 ? Into::D / Stage::D : 0;  // outputs that become neighbours
  static constexpr bool COLUMN_PAIRS = APART > 0 && Stage::B % (2 * (APART > 0 ? APART : 1)) == 0 && Into::C % 2 == 0;
  static constexpr bool J_PAIRS = Stage::JT == 2 && !COLUMN_PAIRS && Into::D == 1 && Into::C % 2 == 0;
  static __device__ __forceinline__ int output_of(int column) {
    if constexpr (!COLUMN_PAIRS) return column;
    constexpr int BOTH = 2 * (APART > 0 ? APART : 1);
    return column / BOTH * BOTH + column % BOTH / 2 + column % 2 * APART;
  }
  static __device__ __forceinline__ int feature(int plane, int k) {
    return (plane / Stage::D * Stage::B + k) * Stage::D + plane % Stage::D;
  }
};

template <int AT, typename First, typename... Others>
struct TypeAt {
  using Type = typename TypeAt<AT - 1, Others...>::Type;
};
template <typename First, typename... Others>
struct TypeAt<0, First, Others...> {
  using Type = First;
};

// The stages in the order of computation. A stage reads one region of shared memory and writes the other; the next
// stage swaps them. Where all factors have several i, a block may compute one of GROUPS equal shares of them; the
// stages are then those of a share. AHEAD: the number of stages of the first of two layers; 0 for one layer.
template <typename T, int BM_, int WARPS_, int BLOCKS_, bool BATCH_LAST_, int GROUPS_, int SIBLINGS_, int AHEAD_,
          typename... Stages>
struct ChainMmaTile {
  using Element = T;
  static constexpr int SIZE = sizeof(T), VECTOR = 16 / SIZE;
  static constexpr int BM = BM_, WARPS = WARPS_, THREADS = 32 * WARPS, BLOCKS = BLOCKS_;
  static constexpr bool BATCH_LAST = BATCH_LAST_;
  static constexpr int GROUPS = GROUPS_, SIBLINGS = SIBLINGS_, AHEAD = AHEAD_;
  static constexpr int SHARES = GROUPS * SIBLINGS;  // of the outputs: a block has one
  static constexpr int LENGTH = sizeof...(Stages);
  template <int AT>
  using StageAt = typename TypeAt<AT, Stages...>::Type;
  using Last = StageAt<LENGTH - 1>;
  using X = typename StageAt<0>::Row;
  using Y = FeatureRow<SIZE, 1, Last::A * Last::B * Last::D, 1, Last::A * Last::B * Last::D, true>;
  template <int AT>
  using RowAt = typename TypeAt<AT, typename Stages::Row..., Y>::Type;
  template <int AT>
  using ResultsOf = StageResults<StageAt<AT>, RowAt<AT + 1>>;
  template <int AT = 0>
  static constexpr int region(int which) {
    int bytes = AT % 2 == which ? BM * RowAt<AT>::PITCH : 0;
    if constexpr (AT < LENGTH) {
      const int others = region<AT + 1>(which);
      if (others > bytes) bytes = others;
    }
    return bytes;
  }
  static constexpr int FIRST_BYTES = divided_up(region(0), 16) * 16;
  static constexpr int SHARED_BYTES = FIRST_BYTES + divided_up(region(1), 16) * 16;
  using Hidden = RowAt<AHEAD>;  // what the second of two layers reads
  static constexpr int HIDDEN_FEATURES = Hidden::FEATURES;
  // The index of a stage's factor among the weights of two layers: the first layer's, left to right, then the second's.
  template <int AT>
  static constexpr int order_of() {
    return AT < AHEAD ? AHEAD - 1 - AT : AHEAD + LENGTH - 1 - AT;
  }
  // Its index in `ChainPackArguments`, which has one chain per layer.
  static constexpr int OF_CHAIN = AHEAD > 0 ? LENGTH / 2 : LENGTH;
  template <int AT>
  static constexpr int chain_of() {
    return order_of<AT>() / OF_CHAIN;
  }
  template <int AT>
  static constexpr int place_of() {
    return OF_CHAIN - 1 - order_of<AT>() % OF_CHAIN;
  }
  // The offset of a stage in the packed weights, in bytes.
  template <int AT>
  static constexpr int64 packed_before() {
    if constexpr (AT == 0) {
      return 0;
    } else {
      return packed_before<AT - 1>() + StageAt<AT - 1>::PACKED_BYTES;
    }
  }
  static constexpr int64 PACKED_BYTES = packed_before<LENGTH>();  // of a group
  static_assert(AHEAD == 0 || (AHEAD < LENGTH && SIBLINGS == 1), "two layers have no siblings");
  static_assert(GROUPS == 1 || BATCH_LAST || X::IN_CHUNKS, "shares of rows of x are whole chunks");
  static_assert(SHARES == 1 || BATCH_LAST || Y::IN_CHUNKS, "shares of rows of y are whole chunks");
  static_assert(((BM % (16 * Stages::MT) == 0) && ...), "a unit's rows are a block's");
};
