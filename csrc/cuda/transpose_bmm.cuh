// Transposes within rows, before and after a matrix product that needs contiguous l.
//
// A row holds `a` matrices. Interleaved, as in x and y, element (l, j) of a matrix is at l d + j;
// planar it is at j L + l. A block moves a tile: PART of the L values of l of one matrix, or several
// whole matrices. The interleaved side of a tile is one run of memory, so it passes through shared
// memory in whole 16-byte chunks, neighbours by neighbouring threads; the planar side is read or
// written straight from registers, where a thread turns V l of J j at a time.
#pragma once

#include "common/kernel_params.cuh"
#include "common/ptx.cuh"

template <int BYTES_, int L_, int D_, int PART_, int GROUP_, int THREADS_> struct TransposeTile {
  static constexpr int BYTES = BYTES_, L = L_, D = D_, PART = PART_, GROUP = GROUP_, THREADS = THREADS_;
  static constexpr int V = 16 / BYTES;            // elements of a chunk
  static constexpr int J = D % V == 0 ? V : D;    // a thread's j at a time: J chunks on either side
  static constexpr int PARTS = L / PART;          // tiles of a matrix
  static constexpr int CHUNKS = GROUP * PART * D / V;
  static constexpr int UNITS = GROUP * (PART / V) * (D / J);
  static constexpr int SHARED_BYTES = (CHUNKS + 7) / 8 * 8 * 16;
  static_assert(L % PART == 0 && PART % V == 0 && (GROUP == 1 || PART == L), "");
  static constexpr int common(int m, int n) { return n == 0 ? m : common(n, m % n); }
  static constexpr int BANKS = common(D, 8), CYCLE = D * 8 / BANKS;
};

// Where a tile's interleaved chunk lies in shared memory: eight threads whose chunks are D apart
// (neighbouring runs of V l) meet all groups of banks.
template <typename Tile> __device__ __forceinline__ int place_of(int chunk) {
  return chunk ^ (chunk / Tile::CYCLE % Tile::BANKS);
}

// Number of the i-th interleaved chunk, 0 <= i < J, of a unit: V values of l by J of j.
template <typename Tile> __device__ __forceinline__ int chunk_of(int l_block, int j_block, int i) {
  return Tile::J == Tile::V ? l_block * Tile::D + i * (Tile::D / Tile::V) + j_block : l_block * Tile::D + i;
}

// out[n][m] = in[m][n] for M x N elements of BYTES bytes in the order of memory.
template <int BYTES, int M, int N>
__device__ __forceinline__ void transpose(const uint32 (&in)[M * N * BYTES / 4], uint32 (&out)[M * N * BYTES / 4]) {
#pragma unroll
  for (int word = 0; word < M * N * BYTES / 4; ++word) {
    if constexpr (BYTES == 4) {
      out[word] = in[word % M * N + word / M];
    } else {
      const int low = 2 * word % M * N + 2 * word / M;
      const int high = (2 * word + 1) % M * N + (2 * word + 1) / M;
      const uint32 selector = (low % 2 ? 0x32 : 0x10) | (high % 2 ? 0x7600 : 0x5400);
      out[word] = __byte_perm(in[low / 2], in[high / 2], selector);
    }
  }
}

__device__ __forceinline__ void take_chunk(uint32* words, uint4 chunk) {
  words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
}

// How a tile lies in memory: addresses are in chunks.
template <typename Tile> struct TransposePlace {
  int64 matrix;  // the tile's first
  int part;
  int64 matrices;

  __device__ __forceinline__ TransposePlace(int64 tile, int64 matrices)
      : matrix(tile / Tile::PARTS * Tile::GROUP), part(static_cast<int>(tile % Tile::PARTS)), matrices(matrices) {}

  __device__ __forceinline__ int64 interleaved() const {
    return matrix * (Tile::L * Tile::D / Tile::V) + part * (Tile::PART * Tile::D / Tile::V);
  }
  // Chunks of the tile that exist: the last tile may hold fewer matrices.
  __device__ __forceinline__ int inside() const {
    const int64 left = (matrices - matrix) * (Tile::L * Tile::D / Tile::V);
    return left < Tile::CHUNKS ? static_cast<int>(left) : Tile::CHUNKS;
  }
};

// One unit: which of the tile's matrices, l blocks and j blocks it is.
template <typename Tile> struct TransposeUnit {
  static constexpr int L_BLOCKS = Tile::PART / Tile::V;
  int l_block, j_block, group;

  __device__ __forceinline__ explicit TransposeUnit(int unit)
      : l_block(unit % L_BLOCKS), j_block(unit / L_BLOCKS % (Tile::D / Tile::J)),
        group(unit / L_BLOCKS / (Tile::D / Tile::J)) {}

  __device__ __forceinline__ int64 planar(const TransposePlace<Tile>& place, int j) const {
    return (place.matrix + group) * (Tile::L * Tile::D / Tile::V) +
           (j_block * Tile::J + j) * (Tile::L / Tile::V) + place.part * L_BLOCKS + l_block;
  }
  __device__ __forceinline__ int interleaved(int i) const {
    return chunk_of<Tile>(group * L_BLOCKS + l_block, j_block, i);
  }
};

// y[row, i, j, l] = x[row, i, l, j]; both contiguous.
template <int A, typename Tile> __device__ __forceinline__ void to_planar_kernel(const Arguments& arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  uint4* const chunks = reinterpret_cast<uint4*>(shared);
  const uint4* const x = static_cast<const uint4*>(arguments.x);
  uint4* const y = static_cast<uint4*>(arguments.y);
  const int64 matrices = arguments.batch * A;
  const int64 tiles = (matrices + Tile::GROUP - 1) / Tile::GROUP * Tile::PARTS;
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TransposePlace<Tile> place(tile, matrices);
    const uint4* const from = x + place.interleaved();
    const int inside = place.inside();
    for (int at = threadIdx.x; at < inside; at += Tile::THREADS)
      cp_async_16(chunks + place_of<Tile>(at), from + at, true);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    for (int u = threadIdx.x; u < Tile::UNITS; u += Tile::THREADS) {
      const TransposeUnit<Tile> unit(u);
      if (Tile::GROUP > 1 && place.matrix + unit.group >= matrices) break;
      uint32 in[Tile::J * 4], out[Tile::J * 4];
#pragma unroll
      for (int i = 0; i < Tile::J; ++i) take_chunk(in + 4 * i, chunks[place_of<Tile>(unit.interleaved(i))]);
      transpose<Tile::BYTES, Tile::V, Tile::J>(in, out);
#pragma unroll
      for (int j = 0; j < Tile::J; ++j)
        y[unit.planar(place, j)] = make_uint4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]);
    }
    __syncthreads();
  }
}

// y[row, i, l, j] = x[row, i, j, l]; both contiguous.
template <int A, typename Tile> __device__ __forceinline__ void to_interleaved_kernel(const Arguments& arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  uint4* const chunks = reinterpret_cast<uint4*>(shared);
  const uint4* const x = static_cast<const uint4*>(arguments.x);
  uint4* const y = static_cast<uint4*>(arguments.y);
  const int64 matrices = arguments.batch * A;
  const int64 tiles = (matrices + Tile::GROUP - 1) / Tile::GROUP * Tile::PARTS;
  for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TransposePlace<Tile> place(tile, matrices);
    for (int u = threadIdx.x; u < Tile::UNITS; u += Tile::THREADS) {
      const TransposeUnit<Tile> unit(u);
      if (Tile::GROUP > 1 && place.matrix + unit.group >= matrices) break;
      uint32 in[Tile::J * 4], out[Tile::J * 4];
#pragma unroll
      for (int j = 0; j < Tile::J; ++j) take_chunk(in + 4 * j, x[unit.planar(place, j)]);
      transpose<Tile::BYTES, Tile::J, Tile::V>(in, out);
#pragma unroll
      for (int i = 0; i < Tile::J; ++i)
        chunks[place_of<Tile>(unit.interleaved(i))] =
            make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    }
    __syncthreads();
    uint4* const to = y + place.interleaved();
    const int inside = place.inside();
    for (int at = threadIdx.x; at < inside; at += Tile::THREADS) to[at] = chunks[place_of<Tile>(at)];
    __syncthreads();
  }
}
