// The gradients of both weights of a chain of two 16-bit factors, and of its bias, in one launch (sm_90a); or those of
// siblings, chains of the same patterns on the same x.
//
// Each factor's is what weight_grad_wgmma16.cuh computes. The first blocks of the grid have tiles of the left
// factor's sums, the others of the right one's; those with the same tile and rows of siblings are neighbours, so that
// what they read of x comes from the L2 cache. The blocks of a cluster have the same tile and different rows:
// each keeps its sums in its shared memory, and adds those of all blocks for a part of the tile, always in the same
// order. So no sums cross the L2 cache, and no second launch adds them, unless a tile has several clusters: of these
// each leaves an fp32 share, and a second kernel adds the shares of both factors.
//
// A tile of few features of dY has fewer groups of them than there are warpgroups: then the warpgroups share a
// stage's rows, and their sums meet where those of blocks do.
#pragma once

#include "common/cluster.cuh"
#include "weight_grad_wgmma16.cuh"

constexpr int MOST_SIBLINGS = 4;

// Of one factor. Strides count elements.
struct ChainGradOperands {
  const void* grad;
  const void* x;
  void* to;    // dK [A, B, C, D], or of each share one in fp32; behind the left one's the bias's
  void* bias;  // where the left factor has one share: of the bias
  int64 grad_stride, x_stride;
  int64 rows_per_block;  // a multiple of 64
  int64 shares;          // clusters with one tile
};
struct ChainGradsArguments {
  ChainGradOperands left[MOST_SIBLINGS], right[MOST_SIBLINGS];
  int64 batch;
};

// GROUPS: warpgroups. BLOCKS: of a multiprocessor.
template <int GROUPS_, int CLUSTER_, int BLOCKS_, int SHARED_BYTES_, int SIBLINGS_> struct ChainGradBlock {
  static constexpr int GROUPS = GROUPS_, CLUSTER = CLUSTER_, BLOCKS = BLOCKS_, SHARED_BYTES = SHARED_BYTES_;
  static constexpr int SIBLINGS = SIBLINGS_;
  static constexpr int THREADS = 128 * GROUPS;
};

// How a block computes a tile of a factor's sums. M_GROUPS: of 64 features of dY; PANELS: of 64 features of X.
// ROWS: of a stage.
template <typename P, typename Block_, int M_GROUPS_, int PANELS_, int ROWS_, int STAGES_, bool WITH_BIAS_>
struct ChainGradTile {
  using Block = Block_;
  static constexpr int M_GROUPS = M_GROUPS_, PANELS = PANELS_, ROWS = ROWS_, STAGES = STAGES_;
  static constexpr bool WITH_BIAS = WITH_BIAS_;
  static constexpr int THREADS = Block::THREADS, K_GROUPS = Block::GROUPS / M_GROUPS;
  static constexpr int M = 64 * M_GROUPS, N = 64 * PANELS;
  static constexpr int OUT = P::B * P::D, IN = P::C * P::D;  // features of dY and of X, for one i
  static constexpr int M_TILES = (OUT + M - 1) / M, N_TILES = (IN + N - 1) / N, TILES = P::A * M_TILES * N_TILES;
  static constexpr int PANEL_BYTES = ROWS * 128, STAGE_BYTES = (M_GROUPS + PANELS) * PANEL_BYTES;
  static constexpr int64 ELEMENTS = int64(P::A) * P::B * P::C * P::D;
  static constexpr int64 SHARE = ELEMENTS + (WITH_BIAS ? int64(P::A) * OUT : 0);
  // Sums of a thread with the j of its rows: of even D those of every second column. Four make a chunk, and block
  // q % CLUSTER adds chunk q of all threads.
  static constexpr bool HALVED = P::D % 2 == 0;
  static constexpr int CHUNKS = N / (HALVED ? 16 : 8), SLOTS = 128 * M_GROUPS;
  static constexpr int SOURCES = Block::CLUSTER * K_GROUPS;
  static constexpr int SUMS_BYTES = SOURCES == 1 ? 0 : K_GROUPS * CHUNKS * SLOTS * 16;  // of a block
  static constexpr int BIAS_BYTES = WITH_BIAS && SOURCES > 1 ? K_GROUPS * M * 4 : 0;
  static constexpr int ROW_SUMS_BYTES = WITH_BIAS ? Block::GROUPS * 16 * 64 * 4 : 0;
  static_assert(OUT % 8 == 0 && IN % 8 == 0 && 64 % ROWS == 0 && STAGES >= 3, "");
  static_assert(Block::GROUPS % M_GROUPS == 0 && ROWS / 16 % K_GROUPS == 0, "");
  static_assert(STAGES * STAGE_BYTES <= Block::SHARED_BYTES && ROW_SUMS_BYTES <= Block::SHARED_BYTES, "");
  static_assert(SUMS_BYTES + BIAS_BYTES <= Block::SHARED_BYTES, "");
};

// What a block is to compute, and which sums of it a thread has.
template <typename P, typename Tile> struct ChainGradPlace {
  static constexpr int CLUSTER = Tile::Block::CLUSTER, SIBLINGS = Tile::Block::SIBLINGS;
  int rank, sibling;  // rank: block of the cluster
  int i, m0, n0;      // the tile's first features of dY and of X among those of i
  int64 share;
  int m_group, k_group, slot;  // slot: the thread among those with other sums of the tile

  __device__ __forceinline__ explicit ChainGradPlace(int block) {
    rank = block % CLUSTER, block /= CLUSTER;
    sibling = block % SIBLINGS, block /= SIBLINGS;
    int tile = block % Tile::TILES;
    share = block / Tile::TILES;
    n0 = tile % Tile::N_TILES * Tile::N, tile /= Tile::N_TILES;
    m0 = tile % Tile::M_TILES * Tile::M, i = tile / Tile::M_TILES;
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    m_group = group % Tile::M_GROUPS, k_group = group / Tile::M_GROUPS;
    slot = m_group * 128 + static_cast<int>(threadIdx.x) % 128;
  }

  __device__ __forceinline__ int odd() const { return threadIdx.x % 32 / 4 % 2; }  // of the thread's rows

  // The thread's sums of chunk q.
  __device__ __forceinline__ float4 chunk(const float (&sums)[Tile::N / 2], int q) const {
    if constexpr (!Tile::HALVED) return make_float4(sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]);
    return odd() ? make_float4(sums[8 * q + 1], sums[8 * q + 3], sums[8 * q + 5], sums[8 * q + 7])
                 : make_float4(sums[8 * q], sums[8 * q + 2], sums[8 * q + 4], sums[8 * q + 6]);
  }

  // Stores those with equal j by `pair(index of [A, B, C, D], sum, next sum)`, if D is 1, or by `one(index, sum)`.
  template <typename Pair, typename One>
  __device__ __forceinline__ void store(int q, const float4& four, const Pair& pair, const One& one) const {
    const int lane = threadIdx.x % 32;
    const int m = m0 + m_group * 64 + slot % 128 / 32 * 16 + lane / 4, n = n0 + lane % 4 * 2;
    if constexpr (P::D == 1) {
      const int in = n + q * 8;
      if (in >= Tile::IN) return;
      if (m < Tile::OUT) pair((int64(i) * P::B + m) * P::C + in, four.x, four.y);
      if (m + 8 < Tile::OUT) pair((int64(i) * P::B + m + 8) * P::C + in, four.z, four.w);
    } else {
      const auto keep = [&](int out, int in, float sum) {
        const int j = out % P::D;
        if (out >= Tile::OUT || in >= Tile::IN || in % P::D != j) return;
        one(((int64(i) * P::B + out / P::D) * P::C + in / P::D) * P::D + j, sum);
      };
      const int in = n + (Tile::HALVED ? q * 16 + odd() : q * 8), next = Tile::HALVED ? 8 : 1;
      keep(m, in, four.x);
      keep(Tile::HALVED ? m + 8 : m, Tile::HALVED ? in : in + next, four.y);
      keep(Tile::HALVED ? m : m + 8, Tile::HALVED ? in + next : in, four.z);
      keep(m + 8, in + next, four.w);
    }
  }
};

// Stores a chunk of whole sums: as dK, or as a share of it.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void store_chunk(const ChainGradOperands& operands, const ChainGradPlace<P, Tile>& own, int q,
                                            const float4& four) {
  if (operands.shares == 1) {
    uint16* const to = static_cast<uint16*>(operands.to);
    own.store(
        q, four,
        [&](int64 at, float one, float next) { *reinterpret_cast<uint32*>(to + at) = pack_pair<T>(one, next); },
        [&](int64 at, float one) { to[at] = static_cast<uint16>(pack_pair<T>(one, 0.0f)); });
  } else {
    float* const to = static_cast<float*>(operands.to) + own.share * Tile::SHARE;
    own.store(
        q, four,
        [&](int64 at, float one, float next) { *reinterpret_cast<float2*>(to + at) = make_float2(one, next); },
        [&](int64 at, float one) { to[at] = one; });
  }
}

// The same of the sum of a feature of dY, counted within the tile.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void store_of_bias(const ChainGradOperands& operands, const ChainGradPlace<P, Tile>& own,
                                              int feature, float sum) {
  if (own.m0 + feature >= Tile::OUT) return;
  const int64 at = own.i * Tile::OUT + own.m0 + feature;
  if (operands.shares == 1) {
    static_cast<uint16*>(operands.bias)[at] = static_cast<uint16>(pack_pair<T>(sum, 0.0f));
  } else {
    static_cast<float*>(operands.to)[own.share * Tile::SHARE + Tile::ELEMENTS + at] = sum;
  }
}

// The sums of a tile over the rows of a block.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void sum_rows(const ChainGradOperands& operands, int64 batch,
                                         const ChainGradPlace<P, Tile>& own, unsigned char* stages,
                                         float (&sums)[Tile::N / 2], RowSums<T, Tile>& of_bias) {
  const int64 begin = (own.share * Tile::Block::CLUSTER + own.rank) * operands.rows_per_block;
  const int64 last = begin + operands.rows_per_block, end = last < batch ? last : batch;
  const int steps = begin < end ? static_cast<int>((end - begin + Tile::ROWS - 1) / Tile::ROWS) : 0;
  const uint16* const grad = static_cast<const uint16*>(operands.grad) + own.i * Tile::OUT;
  const uint16* const x = static_cast<const uint16*>(operands.x) + own.i * Tile::IN;
  const auto load = [&](int step) {
    unsigned char* const stage = stages + step % Tile::STAGES * Tile::STAGE_BYTES;
    const int64 row = begin + int64(step) * Tile::ROWS;
    const int rows = rows_inside<Tile::ROWS>(end - row);
    load_panels<Tile, Tile::M_GROUPS, Tile::OUT>(stage, grad + row * operands.grad_stride, operands.grad_stride, own.m0,
                                                 rows);
    load_panels<Tile, Tile::PANELS, Tile::IN>(stage + Tile::M_GROUPS * Tile::PANEL_BYTES, x + row * operands.x_stride,
                                              operands.x_stride, own.n0, rows);
  };
#pragma unroll 1
  for (int step = 0; step < Tile::STAGES - 2; ++step) {
    if (step < steps) load(step);
    cp_async_commit_group();
  }
  const uint32 first = __shfl_sync(~0u, shared_address(stages), 0);
#pragma unroll
  for (int e = 0; e < Tile::N / 2; ++e) sums[e] = 0.0f;
  wgmma_fence_operand(sums);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_group<Tile::STAGES - 3>();
    fence_view_async_shared();
    __syncthreads();  // the stage is full for all, and the one before the last is free
    const uint32 stage = first + step % Tile::STAGES * Tile::STAGE_BYTES + own.k_group * 2048;
    const uint64 a = make_swizzled_smem_desc(stage + own.m_group * Tile::PANEL_BYTES, Tile::PANEL_BYTES);
    const uint64 b = make_swizzled_smem_desc(stage + Tile::M_GROUPS * Tile::PANEL_BYTES, Tile::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < Tile::ROWS / 16; s += Tile::K_GROUPS) multiply_rows<T, Tile::N>(sums, a + s * 128, b + s * 128, 1);
    wgmma_commit_group();
    if (step + Tile::STAGES - 2 < steps) load(step + Tile::STAGES - 2);
    cp_async_commit_group();
    if (Tile::WITH_BIAS && own.n0 == 0) {
      of_bias.template add<Tile::K_GROUPS>(
          stages + step % Tile::STAGES * Tile::STAGE_BYTES + own.m_group * Tile::PANEL_BYTES, own.k_group);
    }
    wgmma_wait_group<1>();
  }
  wgmma_wait_group<0>();
  wgmma_fence_operand(sums);
  cp_async_wait_group<0>();
}

// What block `rank` of the cluster keeps at that place of its shared memory.
template <typename Block, typename Value> __device__ __forceinline__ Value sums_of(const Value* place, int rank) {
  if constexpr (Block::CLUSTER == 1) return *place;
  return load_from_block(place, rank);
}

// A block's work for one factor.
template <typename T, typename P, typename Tile>
__device__ __forceinline__ void chain_grad(const ChainGradOperands (&of_siblings)[MOST_SIBLINGS], int64 batch,
                                           int block, unsigned char* stages) {
  using Block = typename Tile::Block;
  const ChainGradPlace<P, Tile> own(block);
  const ChainGradOperands& operands = of_siblings[own.sibling];
  float sums[Tile::N / 2];
  RowSums<T, Tile> of_bias;
  sum_rows(operands, batch, own, stages, sums, of_bias);
  float of_feature = 0.0f;
  const bool with_bias = Tile::WITH_BIAS && own.n0 == 0;
  const int thread = threadIdx.x % 128;
  if (with_bias) {
    __syncthreads();  // the stages are free
    of_bias.store(reinterpret_cast<float*>(stages), [&](int, float sum) { of_feature = sum; });
  }
  if constexpr (Tile::SOURCES == 1) {
#pragma unroll
    for (int q = 0; q < Tile::CHUNKS; ++q) store_chunk<T>(operands, own, q, own.chunk(sums, q));
    if (with_bias && thread < 64) store_of_bias<T>(operands, own, own.m_group * 64 + thread, of_feature);
  } else {
    __syncthreads();  // the stages are free
    float4* const kept = reinterpret_cast<float4*>(stages) + own.k_group * Tile::CHUNKS * Tile::SLOTS + own.slot;
#pragma unroll
    for (int q = 0; q < Tile::CHUNKS; ++q) kept[q * Tile::SLOTS] = own.chunk(sums, q);
    float* const kept_of_bias = reinterpret_cast<float*>(stages + Tile::SUMS_BYTES);
    if (with_bias && thread < 64) kept_of_bias[own.k_group * Tile::M + own.m_group * 64 + thread] = of_feature;
    if constexpr (Block::CLUSTER > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
    const float4* const of_slot = reinterpret_cast<const float4*>(stages) + own.slot;
#pragma unroll 1
    for (int q = own.rank + own.k_group * Block::CLUSTER; q < Tile::CHUNKS; q += Tile::SOURCES) {
      float4 whole = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int source = 0; source < Tile::SOURCES; ++source) {
        const float4 one = sums_of<Block>(of_slot + (source % Tile::K_GROUPS * Tile::CHUNKS + q) * Tile::SLOTS,
                                          source / Tile::K_GROUPS);
        whole.x += one.x, whole.y += one.y, whole.z += one.z, whole.w += one.w;
      }
      store_chunk<T>(operands, own, q, whole);
    }
    const int feature = static_cast<int>(threadIdx.x);
    if (with_bias && own.rank == 0 && feature < Tile::M) {
      float whole = 0.0f;
#pragma unroll
      for (int source = 0; source < Tile::SOURCES; ++source) {
        whole += sums_of<Block>(kept_of_bias + source % Tile::K_GROUPS * Tile::M + feature, source / Tile::K_GROUPS);
      }
      store_of_bias<T>(operands, own, feature, whole);
    }
    if constexpr (Block::CLUSTER > 1) cluster_barrier();  // none may end while others read its sums
  }
}

template <typename T, typename Left, typename LeftTile, typename Right, typename RightTile>
__device__ __forceinline__ void chain_grads_wgmma16_kernel(const ChainGradsArguments& arguments) {
  extern __shared__ __align__(1024) unsigned char stages[];
  const int block = static_cast<int>(blockIdx.x);
  using Block = typename LeftTile::Block;
  const int clusters = static_cast<int>(arguments.left[0].shares) * LeftTile::TILES * Block::SIBLINGS;
  const int of_left = clusters * Block::CLUSTER;
  griddepcontrol_wait();
  if (block < of_left) {
    chain_grad<T, Left, LeftTile>(arguments.left, arguments.batch, block, stages);
  } else {
    chain_grad<T, Right, RightTile>(arguments.right, arguments.batch, block - of_left, stages);
  }
}

struct ChainSharesArguments {
  SharesArguments left[MOST_SIBLINGS], right[MOST_SIBLINGS];
  int64 left_blocks;  // of a sibling; none where the left factor has one share
  int64 blocks;       // of both factors of a sibling
};

// Adds the shares of both factors of all siblings up.
template <typename T> __device__ __forceinline__ void add_chain_shares_kernel(const ChainSharesArguments& arguments) {
  int64 block = blockIdx.x;
  int sibling = 0;
  for (; block >= arguments.blocks; ++sibling) block -= arguments.blocks;
  const bool is_left = block < arguments.left_blocks;
  add_shares_kernel<T>(is_left ? arguments.left[sibling] : arguments.right[sibling],
                       is_left ? block : block - arguments.left_blocks);
}
