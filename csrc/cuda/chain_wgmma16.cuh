// A chain of two 16-bit factors in one launch, on Hopper's warpgroup tensor cores (batch first, sm_90a).
//
// (1, b1, c1, d1) * (a2, b2, c2, 1): x meets the right factor first. z = K2 x has a2 * b2 features;
// feature f of it belongs to class f % d1, and outputs of class j = feature % d1 need only z's class j.
// Several chains of the same patterns ("siblings") may read one x and write beside each other; or two, of which one's
// outputs gate the other's.
//
// A warpgroup that multiplies has 64 rows of x and computes all of their outputs:
//   1. z, block by block. The weights of a block are ordered by class, so that a tile of 8 columns of
//      the sums is of one class: what a thread holds of two such tiles is what it must bring to a
//      product over these 16 l. It is rounded and stored in shared memory, which no other thread reads.
//   2. Outputs k in chunks of NK, all j (at most 8) at a time, so that a thread has runs of 8
//      neighbouring features; bias, activation and residual are applied to them in registers.
// Rows of x and packed weights pass through one ring of slots, filled by the first warpgroup.
#pragma once

#include "common/chain_tile.cuh"
#include "common/cluster.cuh"
#include "common/epilogue.cuh"
#include "common/warpgroup_ring.cuh"

// Which place of a row's chunk of 16 bytes keeps eight rows, read at a time, in different banks.
template <int CHUNKS> __device__ __forceinline__ int swap_of_row(int row) {
  if constexpr (CHUNKS % 8 == 0) return row % 8;
  if constexpr (CHUNKS % 8 == 4) return row / 2 % 4;
  return CHUNKS % 4 == 2 ? row / 4 % 2 : 0;
}

// A block's share of the `COUNT` blocks of z, or chunks of outputs, of its cluster's rows. Blocks with different rows
// start at different ones: if all requested the same weights at once, a few slices of the L2 cache would be busy and
// the others idle.
template <typename Tile, int COUNT> struct Share {
  static constexpr bool EVEN = COUNT % Tile::CLUSTER == 0;
  int rank = static_cast<int>(blockIdx.x) % Tile::CLUSTER, turn = static_cast<int>(blockIdx.x) / Tile::CLUSTER;
  __device__ __forceinline__ int begin() const {
    return EVEN ? rank * (COUNT / Tile::CLUSTER) : rank * COUNT / Tile::CLUSTER;
  }
  __device__ __forceinline__ int count() const {
    return EVEN ? COUNT / Tile::CLUSTER : (rank + 1) * COUNT / Tile::CLUSTER - begin();
  }
  // The one whose turn is at-th.
  __device__ __forceinline__ int operator()(int at) const { return begin() + (at + turn) % count(); }
};

// The order in which outputs are computed: chunk by chunk, or, with a gate, each chunk of both siblings in turn.
template <typename Tile, typename Epilogue> struct Turns {
  static constexpr int CHUNKS = Epilogue::GATED ? 2 : 1, COUNT = Tile::CHUNKS / CHUNKS;
  static_assert(Tile::CLUSTER <= COUNT, "");
};

struct ChainRows {
  int64 first, end;  // of a block
  template <typename Tile> __device__ static __forceinline__ ChainRows of_block(const ChainArguments& arguments) {
    const int64 first = blockIdx.x / Tile::CLUSTER * arguments.rows_per_block, last = first + arguments.rows_per_block;
    return {first, last < arguments.batch ? last : arguments.batch};
  }
};

// The barrier of a cluster, for all threads of its blocks: earlier writes are visible behind it. One block: no wait.
// (Not "aligned": lanes of the warps that load may be on their own.)
template <typename Tile> __device__ __forceinline__ void arrive_at_cluster() {
  if constexpr (Tile::CLUSTER > 1) asm volatile("barrier.cluster.arrive.release;\n" ::: "memory");
}
template <typename Tile> __device__ __forceinline__ void wait_for_cluster() {
  if constexpr (Tile::CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory");
}

// Loads rows of x and the right factor's weights for them, block by block. `weights`: of the first block.
template <typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void load_rows_of_x(const ChainArguments& arguments, AnyRing& ring, int64 row0, int rows,
                                               const unsigned char* first_weights) {
  using Walk = RowWalk<Tile::ROWS, Tile::CHUNKS_OF_ROW, Tile::LOADERS>;
  constexpr int COUNT = (Tile::ROWS + Walk::PASS_ROWS - 1) / Walk::PASS_ROWS;
  const int m0 = threadIdx.x / Walk::WIDTH, first_chunk = threadIdx.x % Walk::WIDTH;
  const uint16* const x = static_cast<const uint16*>(arguments.x) + (row0 + m0) * arguments.x_stride;
  const Share<Tile, Tile::Z_BLOCKS> share;
#pragma unroll 1
  for (int at = 0; at < share.count(); ++at) {
    const int block = share(at);
    const unsigned char* weights = first_weights + int64(block) * Tile::PARTS * Tile::WEIGHT_BYTES_1;
#pragma unroll 1
    for (int part = 0; part < Tile::PARTS; ++part) {
      ring.wait_until_empty();
      if (threadIdx.x == 0) ring.load_weights(weights, Tile::X_BYTES, Tile::WEIGHT_BYTES_1);
#pragma unroll
      for (int pass = 0; pass < Walk::CHUNK_PASSES; ++pass) {
        const int chunk = first_chunk + pass * Walk::WIDTH, feature = part * Tile::KS + chunk * 8;
        const bool inside = P::C2 % Tile::KS == 0 || feature < P::C2;
        const uint16* from = x + block / Tile::SPLITS * P::C2 + feature;
#pragma unroll
        for (int step = 0; step < COUNT; ++step) {
          const int row = m0 + step * Walk::PASS_ROWS;
          if (row < Walk::end(m0)) {
            cp_async_16(ring.here() + row * Tile::ROW_BYTES + (chunk ^ swap_of_row<Tile::CHUNKS_OF_ROW>(row)) * 16,
                        from, inside && row < rows);
          }
          from += Walk::PASS_ROWS * arguments.x_stride;
        }
      }
      ring.full[ring.slot].cp_async_arrive();
      ring.next();
    }
  }
}

// The work of the first warpgroup: loads.
template <typename P, typename Tile, typename Epilogue, typename AnyRing>
__device__ __forceinline__ void load_chain(const ChainArguments& arguments, AnyRing ring) {
  const ChainRows own = ChainRows::of_block<Tile>(arguments);
  const unsigned char* const weights = static_cast<const unsigned char*>(arguments.weights);
  using TileTurns = Turns<Tile, Epilogue>;
  const Share<Tile, TileTurns::COUNT> share;
  for (int64 row0 = own.first; row0 < own.end; row0 += Tile::ROWS) {
    load_rows_of_x<P, Tile>(arguments, ring, row0, rows_inside<Tile::ROWS>(own.end - row0), weights);
    arrive_at_cluster<Tile>();
    if (Epilogue::RESIDUAL && blockIdx.x % Tile::CLUSTER == 0) {
      prefetch_rows<P::SIBLINGS / TileTurns::CHUNKS * P::OUT, Tile::ROWS>(arguments.residual, arguments.residual_stride,
                                                                          row0, own.end);
    }
    prefetch_rows<P::IN, Tile::ROWS>(arguments.x, arguments.x_stride, row0 + Tile::ROWS, own.end);
#pragma unroll 1
    for (int at = 0; at < share.count(); ++at) {
#pragma unroll
      for (int sibling = 0; sibling < TileTurns::CHUNKS; ++sibling) {
        const int64 chunk = share(at) + sibling * TileTurns::COUNT;
        load_weight_slots(ring, weights + Tile::RIGHT_BYTES + chunk * Tile::CHUNK_BYTES, Tile::SLOTS_OF_CHUNK,
                          Tile::WEIGHT_BYTES_2);
      }
    }
    wait_for_cluster<Tile>();
  }
}

// Stores a thread's words of z, at the same offset in all blocks of the cluster.
template <typename Tile> __device__ __forceinline__ void stash_words(unsigned char* place, const uint2& words) {
  if constexpr (Tile::CLUSTER == 1) {
    *reinterpret_cast<uint2*>(place) = words;
  } else {
#pragma unroll
    for (int rank = 0; rank < Tile::CLUSTER; ++rank) {
      asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};\n" ::"r"(address_in_block(place, rank)), "r"(words.x),
                   "r"(words.y)
                   : "memory");
    }
  }
}
template <typename Tile> __device__ __forceinline__ void stash_words(unsigned char* place, const uint4& words) {
  if constexpr (Tile::CLUSTER == 1) {
    *reinterpret_cast<uint4*>(place) = words;
  } else {
#pragma unroll
    for (int rank = 0; rank < Tile::CLUSTER; ++rank) {
      asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address_in_block(place, rank)),
                   "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                   : "memory");
    }
  }
}

// Rounds a block's part of z, and stores it by class.
template <typename T, typename P, typename Tile, int MIDDLE>
__device__ __forceinline__ void stash_block(unsigned char* stash, const float (&sums)[Tile::N1 / 2], int block,
                                            int quarter) {
  constexpr int TILES = Tile::SPLIT_TILES;
  const auto word = [&](int n, int half, int u) {
    float low = sums[n * 4 + half * 2], high = sums[n * 4 + half * 2 + 1];
    if constexpr (MIDDLE != IDENTITY) {  // of what the first product rounds to
      const uint32 rounded = pack_pair<T>(low, high);
      low = activate<MIDDLE>(half_of<T>(rounded, 0)), high = activate<MIDDLE>(half_of<T>(rounded, 1));
    }
    if constexpr (Tile::L_OF_BLOCK % 8 != 0) {  // columns that are no feature: 0 whatever x has
      const int l = (block % Tile::SPLITS * TILES + u) * 8 + 2 * quarter;
      low = l < Tile::L_OF_BLOCK ? low : 0.0f, high = l + 1 < Tile::L_OF_BLOCK ? high : 0.0f;
    }
    return pack_pair<T>(low, high);
  };
#pragma unroll
  for (int c = 0; c < Tile::CLASSES; ++c) {
    unsigned char* const of_class = stash + c * Tile::STEPS * 2048;
    if constexpr (TILES % 2 == 0) {
#pragma unroll
      for (int u = 0; u < TILES; u += 2) {
        const int n = c * TILES + u;
        stash_words<Tile>(of_class + (block * TILES + u) / 2 * 2048,
                          make_uint4(word(n, 0, u), word(n, 1, u), word(n + 1, 0, u + 1), word(n + 1, 1, u + 1)));
      }
    } else {
#pragma unroll
      for (int u = 0; u < TILES; ++u) {
        const int n = c * TILES + u, tile = block * TILES + u;
        stash_words<Tile>(of_class + tile / 2 * 2048 + tile % 2 * 8, make_uint2(word(n, 0, u), word(n, 1, u)));
      }
    }
  }
}

// Writes the thread's z of a sibling, which it has stashed, to memory: of two neighbouring l all classes are a run of features.
// `z`: its first row; `left`: rows from there to the end. (Where it is computed it is not written: what else
// reads the sums there makes the compiler wait for every product.)
template <typename P, typename Tile>
__device__ __forceinline__ void keep_stash(uint16* z, const unsigned char* stash, int quarter, int64 left) {
  constexpr int FEATURES = P::A2 * P::B2, WORDS = P::D1;  // of two features
  static_assert(Tile::L_OF_BLOCK % 2 == 0, "");
#pragma unroll 1
  for (int tile = 0; tile < Tile::TILES_OF_CLASS; ++tile) {
    const int l = tile % Tile::TILES_OF_BLOCK * 8 + 2 * quarter;
    if (Tile::L_OF_BLOCK % 8 != 0 && l >= Tile::L_OF_BLOCK) continue;
    uint16* const to = z + tile / Tile::TILES_OF_BLOCK * P::B2 + l * P::D1;
    const unsigned char* const from = stash + tile / 2 * 2048 + tile % 2 * 8;
    // Both rows of class c: l in the low half of a word, l + 1 in the high half.
    const auto of_class = [&](int c) { return *reinterpret_cast<const uint2*>(from + c * Tile::STEPS * 2048); };
    const auto store = [&](int row, int word, const uint32(&words)[4]) {
      if (row * 8 >= left) return;
      uint16* const at = to + row * 8 * FEATURES + 2 * word;
      if constexpr (WORDS == 1) {
        *reinterpret_cast<uint32*>(at) = words[0];
      } else if constexpr (WORDS == 2) {
        *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
      } else {
        store_16_bytes(at, words[0], words[1], words[2], words[3]);
      }
    };
#pragma unroll
    for (int word = 0; word < WORDS; word += 4) {
      uint32 upper[4] = {}, lower[4] = {};  // rows
#pragma unroll
      for (int w = 0; w < (WORDS < 4 ? WORDS : 4); ++w) {
        if constexpr (P::D1 == 1) {
          const uint2 both = of_class(0);
          upper[w] = both.x, lower[w] = both.y;
        } else {  // of classes c and c + 1, the one l or the other
          const int c = 2 * (word + w) % P::D1;
          const bool is_next = 2 * (word + w) >= P::D1;
          const uint2 one = of_class(c), other = of_class(c + 1);
          upper[w] = is_next ? one.x >> 16 | (other.x & 0xffff0000u) : (one.x & 0xffffu) | other.x << 16;
          lower[w] = is_next ? one.y >> 16 | (other.y & 0xffff0000u) : (one.y & 0xffffu) | other.y << 16;
        }
      }
      store(0, word, upper);
      store(1, word, lower);
    }
  }
}

// A chunk's place in y: the thread's first k, and its first feature, of the first class `j0`.
template <typename P, typename Tile> struct OutputPlace {
  static constexpr bool WIDE = P::D1 >= 8;
  static constexpr int RUN_COUNT = Tile::NK / 8 / Tile::RUN_TILES * Tile::RUNS;  // of 8 features, in a row
  int k, feature;
  __device__ __forceinline__ OutputPlace(int chunk, int quarter) {
    const int j_group = chunk % Tile::J_GROUPS, k_chunk = chunk / Tile::J_GROUPS % Tile::OUTPUT_CHUNKS;
    const int sibling = chunk / (Tile::J_GROUPS * Tile::OUTPUT_CHUNKS);
    k = k_chunk * Tile::NK + (WIDE ? quarter : quarter * (8 / Tile::J));
    feature = sibling * P::OUT + k * P::D1 + j_group * Tile::J;
  }
  // How many k a run lies behind the first.
  __device__ static __forceinline__ constexpr int behind(int run) {
    return run / Tile::RUNS * Tile::RUN_TILES * 8 + run % Tile::RUNS * 4;
  }
  __device__ __forceinline__ bool inside(int run) const { return P::B1 % Tile::NK == 0 || k + behind(run) < P::B1; }
  // The sum that is value v of a run, in the thread's row `half`.
  __device__ static __forceinline__ float sum(const float (&sums)[Tile::J][Tile::NK / 2], int run, int half, int v) {
    const int tiles = run / Tile::RUNS * Tile::RUN_TILES, k_of_run = v / Tile::J;
    const int tile = WIDE ? tiles : tiles + k_of_run / 2, column = WIDE ? run % Tile::RUNS : k_of_run % 2;
    return sums[v % Tile::J][tile * 4 + half * 2 + column];
  }
};

// The residual of a chunk's outputs, loaded while the outputs are computed.
template <typename P, typename Tile, bool NEEDED> struct Residual {
  uint32 words[NEEDED ? OutputPlace<P, Tile>::RUN_COUNT : 1][2][4];
  __device__ __forceinline__ void load(const ChainArguments& arguments, const OutputPlace<P, Tile>& place, int64 row,
                                       int64 end) {
    if constexpr (NEEDED) {
      const uint16* const from =
          static_cast<const uint16*>(arguments.residual) + row * arguments.residual_stride + place.feature;
#pragma unroll
      for (int run = 0; run < OutputPlace<P, Tile>::RUN_COUNT; ++run)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row + half * 8 >= end || !place.inside(run)) continue;
          load_16_bytes(words[run][half], from + half * 8 * arguments.residual_stride + place.behind(run) * P::D1);
        }
    }
  }
};

// The part of the bias that a run begins at, in shared memory if it is SHARED.
template <bool SHARED> __device__ __forceinline__ void load_bias_of_run(uint32 (&words)[4], const uint16* from) {
  if constexpr (SHARED) {
    const uint4 added = *reinterpret_cast<const uint4*>(from);
    words[0] = added.x, words[1] = added.y, words[2] = added.z, words[3] = added.w;
  } else {
    load_16_bytes(words, from);
  }
}

// The factor of the outputs of a chunk's second sibling: the activated outputs of the first.
template <typename T, typename P, typename Tile, typename Epilogue> struct Gate {
  using Place = OutputPlace<P, Tile>;
  uint32 words[Epilogue::GATED ? Place::RUN_COUNT : 1][2][4];
  template <bool SHARED_BIAS>
  __device__ __forceinline__ void keep(const float (&sums)[Tile::J][Tile::NK / 2], const Place& place,
                                       const uint16* bias) {
#pragma unroll
    for (int run = 0; run < Place::RUN_COUNT; ++run) {
      uint32 bias_words[4] = {};
      if (Epilogue::BIAS && place.inside(run)) {
        load_bias_of_run<SHARED_BIAS>(bias_words, bias + place.feature + place.behind(run) * P::D1);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float values[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float value = place.sum(sums, run, half, 2 * w + e) + half_of<T>(bias_words[w], e);
            values[e] = activate<Epilogue::ACTIVATION>(value);
          }
          words[run][half][w] = pack_pair<T>(values[0], values[1]);
        }
    }
  }
};

// Stores a chunk's outputs, after the epilogue. `bias` is in shared memory if it is SHARED_BIAS.
template <typename T, typename P, typename Tile, typename Epilogue, bool SHARED_BIAS>
__device__ __forceinline__ void store_outputs(const ChainArguments& arguments, const float (&sums)[Tile::J][Tile::NK / 2],
                                              const Residual<P, Tile, Epilogue::RESIDUAL>& residual,
                                              const Gate<T, P, Tile, Epilogue>& gate, const OutputPlace<P, Tile>& place,
                                              const uint16* bias, int64 row, int64 end) {
  const int64 first = row * arguments.y_stride + place.feature;
#pragma unroll
  for (int run = 0; run < OutputPlace<P, Tile>::RUN_COUNT; ++run) {
    const int offset = place.behind(run) * P::D1;
    const bool is_inside = place.inside(run);
    if (!Epilogue::IN_FLOAT32 && !is_inside) continue;
    uint32 bias_words[4] = {};
    if (Epilogue::BIAS && is_inside) load_bias_of_run<SHARED_BIAS>(bias_words, bias + place.feature + offset);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!Epilogue::IN_FLOAT32 && row + half * 8 >= end) continue;
      const auto result = [&](int e) {
        float value = place.sum(sums, run, half, e);
        if (Epilogue::BIAS) value += half_of<T>(bias_words[e / 2], e % 2);
        if constexpr (Epilogue::GATED) {
          value *= half_of<T>(gate.words[run][half][e / 2], e % 2);
        } else {
          value = activate<Epilogue::ACTIVATION>(value);
        }
        if constexpr (Epilogue::RESIDUAL) value += half_of<T>(residual.words[run][half][e / 2], e % 2);
        return value;
      };
      const int64 at = first + half * 8 * arguments.y_stride + offset;
      if constexpr (Epilogue::IN_FLOAT32) {
        float values[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) values[e] = result(e);
        store_eight_floats(static_cast<float*>(arguments.y) + at, values, is_inside && row + half * 8 < end);
      } else {
        uint32 words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = pack_pair<T>(result(2 * w), result(2 * w + 1));
        store_16_bytes(static_cast<uint16*>(arguments.y) + at, words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Phase 1: z of a warpgroup's rows.
template <typename T, typename P, typename Tile, int MIDDLE, typename AnyRing>
__device__ __forceinline__ void multiply_rows_of_x(AnyRing& ring, unsigned char* stash, const WarpgroupThread<Tile>& own) {
  // Where the lane finds its row of x in a slot: ldmatrix's matrices are the two halves of the rows, twice.
  const int x_row = own.group * 64 + own.warp * 16 + own.lane % 16;
  const uint32 x_at = shared_address(ring.slots) + x_row * Tile::ROW_BYTES;
  const int swap = swap_of_row<Tile::CHUNKS_OF_ROW>(x_row), half_chunk = own.lane / 16;
  const uint64 first_weights =
      make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0) + Tile::X_BYTES, Tile::N1 * 16, 128);
  const auto load_rows = [&](uint32(&a)[Tile::STEPS_OF_PART][4]) {
    ring.wait_until_full();
#pragma unroll
    for (int s = 0; s < Tile::STEPS_OF_PART; ++s) {
      ldmatrix_x4(a[s], x_at + ring.slot * AnyRing::SLOT_BYTES + ((2 * s + half_chunk) ^ swap) * 16);
    }
  };
  uint32 a[Tile::STEPS_OF_PART][4];
  load_rows(a);
  const Share<Tile, Tile::Z_BLOCKS> share;
#pragma unroll 1
  for (int at = 0; at < share.count(); ++at) {
    float sums[Tile::N1 / 2];
#pragma unroll
    for (int e = 0; e < Tile::N1 / 2; ++e) sums[e] = 0.0f;  // else they would live, unused, from pass to pass
#pragma unroll 1
    for (int part = 0; part < Tile::PARTS; ++part) {
      const uint64 weights = first_weights + ring.slot * (AnyRing::SLOT_BYTES / 16);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < Tile::STEPS_OF_PART; ++s) {
        multiply_columns<T, Tile::N1>(sums, a[s], weights + s * Tile::N1 * 2, 1);
      }
      wgmma_commit_group();
      const int used = ring.slot;
      ring.next();
      uint32 next[Tile::STEPS_OF_PART][4] = {};
      if (part + 1 < Tile::PARTS || at + 1 < share.count()) load_rows(next);
      wgmma_wait_group<0>();
      keep_operands(a);
      ring.release(used);
      // One loop: of two, the outer one of a single step would leave its "unroll" to the loop around.
#pragma unroll
      for (int e = 0; e < Tile::STEPS_OF_PART * 4; ++e) a[e / 4][e % 4] = next[e / 4][e % 4];
    }
    wgmma_fence_operand(sums);
    stash_block<T, P, Tile, MIDDLE>(stash, sums, share(at), own.quarter);
  }
}

// Phase 2: the sums of one chunk of outputs, of the classes that begin at `of_classes`.
template <typename T, typename P, typename Tile, typename AnyRing>
__device__ __forceinline__ void multiply_chunk(float (&sums)[Tile::J][Tile::NK / 2], AnyRing& ring,
                                               const unsigned char* of_classes) {
  constexpr int GROUPS_OF_STEPS = Tile::STEPS / Tile::AT_ONCE, IN_SLOT = Tile::SLOT_J * Tile::SLOT_P / Tile::AT_ONCE;
  const uint64 first_weights = make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0), Tile::NK * 16, 128);
  uint32 a[2][Tile::AT_ONCE][4];
  int before = 0;
#pragma unroll
  for (int g = 0; g < Tile::J * GROUPS_OF_STEPS; ++g) {
    const int j = g / GROUPS_OF_STEPS, first = g % GROUPS_OF_STEPS * Tile::AT_ONCE;
#pragma unroll
    for (int s = 0; s < Tile::AT_ONCE; ++s) {
      const uint4 words = *reinterpret_cast<const uint4*>(of_classes + (j * Tile::STEPS + first + s) * 2048);
      a[g % 2][s][0] = words.x, a[g % 2][s][1] = words.y, a[g % 2][s][2] = words.z, a[g % 2][s][3] = words.w;
    }
    if (g % IN_SLOT == 0) ring.wait_until_full();
    const uint64 weights = first_weights + ring.slot * (AnyRing::SLOT_BYTES / 16) +
                           g % IN_SLOT * Tile::AT_ONCE * (Tile::STEP_BYTES / 16);
    keep_operands(a[g % 2]);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < Tile::AT_ONCE; ++s) {
      multiply_columns<T, Tile::NK>(sums[j], a[g % 2][s], weights + s * (Tile::STEP_BYTES / 16), first + s);
    }
    wgmma_commit_group();
    // The group before is over: its operands' registers may be written, its slot released.
    wgmma_wait_group<1>();
    if (g > 0) keep_operands(a[(g + 1) % 2]);
    if (g > 0 && g % IN_SLOT == 0) ring.release(before);
    if ((g + 1) % IN_SLOT == 0) before = ring.slot, ring.next();
  }
  wgmma_wait_group<0>();
  keep_operands(a[(Tile::J * GROUPS_OF_STEPS + 1) % 2]);
  ring.release(before);
#pragma unroll
  for (int j = 0; j < Tile::J; ++j) wgmma_fence_operand(sums[j]);
}

// Where the part of z that a chunk of outputs needs is stored.
template <typename P, typename Tile>
__device__ __forceinline__ const unsigned char* classes_of_chunk(const unsigned char* stash, int chunk) {
  const int sibling = chunk / (Tile::J_GROUPS * Tile::OUTPUT_CHUNKS);
  return stash + (sibling * P::D1 + chunk % Tile::J_GROUPS * Tile::J) * Tile::STEPS * 2048;
}

// An odd number of tiles leaves half of a class's last step empty.
template <typename Tile> __device__ __forceinline__ void clear_rest(unsigned char* stash) {
  if constexpr (Tile::TILES_OF_CLASS % 2 != 0) {
#pragma unroll 1
    for (int c = 0; c < Tile::CLASSES; ++c) {
      *reinterpret_cast<uint2*>(stash + (c * Tile::STEPS + Tile::STEPS - 1) * 2048 + 8) = make_uint2(0, 0);
    }
  }
}

// The bias, into shared memory.
template <int FEATURES, int THREADS>
__device__ __forceinline__ void load_bias(uint16* bias, const void* from, int thread) {
  for (int chunk = thread; chunk < FEATURES / 8; chunk += THREADS) {
    uint32 words[4];
    load_16_bytes(words, static_cast<const uint16*>(from) + chunk * 8);
    *reinterpret_cast<uint4*>(bias + chunk * 8) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename T, typename P, typename Tile, typename Epilogue, typename AnyRing>
__device__ __forceinline__ void multiply_chain(const ChainArguments& arguments, unsigned char* stashes, uint16* shared_bias,
                                               AnyRing ring) {
  const int thread = threadIdx.x - Tile::LOADERS;
  const WarpgroupThread<Tile> own(thread);
  const ChainRows rows = ChainRows::of_block<Tile>(arguments);
  unsigned char* const stash = stashes + own.group * Tile::STASH_BYTES + thread % 128 * 16;
  clear_rest<Tile>(stash);
  const uint16* bias = shared_bias;
  if constexpr (Epilogue::BIAS && Tile::SHARED_BIAS) {
    load_bias<Tile::FEATURES, Tile::MULTIPLIERS>(shared_bias, arguments.bias, thread);
    named_barrier_sync(1, Tile::MULTIPLIERS);
  } else {
    bias = static_cast<const uint16*>(arguments.bias);
  }
  using TileTurns = Turns<Tile, Epilogue>;
  const Share<Tile, TileTurns::COUNT> share;
  for (int64 row0 = rows.first; row0 < rows.end; row0 += Tile::ROWS) {
    if (row0 + own.group * 64 >= rows.end) {
      arrive_at_cluster<Tile>();
      pass_slots_by(ring, Share<Tile, Tile::Z_BLOCKS>().count() * Tile::PARTS +
                              share.count() * TileTurns::CHUNKS * Tile::SLOTS_OF_CHUNK);
      wait_for_cluster<Tile>();
      continue;
    }
    multiply_rows_of_x<T, P, Tile, Epilogue::MIDDLE>(ring, stash, own);
    arrive_at_cluster<Tile>();
    wait_for_cluster<Tile>();
    const int64 row = row0 + own.row;
    if constexpr (Epilogue::KEEPS_Z) {
      constexpr int FEATURES = P::A2 * P::B2;
#pragma unroll 1
      for (int sibling = 0; blockIdx.x % Tile::CLUSTER == 0 && sibling < P::SIBLINGS; ++sibling) {
        uint16* const z = static_cast<uint16*>(arguments.z) + (sibling * arguments.batch + row) * FEATURES;
        keep_stash<P, Tile>(z, stash + sibling * P::D1 * Tile::STEPS * 2048, own.quarter, rows.end - row);
      }
    }
#pragma unroll 1
    for (int at = 0; at < share.count(); ++at) {
      const int chunk = share(at);
      const OutputPlace<P, Tile> place(chunk, own.quarter);
      Residual<P, Tile, Epilogue::RESIDUAL> residual;
      residual.load(arguments, place, row, rows.end);
      float sums[Tile::J][Tile::NK / 2];
      multiply_chunk<T, P, Tile>(sums, ring, classes_of_chunk<P, Tile>(stash, chunk));
      Gate<T, P, Tile, Epilogue> gate;
      const uint16* of_chunk = bias;
      if constexpr (Epilogue::GATED) {
        gate.template keep<Tile::SHARED_BIAS>(sums, place, bias);
        of_chunk += P::OUT;
        multiply_chunk<T, P, Tile>(sums, ring, classes_of_chunk<P, Tile>(stash, chunk + TileTurns::COUNT));
      }
      store_outputs<T, P, Tile, Epilogue, Tile::SHARED_BIAS>(arguments, sums, residual, gate, place, of_chunk, row,
                                                             rows.end);
    }
  }
}

template <typename T, typename P, typename Tile, typename Epilogue>
__device__ __forceinline__ void chain_wgmma16_kernel(const ChainArguments& arguments) {
  using TileRing = Ring<Tile::SLOT_BYTES, Tile::STAGES>;
  extern __shared__ __align__(128) unsigned char shared[];
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared);
  Mbarrier* const empty = full + Tile::STAGES;
  uint16* const bias = reinterpret_cast<uint16*>(shared + Tile::BARRIER_BYTES);
  unsigned char* const stashes = shared + Tile::STASHES_AT;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::STAGES; ++s) {
      full[s].init(Tile::LOADERS + 1);  // once more the one that asks for weights
      empty[s].init(Tile::MULTIPLIERS);
    }
    fence_view_async_shared();  // and for the copy engine
  }
  __syncthreads();
  arrive_at_cluster<Tile>();  // before blocks write into each other's shared memory
  wait_for_cluster<Tile>();
  prefetch_share<Tile::THREADS>(arguments.weights, Tile::PACKED_BYTES, blockIdx.x, gridDim.x);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (threadIdx.x < Tile::LOADERS) {
    if constexpr (Tile::AT_START < 240) setmaxnreg_dec<Tile::LOADER_REGISTERS>();
    load_chain<P, Tile, Epilogue>(arguments, TileRing(shared + Tile::RING_AT, full, empty, 1));
  } else {
    if constexpr (Tile::AT_START < 240) setmaxnreg_inc<Tile::MULTIPLIER_REGISTERS>();
    multiply_chain<T, P, Tile, Epilogue>(arguments, stashes, bias, TileRing(shared + Tile::RING_AT, full, empty, 0));
  }
}
