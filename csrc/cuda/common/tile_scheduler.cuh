// The tile scheduler of wgmma16.cuh: which tiles a block computes, and in which order.
//
// Blocks that read the same bytes of x, for different outputs or neighbouring j, cooperate: TEAM of
// them iterate over the same rows at the same time, so that all but the first find x in the L2 cache.
// They take their share of all rows of all groups of columns, and load weights again for each group.
#pragma once

#include "common/kernel_params.cuh"

// The groups of columns and tiles of rows that cooperating blocks compute, one after another.
template <typename Tile, bool WHOLE_J> struct TileSequence;

// Groups that have all j of an i share no bytes of x or y: the blocks take an even share of all tiles of
// all groups, group by group.
template <typename Tile> struct TileSequence<Tile, true> {
  int64 row_tiles, tile, at, end;
  int group;

  __device__ __forceinline__ TileSequence(const Arguments& arguments, int team, int teams) {
    row_tiles = (arguments.batch + Tile::BM - 1) / Tile::BM;
    const int64 all = row_tiles * Tile::COLUMN_GROUPS;
    at = all * team / teams, end = all * (team + 1) / teams;
    group = static_cast<int>(at / row_tiles), tile = at % row_tiles;
  }
  __device__ __forceinline__ bool inside() const { return at < end; }
  __device__ __forceinline__ void next() {
    ++at;
    if (++tile == row_tiles) tile = 0, ++group;
  }
};

// Otherwise neighbouring groups share lines of memory and are computed at the same time: the tiles of rows
// are assigned to shares in turns, and work items (one share of one group) to sets of cooperating blocks,
// all groups of a share before the next share.
template <typename Tile> struct TileSequence<Tile, false> {
  static constexpr int GROUPS = Tile::COLUMN_GROUPS;
  static constexpr int MOST_ITEMS = GROUPS == 1 ? 1 : 8;  // of one set of blocks, where there are enough
  static constexpr int BEGUN_TILES = 2;                   // that take as long as the start of an item
  int row_tiles, teams, shares, item, group;
  int64 tile;

  __device__ __forceinline__ TileSequence(const Arguments& arguments, int team, int all_teams) {
    row_tiles = static_cast<int>((arguments.batch + Tile::BM - 1) / Tile::BM);
    teams = all_teams;
    // The number of shares that minimizes the longest work of any set of cooperating blocks.
    int least = 0;
    shares = 1;
#pragma unroll
    for (int items = 1; items <= MOST_ITEMS; ++items) {
      const int all = items * teams / GROUPS, some = all < row_tiles ? all : row_tiles;
      if (some == 0) continue;
      const int tiles = (row_tiles + some - 1) / some + BEGUN_TILES;
      const int longest = (some * GROUPS + teams - 1) / teams * tiles;
      if (least == 0 || longest < least) least = longest, shares = some;
    }
    item = team, group = item % GROUPS, tile = item / GROUPS;
  }
  __device__ __forceinline__ bool inside() const { return item < shares * GROUPS; }
  __device__ __forceinline__ void next() {
    tile += shares;
    if (tile >= row_tiles) item += teams, group = item % GROUPS, tile = item / GROUPS;
  }
};

// The tiles of one of the cooperating blocks.
template <typename P, typename Tile> struct TileScheduler : TileSequence<Tile, Tile::JC * Tile::TEAM_J == P::D> {
  using Steps = TileSequence<Tile, Tile::JC * Tile::TEAM_J == P::D>;
  static constexpr int GROUPS_OF_I = P::D / (Tile::JC * Tile::TEAM_J);
  __device__ __forceinline__ explicit TileScheduler(const Arguments& arguments)
      : Steps(arguments, blockIdx.x / Tile::TEAM, gridDim.x / Tile::TEAM) {}
  __device__ __forceinline__ int i() const { return this->group / GROUPS_OF_I; }
  __device__ __forceinline__ int j0() const {
    const int first = this->group % GROUPS_OF_I * Tile::TEAM_J;
    return (first + blockIdx.x % Tile::TEAM / Tile::OUTPUT_TILES) * Tile::JC;
  }
  __device__ __forceinline__ int n0() const { return blockIdx.x % Tile::OUTPUT_TILES * Tile::NB; }
};
