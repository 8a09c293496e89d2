// Tiles of chain_mlp_wgmma16.cuh: the work of a block, and its layout of shared memory.
#pragma once

#include "common/chain_tile.cuh"

// First: the ChainTile of the first chain. Second: that of the other, whose KS and SPLITS are not used. SLOT_STEPS:
// steps of 16 features of h whose weights a slot holds.
template <typename P1, typename P2, typename First_, typename Second_, int SLOT_STEPS_, int STAGES_> struct MlpTile {
  using First = First_;
  using Second = Second_;
  static constexpr int GROUPS = First::GROUPS, ROWS = First::ROWS, STAGES = STAGES_, SLOT_STEPS = SLOT_STEPS_;
  static constexpr int LOADERS = First::LOADERS, THREADS = First::THREADS, BLOCKS = 1, CLUSTER = 1;
  static constexpr int CHUNK_FEATURES = First::NK * P1::D1, STEPS_OF_CHUNK = CHUNK_FEATURES / 16;
  static constexpr int CHUNKS_OF_BLOCK = P2::C2 / CHUNK_FEATURES;  // of the second chain's right factor
  static constexpr int N = Second::N1;
  static constexpr int HIDDEN_BYTES = SLOT_STEPS * N * 32, HIDDEN_SLOTS = STEPS_OF_CHUNK / SLOT_STEPS;
  static constexpr int HIDDEN_CHUNK_BYTES = First::CHUNK_BYTES + HIDDEN_SLOTS * HIDDEN_BYTES;
  static constexpr int64 LAST_AT = First::RIGHT_BYTES + int64(First::CHUNKS) * HIDDEN_CHUNK_BYTES;
  static constexpr int64 PACKED_BYTES = LAST_AT + int64(Second::CHUNKS) * Second::CHUNK_BYTES;
  static constexpr int SLOTS =
      First::SLOTS_1 + First::CHUNKS * (First::SLOTS_OF_CHUNK + HIDDEN_SLOTS) + Second::SLOTS_2;
  static constexpr int larger(int m, int n) { return m > n ? m : n; }
  static constexpr int SLOT_BYTES = larger(First::SLOT_BYTES, larger(Second::WEIGHT_BYTES_2, HIDDEN_BYTES));
  static constexpr int STASHES_AT = First::BARRIER_BYTES + ((P1::OUT + P2::OUT) * 2 + 127) / 128 * 128;
  static constexpr int STASH_BYTES = First::STASH_BYTES + Second::STASH_BYTES;
  static constexpr int RING_AT = STASHES_AT + GROUPS * STASH_BYTES;
  static constexpr int SHARED_BYTES = RING_AT + STAGES * SLOT_BYTES;
  static_assert(First::CLUSTER == 1 && Second::CLUSTER == 1, "");
  static_assert(P1::SIBLINGS == 1 && P2::SIBLINGS == 1 && P1::OUT == P2::IN && First::J_GROUPS == 1, "");
  static_assert(P1::B1 % First::NK == 0 && P2::C2 % CHUNK_FEATURES == 0 && First::NK % 16 == 0, "");
  static_assert(STEPS_OF_CHUNK % SLOT_STEPS == 0 && STAGES * 16 <= First::BARRIER_BYTES, "");
};
