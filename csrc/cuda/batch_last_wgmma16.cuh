// 16-bit factors on Hopper's warpgroup tensor cores, batch last (sm_90a, aligned rows).
//
// The same walk as batch_last_mma16.cuh, for blocks b x c so large that the older tensor-core
// instructions and their trips through registers hold it back. Here the tensor cores read both
// operands from shared memory. Rows of x are 128-byte swizzled on the way in, because they lie
// across the summation; the weights are written once a column, as matrices of 128 bytes.
//
// The warpgroups of a block form teams. A team has a ring and tiles of its own and shares only the
// weights with the others, so that one multiplies while another stores and a third waits for x.
#pragma once

#include "batch_last_mma16.cuh"
#include "common/wgmma.cuh"

template <typename P, int TEAMS_, int WARPGROUPS_, int MT_, int BM_, int KL_, int STAGES_, int BLOCKS_>
struct BatchLastWgmma16Tile {
  static constexpr int TEAMS = TEAMS_, WARPGROUPS = WARPGROUPS_;  // of a block, of a team
  static constexpr int MT = MT_;          // tiles of 64 outputs of a warpgroup
  static constexpr int BM = BM_;          // columns, all of them for every warpgroup of a team
  static constexpr int KL = KL_;          // l in a stage
  static constexpr int STAGES = STAGES_;
  static constexpr int BLOCKS = BLOCKS_;  // blocks that should fit on a multiprocessor
  static constexpr bool SHIFTED = false;
  static constexpr int TEAM_THREADS = 128 * WARPGROUPS, THREADS = TEAMS * TEAM_THREADS;
  static constexpr int NB = WARPGROUPS * MT * 64;
  static constexpr int STEPS = (P::C + 15) / 16;  // tensor-core steps over l
  static constexpr int STEPS_PER_STAGE = KL / 16, STAGES_PER_TILE = STEPS / STEPS_PER_STAGE;
  static constexpr int CHUNKS = BM / 8;           // 16-byte chunks of a row of a stage
  static constexpr int PANEL_BYTES = KL * 128;    // 64 columns of a stage
  static constexpr int STAGE_BYTES = BM / 64 * PANEL_BYTES;
  static constexpr int WEIGHT_BYTES = STEPS * 2 * NB * 16;
  static constexpr int OUT_CHUNKS = 8, OUT_PITCH = 9;  // a warp writes 64 columns at a time
  static constexpr int OUT_BYTES = 16 * OUT_PITCH * 16;
  static constexpr int SHARED_BYTES =
      TEAMS * STAGES * STAGE_BYTES + WEIGHT_BYTES + THREADS / 32 * OUT_BYTES;
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB, COLUMNS = P::A * P::D;
  static_assert(KL % 16 == 0 && STEPS % STEPS_PER_STAGE == 0, "a tile is a number of whole stages");
  static_assert(BM % 64 == 0 && TEAM_THREADS % CHUNKS == 0 && TEAMS < 16, "");
  static_assert(STAGES >= 3, "one stage fills while two are used");
};

// Starts the copy of rows [l0, l0 + KL) and columns [m0, m0 + BM) of a column's x, swizzled.
template <typename P, typename Tile>
__device__ __forceinline__ void load_swizzled_stage(const Arguments& arguments, unsigned char* stage,
                                                    const uint16* column, int l0, int64 m0) {
  constexpr int ROWS = Tile::TEAM_THREADS / Tile::CHUNKS;
  const int64 row_stride = arguments.x_feature_stride * P::D;
  const int chunk = threadIdx.x % Tile::CHUNKS;
  const int first_row = threadIdx.x % Tile::TEAM_THREADS / Tile::CHUNKS;
  const bool inside = m0 + chunk * 8 < arguments.batch;
  const uint16* from = column + (l0 + first_row) * row_stride + (inside ? m0 + chunk * 8 : 0);
  unsigned char* const to = stage + chunk / 8 * Tile::PANEL_BYTES;
#pragma unroll
  for (int row0 = 0; row0 < Tile::KL; row0 += ROWS) {
    const int row = row0 + first_row;
    if (Tile::KL % ROWS == 0 || row < Tile::KL) {
      const bool exists = P::C % 16 == 0 || l0 + row < P::C;
      cp_async_16(to + row * 128 + (chunk % 8 ^ row % 8) * 16, exists ? from : column, inside && exists);
    }
    from += ROWS * row_stride;
  }
}

// The weights of one column and NB outputs, as 8 x 8 matrices of 128 bytes, outputs fastest.
template <typename P, typename Tile>
__device__ __forceinline__ void load_weight_matrices(const Arguments& arguments, unsigned char* weights,
                                                     int column, int n0) {
  constexpr int CHUNKS = Tile::STEPS * 2;  // of an output
  const uint16* const w = column_of_weight<P, uint16>(arguments, column);
#pragma unroll 2
  for (int e = threadIdx.x; e < CHUNKS * Tile::NB; e += Tile::THREADS) {
    const int output = e / CHUNKS, chunk = e % CHUNKS, k = n0 + output, l = chunk * 8;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (P::C % 8 != 0) {
      words = make_uint4(weight_pair<P, true>(w, k, l), weight_pair<P, true>(w, k, l + 2),
                         weight_pair<P, true>(w, k, l + 4), weight_pair<P, true>(w, k, l + 6));
    } else if (k < P::B && l < P::C) {
      words = *reinterpret_cast<const uint4*>(w + k * P::C + l);
    }
    *reinterpret_cast<uint4*>(weights + (chunk * Tile::NB + output) * 16) = words;
  }
}

template <typename T, typename P, typename Tile>
__device__ __forceinline__ void batch_last_wgmma16_kernel(const Arguments& arguments) {
  constexpr int BM = Tile::BM, KL = Tile::KL, MT = Tile::MT, NB = Tile::NB;
  extern __shared__ __align__(1024) unsigned char shared[];  // swizzling goes by address
  const int warp = threadIdx.x / 32;
  const int team = threadIdx.x / Tile::TEAM_THREADS, warpgroup = warp / 4 % Tile::WARPGROUPS;
  unsigned char* const ring = shared + team * Tile::STAGES * Tile::STAGE_BYTES;
  unsigned char* const weights = shared + Tile::TEAMS * Tile::STAGES * Tile::STAGE_BYTES;
  unsigned char* const out = weights + Tile::WEIGHT_BYTES + warp * Tile::OUT_BYTES;

  // The teams of a block take the tiles of its share in turns.
  const Share share = share_of_block<Tile>(arguments);
  const int64 first = share.begin + team;

  // Where the next load and the next product are: item, stage of its tile, slot of the ring.
  ColumnWalk loaded{static_cast<int>(first / share.tiles), first % share.tiles}, at = loaded;
  int64 to_load = first < share.end ? (share.end - first + Tile::TEAMS - 1) / Tile::TEAMS : 0;
  int64 to_do = to_load;
  int load_part = 0, load_slot = 0, slot = 0;
  const auto load_next_stage = [&] {
    load_swizzled_stage<P, Tile>(arguments, ring + load_slot * Tile::STAGE_BYTES,
                                 column_of_x<P, uint16>(arguments, loaded.column), load_part * KL, loaded.tile * BM);
    if (++load_slot == Tile::STAGES) load_slot = 0;
    if (++load_part == Tile::STAGES_PER_TILE) load_part = 0, --to_load, loaded.advance(Tile::TEAMS, share.tiles);
  };

#pragma unroll
  for (int s = 0; s < Tile::STAGES - 2; ++s) {
    if (to_load > 0) load_next_stage();
    cp_async_commit_group();
  }

  float sums[MT][BM / 2];
  for (int column = static_cast<int>(share.begin / share.tiles); column * share.tiles < share.end; ++column) {
    __syncthreads();  // the weights before them are no longer in use
    load_weight_matrices<P, Tile>(arguments, weights, column, share.n0);
    fence_view_async_shared();
    __syncthreads();
    for (; to_do > 0 && at.column == column; --to_do, at.advance(Tile::TEAMS, share.tiles)) {
#pragma unroll 1
      for (int part = 0; part < Tile::STAGES_PER_TILE; ++part) {
        cp_async_wait_group<Tile::STAGES - 3>();
        fence_view_async_shared();
        // The stage is filled for all of the team, and the one before the last is free for all.
        named_barrier_sync(1 + team, Tile::TEAM_THREADS);

        const uint32 stage = shared_address(ring + slot * Tile::STAGE_BYTES);
        if (++slot == Tile::STAGES) slot = 0;
        const uint32 matrices =
            shared_address(weights) + (part * Tile::STEPS_PER_STAGE * 2 * NB + warpgroup * MT * 64) * 16;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Tile::STEPS_PER_STAGE; ++step) {
          const uint64 b = make_swizzled_smem_desc(stage + step * 16 * 128, Tile::PANEL_BYTES);
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) {
            const uint64 a = make_smem_desc(matrices + (step * 2 * NB + mt * 64) * 16, NB * 16, 128);
            wgmma_mma_async<T, BM>(sums[mt], a, b, part + step);
          }
        }
        wgmma_commit_group();
        if (to_load > 0) load_next_stage();
        cp_async_commit_group();
        wgmma_wait_group<1>();
      }

      // The tile is complete.
      wgmma_wait_group<0>();
      const int64 m0 = at.tile * BM;
      const int64 row_stride = arguments.y_feature_stride * P::D;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const int k0 = share.n0 + (warpgroup * MT + mt) * 64 + warp % 4 * 16;
        uint16* const y = column_of_y<P, uint16>(arguments, column, k0) + m0;
#pragma unroll
        for (int m = 0; m < BM; m += 64) {
          __syncwarp();
          stage_rows16<T, 8>(out, Tile::OUT_PITCH, &sums[mt][m / 2]);
          __syncwarp();
          store_rows<Tile>(out, y + m, row_stride, P::B - k0, arguments.batch - m0 - m);
        }
      }
    }
  }
}
