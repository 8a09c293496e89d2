// Code shared by the batch-last families: the iteration over tiles, copies of x, and writes of y.
//
// x is (N, batch) and y is (M, batch), so for fixed (i, j) the product is a matrix product,
// y[k, m] = sum_l w[k, l] x[l, m], whose rows of x and y are contiguous, d rows of memory apart.
// No permutation is needed; the task is to move every byte once and at full bandwidth.
//
// A block takes NB outputs k of one column (i, j) at a time, all of b where they fit, so that x is
// read once. It keeps their weights in shared memory and walks over tiles of BM batch columns. x
// streams through a ring of stages whose loads run ahead across the ends of tiles and columns;
// nothing waits for a store. Each warp turns its sums into runs of memory, in a buffer of its own,
// before it writes them.
//
// The work is a list of (column, tile) pairs in that order. Every group of blocks takes an equal
// part of the list, so that all end together, and changes weights only where a column ends.
//
// Weights come packed as weight[a, d, b, c], which is one run for each column; the strides of the
// arguments follow that order.
//
// Rows that do not start at multiples of 16 bytes take the SHIFTED kernels: they copy the aligned
// chunks that cover a row, and move them into place in shared memory. They are also right for any
// stride of x, and for weights at any address.
#pragma once

#include "common/kernel_params.cuh"
#include "common/ptx.cuh"

// An element as its bits.
template <int BYTES> struct ElementOf;
template <> struct ElementOf<2> { using type = uint16; };
template <> struct ElementOf<4> { using type = uint32; };

// The part of the list of (column, tile) pairs that a group of blocks takes.
struct Share {
  int n0;  // first output of this block
  int64 tiles, begin, end;
};

template <typename Tile> __device__ __forceinline__ Share share_of_block(const Arguments& arguments) {
  // Neighbouring blocks share x, then neighbouring groups share lines of the weight.
  const int64 group = blockIdx.x / Tile::OUTPUT_TILES, groups = gridDim.x / Tile::OUTPUT_TILES;
  const int64 tiles = (arguments.batch + Tile::BM - 1) / Tile::BM, items = tiles * Tile::COLUMNS;
  return {static_cast<int>(blockIdx.x % Tile::OUTPUT_TILES) * Tile::NB, tiles, items * group / groups,
          items * (group + 1) / groups};
}

// A position in the list.
struct ColumnWalk {
  int column;
  int64 tile;
  // By `step` items, where a column has `tiles`.
  __device__ __forceinline__ void advance(int step, int64 tiles) {
    for (tile += step; tile >= tiles; tile -= tiles) ++column;
  }
};

// Row l = 0 of a column's x.
template <typename P, typename Element>
__device__ __forceinline__ const Element* column_of_x(const Arguments& arguments, int column) {
  const int64 feature = int64(column / P::D) * P::C * P::D + column % P::D;
  return static_cast<const Element*>(arguments.x) + feature * arguments.x_feature_stride;
}

// Output k of a column's y.
template <typename P, typename Element>
__device__ __forceinline__ Element* column_of_y(const Arguments& arguments, int column, int k) {
  const int64 feature = (int64(column / P::D) * P::B + k) * P::D + column % P::D;
  return static_cast<Element*>(arguments.y) + feature * arguments.y_feature_stride;
}

// The b x c weights of a column, one run.
template <typename P, typename Element>
__device__ __forceinline__ const Element* column_of_weight(const Arguments& arguments, int column) {
  return static_cast<const Element*>(arguments.weight) + column / P::D * arguments.weight_stride_a +
         column % P::D * arguments.weight_stride_b;
}

// Elements between an address and the multiple of 16 bytes at or below it.
template <typename Element> __device__ __forceinline__ int misalignment(const Element* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) % 16 / sizeof(Element));
}

// 16 bytes of shared memory that start `first` elements after `from`; may read the 4 bytes after them.
template <typename Element>
__device__ __forceinline__ uint4 load_shifted(const unsigned char* from, int first) {
  constexpr int IN_WORD = 4 / sizeof(Element);
  const uint32* const words = reinterpret_cast<const uint32*>(from) + first / IN_WORD;
  const int shift = first % IN_WORD * 16;
  const uint32 w0 = words[0], w1 = words[1], w2 = words[2], w3 = words[3], w4 = shift ? words[4] : 0;
  return make_uint4(__funnelshift_r(w0, w1, shift), __funnelshift_r(w1, w2, shift),
                    __funnelshift_r(w2, w3, shift), __funnelshift_r(w3, w4, shift));
}

// Starts the copy of rows [l0, l0 + KL) and columns [m0, m0 + BM) of a column's x.
template <typename P, typename Tile, typename Element>
__device__ __forceinline__ void load_stage(const Arguments& arguments, unsigned char* stage,
                                           const Element* column, int l0, int64 m0) {
  constexpr int EACH = 16 / sizeof(Element);  // elements of a chunk
  constexpr bool WHOLE = P::C % Tile::KL == 0;
  const int64 row_stride = arguments.x_feature_stride * P::D;
  const int64 columns = arguments.batch - m0;  // that are left
  if (!Tile::SHIFTED) {
    // A thread keeps its chunk and walks down the rows.
    constexpr int ROWS = Tile::THREADS / Tile::CHUNKS;
    static_assert(Tile::SHIFTED || Tile::THREADS % Tile::CHUNKS == 0, "");
    const int chunk = threadIdx.x % Tile::CHUNKS, first_row = threadIdx.x / Tile::CHUNKS;
    const bool inside = chunk * EACH < columns;
    const Element* from = column + (l0 + first_row) * row_stride + (inside ? m0 + chunk * EACH : 0);
    unsigned char* to = stage + (first_row * Tile::PITCH + chunk) * 16;
#pragma unroll
    for (int row = 0; row < Tile::KL; row += ROWS) {
      if (Tile::KL % ROWS == 0 || row + first_row < Tile::KL) {
        const bool exists = WHOLE || l0 + row + first_row < P::C;
        cp_async_16(to, exists ? from : column, inside && exists);
      }
      from += ROWS * row_stride;
      to += ROWS * Tile::PITCH * 16;
    }
  } else if (arguments.x_batch_stride == 1) {
    constexpr int COVERING = Tile::CHUNKS + 1;
    for (int e = threadIdx.x; e < Tile::KL * COVERING; e += Tile::THREADS) {
      const int row = e / COVERING, chunk = e % COVERING;
      const bool exists = WHOLE || l0 + row < P::C;
      const Element* const from = column + (exists ? (l0 + row) * row_stride + m0 : 0);
      const int skipped = misalignment(from);
      const int64 left = exists ? columns + skipped - chunk * EACH : 0;
      const int bytes = left >= EACH ? 16 : left > 0 ? static_cast<int>(left * sizeof(Element)) : 0;
      cp_async_up_to_16(stage + (row * Tile::PITCH + chunk) * 16,
                        from - skipped + (bytes > 0 ? chunk * EACH : 0), bytes);
    }
  } else {
    for (int e = threadIdx.x; e < Tile::KL * Tile::BM; e += Tile::THREADS) {
      const int row = e / Tile::BM, m = e % Tile::BM;
      Element value = 0;
      if (m < columns && (WHOLE || l0 + row < P::C)) {
        value = column[(l0 + row) * row_stride + (m0 + m) * arguments.x_batch_stride];
      }
      reinterpret_cast<Element*>(stage + row * Tile::PITCH * 16)[m] = value;
    }
  }
}

// Moves a stage's rows from where their chunks lie in memory to the start of the rows of `aligned`.
template <typename P, typename Tile, typename Element>
__device__ __forceinline__ void align_stage(const Arguments& arguments, unsigned char* aligned,
                                            const unsigned char* stage, const Element* column, int l0,
                                            int64 m0) {
  for (int e = threadIdx.x; e < Tile::KL * Tile::CHUNKS; e += Tile::THREADS) {
    const int row = e / Tile::CHUNKS, chunk = e % Tile::CHUNKS;
    const Element* const from = column + (l0 + row) * arguments.x_feature_stride * P::D + m0;
    const bool moved = arguments.x_batch_stride == 1 && (P::C % Tile::KL == 0 || l0 + row < P::C);
    const int at = (row * Tile::PITCH + chunk) * 16;
    *reinterpret_cast<uint4*>(aligned + at) =
        load_shifted<Element>(stage + at, moved ? misalignment(from) : 0);
  }
}

// Writes 16 rows of a warp's results, `y` the first, of which `rows` rows and `columns` columns exist.
template <typename Tile, typename Element>
__device__ __forceinline__ void store_rows(const unsigned char* out, Element* y, int64 row_stride, int rows,
                                           int64 columns) {
  constexpr int EACH = 16 / sizeof(Element), COLUMNS = Tile::OUT_CHUNKS * EACH;
  constexpr int ROW_BYTES = Tile::OUT_PITCH * 16;
  const int lane = threadIdx.x % 32, end = static_cast<int>(columns < COLUMNS ? columns : COLUMNS);
#pragma unroll
  for (int e = lane; e < 16 * Tile::OUT_CHUNKS; e += 32) {
    const int row = e / Tile::OUT_CHUNKS;
    if (row >= rows) break;
    Element* const to = y + row * row_stride;
    // The elements before the first multiple of 16 bytes.
    const int head = Tile::SHIFTED ? (EACH - misalignment(to)) % EACH : 0;
    const int first = head + e % Tile::OUT_CHUNKS * EACH;
    if (Tile::SHIFTED ? first + EACH <= end : first < end) {
      const unsigned char* const from = out + row * ROW_BYTES;
      *reinterpret_cast<uint4*>(to + first) =
          Tile::SHIFTED ? load_shifted<Element>(from, first)
                        : *reinterpret_cast<const uint4*>(from + first * sizeof(Element));
    }
  }
  if (!Tile::SHIFTED) return;
  // The unaligned elements at both ends of a row, neighbours by neighbouring lanes.
#pragma unroll 4
  for (int e = lane; e < 16 * 2 * EACH; e += 32) {
    const int row = e / (2 * EACH), i = e % (2 * EACH);
    if (row >= rows) break;
    Element* const to = y + row * row_stride;
    const int head = (EACH - misalignment(to)) % EACH;
    const int tail = head + (end > head ? (end - head) / EACH * EACH : 0);
    const int m = i < EACH ? i : tail + i - EACH;
    if (m < end && (i >= EACH || m < head)) to[m] = reinterpret_cast<const Element*>(out + row * ROW_BYTES)[m];
  }
}

// The walk of a block whose warps all share a ring, with Math for what differs between dtypes:
//   load_weights(arguments, weights, column, n0): a column's weights into shared memory;
//   multiply(sums, stage, weights, part, warp_k, warp_m): sums += weights x over a stage;
//   stage_rows(out, sums): 16 rows of a warp's results into its buffer;
//   repair(arguments, out, column, k0, m0): corrects what this arithmetic cannot represent.
template <typename P, typename Tile, typename Math>
__device__ __forceinline__ void batch_last_kernel(const Arguments& arguments) {
  using Element = typename Math::Element;
  constexpr int BM = Tile::BM, KL = Tile::KL, MT = Tile::MT, NT = Tile::NT;
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const weights = shared;
  unsigned char* const ring = shared + Tile::WEIGHT_BYTES;
  unsigned char* const aligned = ring + Tile::STAGES * Tile::STAGE_BYTES;  // of SHIFTED alone
  unsigned char* const outs = aligned + (Tile::SHIFTED ? Tile::STAGE_BYTES : 0);

  const int warp = threadIdx.x / 32, warp_k = warp % Tile::WARPS_K, warp_m = warp / Tile::WARPS_K;
  unsigned char* const out = outs + warp * Tile::OUT_BYTES;
  const Share share = share_of_block<Tile>(arguments);

  // Where the next load and the next product are: item, stage of its tile, slot of the ring.
  ColumnWalk loaded{static_cast<int>(share.begin / share.tiles), share.begin % share.tiles}, at = loaded;
  int64 to_load = share.end - share.begin, to_do = to_load;
  int load_part = 0, part = 0, load_slot = 0, slot = 0;
  const auto load_next_stage = [&] {
    load_stage<P, Tile>(arguments, ring + load_slot * Tile::STAGE_BYTES,
                        column_of_x<P, Element>(arguments, loaded.column), load_part * KL, loaded.tile * BM);
    if (++load_slot == Tile::STAGES) load_slot = 0;
    if (++load_part == Tile::STAGES_PER_TILE) load_part = 0, --to_load, loaded.advance(1, share.tiles);
  };

#pragma unroll
  for (int s = 0; s < Tile::STAGES - 1; ++s) {
    if (to_load > 0) load_next_stage();
    cp_async_commit_group();
  }

  float sums[MT][NT][4];
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[mt][n][e] = 0.0f;

  int column_of_weights = -1;
  while (to_do > 0) {
    if (at.column != column_of_weights) {
      __syncthreads();  // the weights before them are no longer in use
      column_of_weights = at.column;
      Math::template load_weights<P, Tile>(arguments, weights, at.column, share.n0);
    }
    cp_async_wait_group<Tile::STAGES - 2>();
    __syncthreads();  // the stage is filled for all, and the one before it is free for all
    if (to_load > 0) load_next_stage();
    cp_async_commit_group();

    const unsigned char* stage = ring + slot * Tile::STAGE_BYTES;
    if (++slot == Tile::STAGES) slot = 0;
    if (Tile::SHIFTED) {
      align_stage<P, Tile>(arguments, aligned, stage, column_of_x<P, Element>(arguments, at.column),
                           part * KL, at.tile * BM);
      __syncthreads();
      stage = aligned;
    }
    Math::template multiply<Tile>(sums, stage, weights, part, warp_k, warp_m);
    if (++part < Tile::STAGES_PER_TILE) continue;

    // The tile is complete.
    const int k0 = share.n0 + warp_k * MT * 16;
    const int64 m0 = at.tile * BM + warp_m * NT * 8;
    const int64 row_stride = arguments.y_feature_stride * P::D;
    Element* const y = column_of_y<P, Element>(arguments, at.column, k0) + m0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      __syncwarp();
      Math::template stage_rows<Tile>(out, sums[mt]);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[mt][n][e] = 0.0f;
      __syncwarp();
      Math::template repair<P, Tile>(arguments, out, at.column, k0 + mt * 16, m0);
      store_rows<Tile>(out, y + mt * 16 * row_stride, row_stride, P::B - k0 - mt * 16,
                       arguments.batch - m0);
    }
    part = 0, --to_do, at.advance(1, share.tiles);
  }
}
