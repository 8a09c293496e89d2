// Shapes and tiles of chain_wgmma16.cuh: the work of a block, and its layout of shared memory.
#pragma once

#include "common/chain_arguments.cuh"
#include "common/smem_layout.cuh"

template <int A2_, int B2_, int C2_, int B1_, int D1_, int SIBLINGS_> struct ChainPattern {
  static constexpr int A2 = A2_, B2 = B2_, C2 = C2_, B1 = B1_, D1 = D1_, SIBLINGS = SIBLINGS_;
  static constexpr int C1 = A2 * B2 / D1;
  static constexpr int IN = A2 * C2, OUT = B1 * D1;  // features, of a sibling
  static_assert(B2 % D1 == 0 && C2 % 8 == 0 && OUT % 8 == 0, "");
  static_assert(D1 == 1 || D1 == 2 || D1 == 4 || D1 % 8 == 0, "");
};

// GROUPS: warpgroups that multiply. NK: outputs k of a chunk. KS: features of x in a slot. SPLITS: parts of
// a block of z. SLOT_J, SLOT_P: classes and steps of 16 l whose weights a slot holds for phase 2. CLUSTER: blocks
// that have the same rows: each computes a share of z, for all of them, and a share of the outputs.
template <typename P, int GROUPS_, int BLOCKS_, int NK_, int KS_, int SPLITS_, int SLOT_J_, int SLOT_P_, int STAGES_,
          int CLUSTER_>
struct ChainTile {
  static constexpr int GROUPS = GROUPS_, BLOCKS = BLOCKS_, NK = NK_, KS = KS_, SPLITS = SPLITS_;
  static constexpr int SLOT_J = SLOT_J_, SLOT_P = SLOT_P_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr int LOADERS = 128, MULTIPLIERS = 128 * GROUPS, THREADS = LOADERS + MULTIPLIERS;
  static constexpr int ROWS = 64 * GROUPS;
  static constexpr int AT_START = 65536 / (THREADS * BLOCKS) / 8 * 8;
  static constexpr int LOADER_REGISTERS = 40;
  static constexpr int TAKEN = (AT_START * (GROUPS + 1) - LOADER_REGISTERS) / GROUPS / 8 * 8;
  static constexpr int MULTIPLIER_REGISTERS = TAKEN < 240 ? TAKEN : 240;
  // Phase 1.
  static constexpr int L_OF_BLOCK = P::B2 / P::D1;                // of a class
  static constexpr int TILES_OF_BLOCK = (L_OF_BLOCK + 7) / 8;    // of a class
  static constexpr int SPLIT_TILES = TILES_OF_BLOCK / SPLITS;
  static constexpr int CLASSES = P::SIBLINGS * P::D1;
  static constexpr int N1 = CLASSES * SPLIT_TILES * 8;
  static constexpr int PARTS = (P::C2 + KS - 1) / KS, STEPS_OF_PART = KS / 16;
  static constexpr int CHUNKS_OF_ROW = KS / 8, ROW_BYTES = KS * 2, X_BYTES = ROWS * ROW_BYTES;
  static constexpr int Z_BLOCKS = P::A2 * SPLITS;  // of columns that are computed at a time
  static constexpr int WEIGHT_BYTES_1 = N1 * KS * 2, SLOTS_1 = Z_BLOCKS * PARTS;
  static constexpr int64 RIGHT_BYTES = int64(SLOTS_1) * WEIGHT_BYTES_1;
  // Phase 2.
  static constexpr int J = P::D1 < 8 ? P::D1 : 8, J_GROUPS = P::D1 / J;  // classes at a time
  static constexpr int TILES_OF_CLASS = P::A2 * TILES_OF_BLOCK, STEPS = (TILES_OF_CLASS + 1) / 2;
  static constexpr int STEP_BYTES = NK * 32, WEIGHT_BYTES_2 = SLOT_J * SLOT_P * STEP_BYTES;
  static constexpr int OUTPUT_CHUNKS = (P::B1 + NK - 1) / NK;
  static constexpr int CHUNKS = P::SIBLINGS * OUTPUT_CHUNKS * J_GROUPS;  // of NK outputs and J classes
  static constexpr int SLOTS_OF_CHUNK = J / SLOT_J * (STEPS / SLOT_P), SLOTS_2 = CHUNKS * SLOTS_OF_CHUNK;
  static constexpr int CHUNK_BYTES = SLOTS_OF_CHUNK * WEIGHT_BYTES_2;
  static constexpr int AT_ONCE = largest_divisor(SLOT_P, SLOT_P < 6 ? SLOT_P : 6);  // steps of a group of products
  static constexpr int RUN_TILES = P::D1 >= 4 ? 1 : 4 / P::D1;  // of 8 columns, that make whole runs of features
  static constexpr int RUNS = P::D1 >= 8 ? 2 : 1;               // of a thread, in those
  // Shared memory.
  static constexpr int SLOT_BYTES =
      X_BYTES + WEIGHT_BYTES_1 > WEIGHT_BYTES_2 ? X_BYTES + WEIGHT_BYTES_1 : WEIGHT_BYTES_2;
  static constexpr int BARRIER_BYTES = 128;
  static constexpr int STASH_BYTES = CLASSES * STEPS * 2048;  // of a warpgroup
  // A short bias is copied to shared memory; of a long one, threads read their parts from global memory.
  static constexpr int FEATURES = P::SIBLINGS * P::OUT;
  static constexpr bool SHARED_BIAS = FEATURES <= 1536;
  static constexpr int STASHES_AT = BARRIER_BYTES + (SHARED_BIAS ? (FEATURES * 2 + 127) / 128 * 128 : 0);
  static constexpr int RING_AT = STASHES_AT + GROUPS * STASH_BYTES;
  static constexpr int SHARED_BYTES = RING_AT + STAGES * SLOT_BYTES;
  static constexpr int64 PACKED_BYTES = RIGHT_BYTES + int64(CHUNKS) * CHUNK_BYTES;
  static_assert(TILES_OF_BLOCK % SPLITS == 0 && N1 <= 256 && KS % 16 == 0, "");
  static_assert(J * NK <= 256 && NK % (8 * RUN_TILES) == 0, "");
  static_assert(J % SLOT_J == 0 && STEPS % SLOT_P == 0 && (SLOT_J == 1 || SLOT_P == STEPS), "");
  static_assert(CLUSTER <= Z_BLOCKS && CLUSTER <= CHUNKS, "");
  static_assert(STAGES >= 2 && STAGES * 16 <= BARRIER_BYTES && SLOT_BYTES % 128 == 0, "");
};
