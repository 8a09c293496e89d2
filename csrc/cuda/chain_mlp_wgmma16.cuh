// Two chains of two 16-bit factors with an activation between them, in one launch (batch first, sm_90a).
//
// Each chain is (1, b1, c1, d1) * (a2, b2, c2, 1), as in chain_wgmma16.cuh. The hidden features h between them
// never leave the registers: a chunk of the first chain's outputs, activated and rounded, is what a thread must
// bring to the second chain's right factor, whose packed weights have the chunk's order of features. For each
// of its blocks the z of the second chain grows chunk by chunk, and is then stored in shared memory.
#pragma once

#include "common/chain_mlp_tile.cuh"
#include "chain_wgmma16.cuh"

template <typename P1, typename P2, typename Tile, typename Epilogue, typename AnyRing>
__device__ __forceinline__ void load_mlp(const ChainArguments& arguments, AnyRing ring) {
  using First = typename Tile::First;
  using Second = typename Tile::Second;
  const ChainRows own = ChainRows::of_block<Tile>(arguments);
  const unsigned char* const weights = static_cast<const unsigned char*>(arguments.weights);
  for (int64 row0 = own.first; row0 < own.end; row0 += Tile::ROWS) {
    load_rows_of_x<P1, First>(arguments, ring, row0, rows_inside<Tile::ROWS>(own.end - row0), weights);
    if (Epilogue::RESIDUAL) {
      prefetch_rows<P2::OUT, Tile::ROWS>(arguments.residual, arguments.residual_stride, row0, own.end);
    }
    prefetch_rows<P1::IN, Tile::ROWS>(arguments.x, arguments.x_stride, row0 + Tile::ROWS, own.end);
#pragma unroll 1
    for (int at = 0; at < First::CHUNKS; ++at) {
      const int block = Share<First, P2::A2>()(at / Tile::CHUNKS_OF_BLOCK);
      const unsigned char* const of_chunk =
          weights + First::RIGHT_BYTES +
          int64(block * Tile::CHUNKS_OF_BLOCK + at % Tile::CHUNKS_OF_BLOCK) * Tile::HIDDEN_CHUNK_BYTES;
      load_weight_slots(ring, of_chunk, First::SLOTS_OF_CHUNK, First::WEIGHT_BYTES_2);
      load_weight_slots(ring, of_chunk + First::CHUNK_BYTES, Tile::HIDDEN_SLOTS, Tile::HIDDEN_BYTES);
    }
#pragma unroll 1
    for (int at = 0; at < Second::CHUNKS; ++at) {
      load_weight_slots(ring, weights + Tile::LAST_AT + int64(Share<Second, Second::CHUNKS>()(at)) * Second::CHUNK_BYTES,
                        Second::SLOTS_OF_CHUNK, Second::WEIGHT_BYTES_2);
    }
  }
}

// Bias and activation on a chunk of h, in place.
template <typename T, typename P, typename Tile, typename Epilogue>
__device__ __forceinline__ void activate_chunk(float (&sums)[Tile::J][Tile::NK / 2], const OutputPlace<P, Tile>& place,
                                               const uint16* bias) {
  constexpr bool WIDE = OutputPlace<P, Tile>::WIDE;
#pragma unroll
  for (int run = 0; run < OutputPlace<P, Tile>::RUN_COUNT; ++run) {
    uint4 added = make_uint4(0, 0, 0, 0);
    if (Epilogue::BIAS) added = *reinterpret_cast<const uint4*>(bias + place.feature + place.behind(run) * P::D1);
    const uint32 words[4] = {added.x, added.y, added.z, added.w};
    const int tiles = run / Tile::RUNS * Tile::RUN_TILES;
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int k_of_run = v / Tile::J, tile = WIDE ? tiles : tiles + k_of_run / 2;
      const int column = WIDE ? run % Tile::RUNS : k_of_run % 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& value = sums[v % Tile::J][tile * 4 + half * 2 + column];
        if (Epilogue::BIAS) value += half_of<T>(words[v / 2], v % 2);
        value = activate<Epilogue::MIDDLE>(value);
      }
    }
  }
}

template <typename T, typename P1, typename P2, typename Tile, typename Epilogue, typename AnyRing>
__device__ __forceinline__ void multiply_mlp(const MlpArguments& arguments, unsigned char* stashes, uint16* bias,
                                             AnyRing ring) {
  using First = typename Tile::First;
  using Second = typename Tile::Second;
  const int thread = threadIdx.x - Tile::LOADERS;
  const WarpgroupThread<First> own(thread);
  const ChainRows rows = ChainRows::of_block<Tile>(arguments);
  unsigned char* const stash = stashes + own.group * Tile::STASH_BYTES + thread % 128 * 16;
  unsigned char* const second_stash = stash + First::STASH_BYTES;
  clear_rest<First>(stash);
  clear_rest<Second>(second_stash);
  if constexpr (Epilogue::BIAS) {
    load_bias<P1::OUT, First::MULTIPLIERS>(bias, arguments.hidden_bias, thread);
    load_bias<P2::OUT, First::MULTIPLIERS>(bias + P1::OUT, arguments.bias, thread);
    named_barrier_sync(1, First::MULTIPLIERS);
  }
  const uint64 hidden_weights = make_smem_desc(__shfl_sync(~0u, shared_address(ring.slots), 0), Tile::N * 16, 128);
  for (int64 row0 = rows.first; row0 < rows.end; row0 += Tile::ROWS) {
    if (row0 + own.group * 64 >= rows.end) {
      pass_slots_by(ring, Tile::SLOTS);
      continue;
    }
    multiply_rows_of_x<T, P1, First, IDENTITY>(ring, stash, own);
#pragma unroll 1
    for (int at = 0; at < P2::A2; ++at) {
      const int block = Share<First, P2::A2>()(at);
      float z[Tile::N / 2];
#pragma unroll
      for (int e = 0; e < Tile::N / 2; ++e) z[e] = 0.0f;
#pragma unroll 1
      for (int part = 0; part < Tile::CHUNKS_OF_BLOCK; ++part) {
        float sums[First::J][First::NK / 2];
        multiply_chunk<T, P1, First>(sums, ring, stash);
        activate_chunk<T, P1, First, Epilogue>(
            sums, OutputPlace<P1, First>(block * Tile::CHUNKS_OF_BLOCK + part, own.quarter), bias);
        uint32 h[Tile::STEPS_OF_CHUNK][4];
#pragma unroll
        for (int s = 0; s < Tile::STEPS_OF_CHUNK; ++s)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int j = s / (First::NK / 16), tile = s % (First::NK / 16) * 2 + e / 2;
            h[s][e] = pack_pair<T>(sums[j][tile * 4 + e % 2 * 2], sums[j][tile * 4 + e % 2 * 2 + 1]);
          }
        keep_operands(h);
#pragma unroll
        for (int slot = 0; slot < Tile::HIDDEN_SLOTS; ++slot) {
          ring.wait_until_full();
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < Tile::SLOT_STEPS; ++s) {
            multiply_columns<T, Tile::N>(z, h[slot * Tile::SLOT_STEPS + s],
                                         hidden_weights + ring.slot * (AnyRing::SLOT_BYTES / 16) + s * Tile::N * 2, 1);
          }
          wgmma_commit_group();
          wgmma_wait_group<0>();
          ring.release(ring.slot);
          ring.next();
        }
        keep_operands(h);
      }
      wgmma_fence_operand(z);
      stash_block<T, P2, Second, IDENTITY>(second_stash, z, block, own.quarter);
    }
    const int64 row = row0 + own.row;
#pragma unroll 1
    for (int at = 0; at < Second::CHUNKS; ++at) {
      const int chunk = Share<Second, Second::CHUNKS>()(at);
      const OutputPlace<P2, Second> place(chunk, own.quarter);
      Residual<P2, Second, Epilogue::RESIDUAL> residual;
      residual.load(arguments, place, row, rows.end);
      float sums[Second::J][Second::NK / 2];
      multiply_chunk<T, P2, Second>(sums, ring, classes_of_chunk<P2, Second>(second_stash, chunk));
      store_outputs<T, P2, Second, Epilogue, true>(arguments, sums, residual, {}, place, bias + P1::OUT, row, rows.end);
    }
  }
}

template <typename T, typename P1, typename P2, typename Tile, typename Epilogue>
__device__ __forceinline__ void chain_mlp_wgmma16_kernel(const MlpArguments& arguments) {
  using TileRing = Ring<Tile::SLOT_BYTES, Tile::STAGES>;
  using First = typename Tile::First;
  extern __shared__ __align__(128) unsigned char shared[];
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared);
  Mbarrier* const empty = full + Tile::STAGES;
  uint16* const bias = reinterpret_cast<uint16*>(shared + First::BARRIER_BYTES);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Tile::STAGES; ++s) {
      full[s].init(Tile::LOADERS + 1);
      empty[s].init(First::MULTIPLIERS);
    }
    fence_view_async_shared();
  }
  __syncthreads();
  prefetch_share<Tile::THREADS>(arguments.weights, Tile::PACKED_BYTES, blockIdx.x, gridDim.x);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (threadIdx.x < Tile::LOADERS) {
    if constexpr (First::AT_START < 240) setmaxnreg_dec<First::LOADER_REGISTERS>();
    load_mlp<P1, P2, Tile, Epilogue>(arguments, TileRing(shared + Tile::RING_AT, full, empty, 1));
  } else {
    if constexpr (First::AT_START < 240) setmaxnreg_inc<First::MULTIPLIER_REGISTERS>();
    multiply_mlp<T, P1, P2, Tile, Epilogue>(arguments, shared + Tile::STASHES_AT, bias,
                                            TileRing(shared + Tile::RING_AT, full, empty, 0));
  }
}
