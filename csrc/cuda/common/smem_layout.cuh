// Code shared by the families with j in the vector lanes: rows of 16-byte chunks, and the sums of a warp.
#pragma once

#include "common/numeric_types.cuh"

// Chunks from row to row such that eight threads that touch two rows meet all groups of banks;
// `spread` is the distance in chunks between neighbours in a row.
constexpr int row_pitch(int chunks, int spread) {
  return chunks + ((spread == 2 ? 1 : 4) - chunks % 8 + 8) % 8;
}

// The largest divisor of a number that is not above a limit.
constexpr int largest_divisor(int of, int limit) { return of % limit == 0 ? limit : largest_divisor(of, limit - 1); }

// A value, or the end of a range that it is beyond.
constexpr int between(int least, int64 value, int most) {
  return value < least ? least : value > most ? most : static_cast<int>(value);
}

// How a block's threads walk over the 16-byte chunks of a tile's rows: WIDTH neighbouring threads
// take neighbouring chunks of a row, and each thread keeps its chunks and steps from row to row, so
// that an address costs an addition.
template <int ROWS, int CHUNKS, int THREADS> struct RowWalk {
  static constexpr int common(int m, int n) { return n == 0 ? m : common(n, m % n); }
  static constexpr int SHARED = common(CHUNKS, THREADS);  // keeps all threads busy, if wide enough
  static constexpr int WIDTH = SHARED < 8 && CHUNKS < THREADS ? CHUNKS : SHARED;
  static constexpr int PASS_ROWS = THREADS / WIDTH;
  static constexpr int CHUNK_PASSES = CHUNKS / WIDTH;
  static_assert(CHUNKS % WIDTH == 0, "a row of chunks is walked in whole passes");
  // One past the last row of a thread that starts at row m0: threads beyond whole rows have none.
  __device__ static __forceinline__ int end(int m0) {
    return THREADS % WIDTH == 0 || m0 < PASS_ROWS ? ROWS : 0;
  }
};

// How many of a tile's ROWS rows there are when `left` rows are left.
template <int ROWS> __device__ __forceinline__ int rows_inside(int64 left) {
  return left < ROWS ? static_cast<int>(left) : ROWS;
}

// Which of its tile's 8 outputs a column of the tensor cores' operand holds. A thread gets columns
// 2q and 2q + 1: neighbours where their j make one run of bytes, else spread over all banks.
template <typename Layout> __device__ __forceinline__ int output_of_column(int column) {
  return Layout::WIDE ? column / 2 + column % 2 * 4 : column;
}

// The bytes, at most 16, whose multiples the results of all groups i begin at, where rows do.
template <typename P, int ELEMENT_BYTES> constexpr int aligned_results() {
  const int64 bytes = int64(P::B) * P::D * ELEMENT_BYTES;
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2;
}

// Stores the first `bytes` bytes of a chunk, at an address that is a multiple of ALIGNED; all of an aligned chunk.
template <int ALIGNED> __device__ __forceinline__ void store_chunk(void* to, const uint4& chunk, int bytes) {
  if constexpr (ALIGNED == 16) {
    *static_cast<uint4*>(to) = chunk;
  } else {
    const uint32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    unsigned char* const first = static_cast<unsigned char*>(to);
#pragma unroll
    for (int at = 0; at < 16; at += ALIGNED) {
      if (at >= bytes) continue;
      if constexpr (ALIGNED == 8) {
        *reinterpret_cast<uint2*>(first + at) = make_uint2(words[at / 4], words[at / 4 + 1]);
      } else if constexpr (ALIGNED == 4) {
        *reinterpret_cast<uint32*>(first + at) = words[at / 4];
      } else {
        *reinterpret_cast<uint16*>(first + at) = static_cast<uint16>(words[at / 4] >> at % 4 * 8);
      }
    }
  }
}

// The sums of a warp: 16-row tiles, 8-output tiles, j, and a lane's two rows of two outputs.
template <typename Tile> using Sums = float[Tile::MT][Tile::NT][Tile::Layout::J][4];

template <typename Tile> __device__ __forceinline__ void clear(Sums<Tile>& sums) {
#pragma unroll
  for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
      for (int j = 0; j < Tile::Layout::J; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][j][e] = 0.0f;
}
