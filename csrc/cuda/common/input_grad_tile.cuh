// Shapes and tiles of input_grad_wgmma16.cuh: which products a block computes, and where what it needs lies.
#pragma once

#include "common/smem_layout.cuh"

// Strides count elements.
struct InputGradArguments {
  const void* grads[4];  // dY [batch, OUT] of each sibling
  const void* weights;   // packed: input_grad_pack.cuh
  void* between;         // dz [sibling, batch, MIDDLE], contiguous
  void* to;              // dx [batch, IN], contiguous
  int64 batch, grad_strides[4];
  int64 rows_per_block;  // a multiple of 64
  // Where what a chain reads is an activation: what the factor below it read, [batch, BELOW], contiguous, and the bias
  // that was added to that factor's product, or null. dx is then the gradient of what was activated.
  const void* below;
  const void* bias;
};

// Chains (1, b1, c1, d1) * (a2, b2, c2, 1) that read the same, or one that reads an ACTIVATION of the product by a
// factor (1, b0, C0, D0).
template <int A2_, int B2_, int C2_, int B1_, int D1_, int SIBLINGS_, int ACTIVATION_ = 0, int C0_ = 0, int D0_ = 1>
struct InputGradPattern {
  static constexpr int A2 = A2_, B2 = B2_, C2 = C2_, B1 = B1_, D1 = D1_, SIBLINGS = SIBLINGS_;
  static constexpr int ACTIVATION = ACTIVATION_, C0 = C0_, D0 = D0_, BELOW = C0 * D0;
  static constexpr bool IS_ACTIVATED = C0 > 0;
  static_assert(!IS_ACTIVATED || SIBLINGS == 1, "");
  static_assert(C0 % 32 == 0 && (D0 == 1 || D0 == 2 || D0 == 4 || D0 == 8), "");
  static constexpr int MIDDLE = A2 * B2, IN = A2 * C2, OUT = B1 * D1;  // features, of a chain
  static_assert(D1 == 1 || D1 == 2 || D1 == 4 || D1 == 8, "");
  static_assert(B2 % 32 == 0 && MIDDLE % D1 == 0 && C2 % 8 == 0 && OUT % 8 == 0, "");
};

// Features that a thread reads for a group of products of D classes: 16 bytes of a row, or several.
template <int D> struct GradUnit {
  static constexpr int FEATURES = D < 4 ? 32 : 16 * D, LOADS = FEATURES / 32;
  static constexpr int STEPS = FEATURES / (16 * D), PRODUCTS = STEPS * D;  // of each class; of all
};

// GROUPS: warpgroups that multiply, of 64 rows each. SPLITS: blocks that share the A2 blocks of the right factor for
// the same rows. PARTS: blocks that share the columns of dx, each of which computes dz for itself. KF: features of dY
// in a slot. NC: columns of dx that are computed at a time.
template <typename P, int GROUPS_, int BLOCKS_, int SPLITS_, int PARTS_, int KF_, int NC_, int STAGES_>
struct InputGradTile {
  static constexpr int GROUPS = GROUPS_, BLOCKS = BLOCKS_, SPLITS = SPLITS_, PARTS = PARTS_, KF = KF_, NC = NC_;
  static constexpr int STAGES = STAGES_;
  static constexpr int LOADERS = 128, MULTIPLIERS = 128 * GROUPS, THREADS = LOADERS + MULTIPLIERS;
  static constexpr int ROWS = 64 * GROUPS, OF_ROWS = SPLITS * PARTS;  // blocks that have the same rows
  static constexpr int AT_START = 65536 / (THREADS * BLOCKS) / 8 * 8;
  static constexpr int LOADER_REGISTERS = 40;
  static constexpr int TAKEN = (AT_START * (GROUPS + 1) - LOADER_REGISTERS) / GROUPS / 8 * 8;
  static constexpr int MULTIPLIER_REGISTERS = TAKEN < 240 ? TAKEN : 240;
  // Phase 1.
  static constexpr int SHARE = P::A2 / SPLITS, N1 = SHARE * P::B2, NL = N1 / P::D1;  // columns of a dz; of a class
  using Unit = GradUnit<P::D1>;
  static constexpr int UNIT = Unit::FEATURES, UNITS = KF / UNIT, STEPS_OF_UNIT = Unit::STEPS;
  static constexpr int SLOTS_1 = (P::OUT + KF - 1) / KF;
  static constexpr int CHUNKS_OF_ROW = KF / 8, ROW_BYTES = KF * 2, GRAD_BYTES = ROWS * ROW_BYTES;
  static constexpr int WEIGHT_BYTES_1 = KF / P::D1 * N1 * 2;
  static constexpr int64 OF_ONE = int64(SPLITS) * SLOTS_1 * WEIGHT_BYTES_1, LEFT_BYTES = P::SIBLINGS * OF_ONE;
  // Phase 2, over the dz of all siblings.
  static constexpr int STEPS_2 = P::B2 / 16, STEPS = N1 / 16;
  static constexpr int CHUNKS = (P::C2 + NC - 1) / NC, COUNT = CHUNKS / PARTS;  // of a block of the right factor
  static constexpr int RIGHT_BYTES = P::SIBLINGS * P::B2 * NC * 2, WEIGHT_BYTES_2 = RIGHT_BYTES + P::C0 * NC * 2;
  static constexpr int64 PACKED_BYTES = LEFT_BYTES + int64(P::A2) * CHUNKS * WEIGHT_BYTES_2;
  static constexpr int SLOTS = P::SIBLINGS * SLOTS_1 + SHARE * COUNT;
  // Shared memory.
  static constexpr int FIRST_BYTES = GRAD_BYTES + WEIGHT_BYTES_1;
  static constexpr int SLOT_BYTES = FIRST_BYTES > WEIGHT_BYTES_2 ? FIRST_BYTES : WEIGHT_BYTES_2;
  static constexpr int BARRIER_BYTES = 128, SHARED_BYTES = BARRIER_BYTES + STAGES * SLOT_BYTES;
  static_assert(P::A2 % SPLITS == 0 && CHUNKS % PARTS == 0 && N1 <= 256 && N1 % (8 * P::D1) == 0, "");
  static_assert(KF % UNIT == 0 && UNITS % 2 == 0 && NC % 32 == 0 && NC % (8 * P::D0) == 0, "");
  static_assert(STAGES >= 2 && STAGES * 16 <= BARRIER_BYTES && SLOT_BYTES % 128 == 0, "");
};

// Which l of its share a column of a class holds: four threads share 8 columns, and each has two of them, which,
// with the other classes and in neighbouring tiles, must make runs of 8 neighbouring features.
template <int D> constexpr int place_of_column(int column) {
  const int tile = column / 8, quarter = column % 8 / 2, odd = column % 2;
  constexpr int TILES = D >= 4 ? 1 : 4 / D;
  return D == 8 ? tile * 8 + quarter + 4 * odd
                : tile / TILES * TILES * 8 + quarter * (8 / D) + tile % TILES * 2 + odd;
}

// Which feature of a unit, of class 0 of D, place `e` (0 to 7) of half `half` of a step of 16 is: a thread's places
// are in the runs of 8 features that it holds, of each 32.
template <int D> constexpr int feature_of_place(int step, int half, int e) {
  const int of_thread = (4 * step + 2 * half + e % 2) * D;
  return of_thread / 8 * 32 + e / 2 * 8 + of_thread % 8;
}
