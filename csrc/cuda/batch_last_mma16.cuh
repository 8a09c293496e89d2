// 16-bit factors on tensor cores, batch last (sm_80 and up); batch_last.cuh says how.
//
// The weights are the tensor cores' A operand and lie in shared memory in the order of its
// registers; x, whose rows lie across the summation, is read as transposed matrices.
#pragma once

#include "common/batch_last.cuh"

template <typename P, int WARPS_K_, int WARPS_M_, int MT_, int NT_, int KL_, int STAGES_, int BLOCKS_,
          bool SHIFTED_>
struct BatchLastMma16Tile {
  static constexpr int WARPS_K = WARPS_K_, WARPS_M = WARPS_M_;
  static constexpr int MT = MT_, NT = NT_;  // 16-output and 8-column tiles of a warp
  static constexpr int KL = KL_;            // l in a stage
  static constexpr int BLOCKS = BLOCKS_;    // blocks that should fit on a multiprocessor
  static constexpr bool SHIFTED = SHIFTED_;
  static constexpr int STAGES = SHIFTED ? STAGES_ - 1 : STAGES_;  // one buffer holds shifted rows
  static constexpr int WARPS = WARPS_K * WARPS_M, THREADS = 32 * WARPS;
  static constexpr int NB = WARPS_K * MT * 16, BM = WARPS_M * NT * 8;
  static constexpr int STEPS = (P::C + 15) / 16;  // tensor-core steps over l
  static constexpr int STEPS_PER_STAGE = KL / 16, STAGES_PER_TILE = STEPS / STEPS_PER_STAGE;
  static constexpr int CHUNKS = BM / 8;           // 16-byte chunks of a row of a stage
  static constexpr int PITCH = CHUNKS + 1;        // odd: 8 rows of a matrix meet all banks
  static constexpr int WEIGHT_BYTES = NB / 16 * STEPS * 512;
  static constexpr int STAGE_BYTES = KL * PITCH * 16;
  static constexpr int OUT_CHUNKS = NT, OUT_PITCH = NT + 1;  // of a row of a warp's results
  static constexpr int OUT_BYTES = 16 * OUT_PITCH * 16;
  static constexpr int SHARED_BYTES = WEIGHT_BYTES + STAGES_ * STAGE_BYTES + WARPS * OUT_BYTES;
  static constexpr int OUTPUT_TILES = (P::B + NB - 1) / NB, COLUMNS = P::A * P::D;
  static_assert(KL % 16 == 0 && STEPS % STEPS_PER_STAGE == 0, "a tile is a number of whole stages");
  static_assert(NT % 2 == 0, "matrices load in pairs");
  static_assert(STAGES >= 2, "one stage fills while another is used");
};

// Elements (k, l) and (k, l + 1) of a column's weights, zeros beyond b and c.
template <typename P, bool ALIGNED>
__device__ __forceinline__ uint32 weight_pair(const uint16* weight, int k, int l) {
  const uint16* const from = weight + k * P::C + l;
  if (ALIGNED && P::C % 2 == 0) {
    return k < P::B && l < P::C ? *reinterpret_cast<const uint32*>(from) : 0;
  }
  const uint32 low = k < P::B && l < P::C ? from[0] : 0;
  const uint32 high = k < P::B && l + 1 < P::C ? from[1] : 0;
  return low | high << 16;
}

// Puts 16 x COUNT * 8 sums, as the tensor cores leave them, into rows of 16-bit results.
template <typename T, int COUNT>
__device__ __forceinline__ void stage_rows16(unsigned char* out, int pitch, const float* sums) {
  const int lane = threadIdx.x % 32;
  uint32* const words = reinterpret_cast<uint32*>(out) + lane / 4 * pitch * 4 + lane % 4;
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    words[n * 4] = pack_pair<T>(sums[n * 4], sums[n * 4 + 1]);
    words[8 * pitch * 4 + n * 4] = pack_pair<T>(sums[n * 4 + 2], sums[n * 4 + 3]);
  }
}

template <typename T> struct Math16 {
  using Element = uint16;

  template <typename P, typename Tile>
  static __device__ __forceinline__ void load_weights(const Arguments& arguments, unsigned char* weights,
                                                      int column, int n0) {
    const uint16* const w = column_of_weight<P, uint16>(arguments, column);
    const auto pair = [&](int k, int l) { return weight_pair<P, !Tile::SHIFTED>(w, k, l); };
    const int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int f = threadIdx.x / 32; f < Tile::NB / 16 * Tile::STEPS; f += Tile::WARPS) {
      const int k = n0 + f / Tile::STEPS * 16 + lane / 4, l = f % Tile::STEPS * 16 + lane % 4 * 2;
      reinterpret_cast<uint4*>(weights)[f * 32 + lane] =
          make_uint4(pair(k, l), pair(k + 8, l), pair(k, l + 8), pair(k + 8, l + 8));
    }
  }

  template <typename Tile>
  static __device__ __forceinline__ void multiply(float (&sums)[Tile::MT][Tile::NT][4],
                                                  const unsigned char* stage, const unsigned char* weights,
                                                  int part, int warp_k, int warp_m) {
    constexpr int MT = Tile::MT, NT = Tile::NT;
    // A lane's row and chunk in the four 8 x 8 matrices that it helps to load: two of l, two of m.
    const int lane = threadIdx.x % 32;
    const uint32 matrices =
        shared_address(stage) + (lane % 16 * Tile::PITCH + warp_m * NT + lane / 16) * 16;
    const uint4* const fragments = reinterpret_cast<const uint4*>(weights) +
                                   (warp_k * MT * Tile::STEPS + part * Tile::STEPS_PER_STAGE) * 32 + lane;
#pragma unroll(Tile::STEPS_PER_STAGE <= 4 ? Tile::STEPS_PER_STAGE : 2)
    for (int step = 0; step < Tile::STEPS_PER_STAGE; ++step) {
      uint32 b[NT / 2][4];
#pragma unroll
      for (int pair = 0; pair < NT / 2; ++pair) {
        ldmatrix_x4_trans(b[pair], matrices + (step * 16 * Tile::PITCH + pair * 2) * 16);
      }
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const uint4 fragment = fragments[(mt * Tile::STEPS + step) * 32];
        const uint32 a[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          mma_m16n8k16<T>(sums[mt][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }

  template <typename Tile>
  static __device__ __forceinline__ void stage_rows(unsigned char* out, const float (&sums)[Tile::NT][4]) {
    stage_rows16<T, Tile::NT>(out, Tile::OUT_PITCH, &sums[0][0]);
  }

  template <typename P, typename Tile>
  static __device__ __forceinline__ void repair(const Arguments&, unsigned char*, int, int, int64) {}
};

template <typename T, typename P, typename Tile>
__device__ __forceinline__ void batch_last_mma16_kernel(const Arguments& arguments) {
  batch_last_kernel<P, Tile, Math16<T>>(arguments);
}
