// The gradient of a factor's weight by warps' tensor cores, with j in the lanes (16 bit, batch first, sm_80 and up):
//
//   dK[i,k,l,j] = sum over rows n of dY[n,i,k,j] X[n,i,l,j]
//
// For each i and j it is a product of the k by the l, whose elements lie D apart. A 16-byte load of a row holds several
// j at once, as in mma16.cuh. Tensor cores take pairs along the rows, so a thread regroups what it loads of two rows,
// word by word, into a pair for each (k, j). Any order of the rows is right, as long as it is the same for dY and X: it
// is chosen such that the eight threads of a load meet all groups of banks. No operand is copied into another order,
// and only the needed sums are computed. Rows are split into shares, as in weight_grad_shares.cuh.
//
// WITH_BIAS: the warps with the first l add up the rows of dY, too.
#pragma once

#include "common/kernel_params.cuh"
#include "common/pdl.cuh"
#include "common/ptx.cuh"
#include "common/smem_layout.cuh"
#include "common/weight_grad_shares.cuh"

// A run is the chunks of 16 bytes that a thread loads of a row at a time: whole k (or l) with J of their j.
template <int D> struct GradRun {
  static constexpr bool WIDE = D % 8 == 0;  // a chunk holds one k and 8 of its j
  static constexpr int J = WIDE ? 8 : D;
  static constexpr int CHUNKS = 8 % J == 0 ? 1 : 3;
  static constexpr int ELEMENTS = CHUNKS * 8, K = ELEMENTS / J;
  static_assert(ELEMENTS % J == 0, "d must be 1, 2, 3, 4, 6, 12 or a multiple of 8");
};

// WARPS_K, WARPS_L, WARPS_J: warps side by side in k, l and groups of 8 j. RUNS_K, RUNS_L: of a thread, so that a warp
// has 8 * RUNS * Run::K of k and of l. ROWS: of a stage.
template <typename P, int WARPS_K_, int WARPS_L_, int WARPS_J_, int RUNS_K_, int RUNS_L_, int ROWS_, int STAGES_,
          int BLOCKS_>
struct WeightGradMmaTile {
  using Run = GradRun<P::D>;
  static constexpr int WARPS_K = WARPS_K_, WARPS_L = WARPS_L_, WARPS_J = WARPS_J_;
  static constexpr int RUNS_K = RUNS_K_, RUNS_L = RUNS_L_;
  static constexpr int ROWS = ROWS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr int THREADS = 32 * WARPS_K * WARPS_L * WARPS_J;
  static constexpr int WARP_K = 8 * RUNS_K * Run::K, WARP_L = 8 * RUNS_L * Run::K;
  static constexpr int M = RUNS_K * Run::K / 2, N = RUNS_L * Run::K;  // tensor-core tiles of 16 k and of 8 l
  static constexpr int NK = WARPS_K * WARP_K, NL = WARPS_L * WARP_L, NJ = Run::WIDE ? 8 * WARPS_J : P::D;
  static constexpr int K_TILES = (P::B + NK - 1) / NK, L_TILES = (P::C + NL - 1) / NL, J_TILES = P::D / NJ;
  static constexpr int TILES = P::A * J_TILES * K_TILES * L_TILES;
  static constexpr int SPREAD = Run::WIDE ? WARPS_J : Run::CHUNKS;  // chunks between neighbouring lanes' runs
  static constexpr int GRAD_CHUNKS = NK * NJ / 8, X_CHUNKS = NL * NJ / 8;
  // One more than a multiple of 8: rows that follow each other begin at the next group of banks.
  static constexpr int GRAD_PITCH = (GRAD_CHUNKS + 7) / 8 * 8 + 1, X_PITCH = (X_CHUNKS + 7) / 8 * 8 + 1;
  static constexpr int STAGE_BYTES = ROWS * (GRAD_PITCH + X_PITCH) * 16, SHARED_BYTES = STAGES * STAGE_BYTES;
  static_assert(RUNS_K * Run::K % 2 == 0, "tensor cores take 16 k");
  static_assert(P::D % NJ == 0 && (Run::WIDE || WARPS_J == 1) && ROWS % 16 == 0 && STAGES >= 2, "");
  static_assert(SPREAD % 2 == 1 || SPREAD == 2 || SPREAD == 4, "no order of the rows avoids bank conflicts");
  static_assert(P::B * P::D % 8 == 0 && P::C * P::D % 8 == 0, "rows are read in chunks of 16 bytes");
};

// Which of 16 rows load `at` of 4 takes in quarter `quarter` of a warp's lanes.
template <int SPREAD> __device__ __forceinline__ int row_of_load(int quarter, int at) {
  if (SPREAD == 2) return quarter % 2 + quarter / 2 * 4 + at % 2 * 2 + at / 2 * 8;
  if (SPREAD == 4) return quarter + at % 2 * 4 + at / 2 * 8;
  return quarter * 2 + at % 2 + at / 2 * 8;
}

// Loads rows of an operand into a stage, zeros where there are none: COUNT k (or l) from `first`, NJ j from `first_j`.
template <typename P, typename Tile, int CHUNKS, int PITCH, int COUNT>
__device__ __forceinline__ void load_grad_rows(uint32 to, const uint16* from, int64 stride, int first, int first_j,
                                               int rows) {
  constexpr int ALL = Tile::ROWS * CHUNKS, PASSES = (ALL + Tile::THREADS - 1) / Tile::THREADS;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    // Threads keep their chunk where the block has whole rows of them.
    constexpr bool WHOLE = Tile::THREADS % CHUNKS == 0;
    const int index = static_cast<int>(threadIdx.x) + pass * Tile::THREADS;
    const int chunk = (WHOLE ? static_cast<int>(threadIdx.x) : index) % CHUNKS;
    const int row =
        WHOLE ? static_cast<int>(threadIdx.x) / CHUNKS + pass * (Tile::THREADS / CHUNKS) : index / CHUNKS;
    if (ALL % Tile::THREADS != 0 && row >= Tile::ROWS) break;
    int feature = first * P::D + chunk * 8;
    if (Tile::Run::WIDE) feature = (first + chunk / Tile::WARPS_J) * P::D + first_j + chunk % Tile::WARPS_J * 8;
    const bool inside = row < rows && feature < COUNT * P::D;
    cp_async_16(to + (row * PITCH + chunk) * 16, inside ? from + row * stride + feature : from, inside);
  }
}

// The pairs of rows of a thread's run, for 16 rows: pairs[element][half of the 16].
template <typename Run, int PITCH, int SPREAD>
__device__ __forceinline__ void load_run(uint32 (&pairs)[Run::ELEMENTS][2], uint32 at) {
#pragma unroll
  for (int chunk = 0; chunk < Run::CHUNKS; ++chunk) {
    uint32 words[4][4];
#pragma unroll
    for (int load = 0; load < 4; ++load) {
      const uint4 four = load_shared_4_words(at + (row_of_load<SPREAD>(0, load) * PITCH + chunk) * 16);
      words[load][0] = four.x, words[load][1] = four.y, words[load][2] = four.z, words[load][3] = four.w;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        pairs[chunk * 8 + e][half] = __byte_perm(words[2 * half][e / 2], words[2 * half + 1][e / 2],
                                                 e % 2 == 0 ? 0x5410 : 0x7632);
  }
}

// Stores 8 neighbouring sums, in fp32 or rounded to T.
template <typename T> __device__ __forceinline__ void store_eight(void* to, int64 at, bool rounded, const float (&sums)[8]) {
  if (rounded) {
    *reinterpret_cast<uint4*>(static_cast<uint16*>(to) + at) =
        make_uint4(pack_pair<T>(sums[0], sums[1]), pack_pair<T>(sums[2], sums[3]), pack_pair<T>(sums[4], sums[5]),
                   pack_pair<T>(sums[6], sums[7]));
    return;
  }
  float4* const place = reinterpret_cast<float4*>(static_cast<float*>(to) + at);
  place[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  place[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
}

template <typename T, typename P, typename Tile, bool WITH_BIAS>
__device__ __forceinline__ void weight_grad_mma16_kernel(const WeightGradArguments& arguments) {
  using Run = typename Tile::Run;
  constexpr int J = Run::J, FEW = Run::K;
  constexpr int64 ELEMENTS = int64(P::A) * P::B * P::C * P::D;
  constexpr int64 SHARE = ELEMENTS + (WITH_BIAS ? int64(P::A) * P::B * P::D : 0);
  extern __shared__ __align__(16) unsigned char stages[];
  int tile = static_cast<int>(blockIdx.x) % Tile::TILES;
  const int64 share = static_cast<int>(blockIdx.x) / Tile::TILES;
  const int l0 = tile % Tile::L_TILES * Tile::NL;
  tile /= Tile::L_TILES;
  const int k0 = tile % Tile::K_TILES * Tile::NK;
  tile /= Tile::K_TILES;
  const int j0 = tile % Tile::J_TILES * Tile::NJ, i = tile / Tile::J_TILES;
  const int64 begin = share * arguments.rows_per_share, last = begin + arguments.rows_per_share;
  const int64 end = last < arguments.batch ? last : arguments.batch;
  const int steps = static_cast<int>((end - begin + Tile::ROWS - 1) / Tile::ROWS);
  const uint16* const grad = static_cast<const uint16*>(arguments.grad) + i * P::B * P::D;
  const uint16* const x = static_cast<const uint16*>(arguments.x) + i * P::C * P::D;
  const uint32 memory = shared_address(stages);
  const auto load = [&](int step) {
    const uint32 stage = memory + step % Tile::STAGES * Tile::STAGE_BYTES;
    const int64 row = begin + int64(step) * Tile::ROWS;
    const int rows = rows_inside<Tile::ROWS>(end - row);
    load_grad_rows<P, Tile, Tile::GRAD_CHUNKS, Tile::GRAD_PITCH, P::B>(stage, grad + row * arguments.grad_stride,
                                                                       arguments.grad_stride, k0, j0, rows);
    load_grad_rows<P, Tile, Tile::X_CHUNKS, Tile::X_PITCH, P::C>(stage + Tile::ROWS * Tile::GRAD_PITCH * 16,
                                                                 x + row * arguments.x_stride, arguments.x_stride, l0,
                                                                 j0, rows);
  };
  griddepcontrol_wait();
#pragma unroll 1
  for (int step = 0; step < Tile::STAGES - 1; ++step) {
    if (step < steps) load(step);
    cp_async_commit_group();
  }
  const int lane = threadIdx.x % 32, eighth = lane / 4, quarter = lane % 4;
  int warp = threadIdx.x / 32;
  const int warp_j = warp % Tile::WARPS_J;
  warp /= Tile::WARPS_J;
  const int warp_l = warp % Tile::WARPS_L * Tile::WARP_L, warp_k = warp / Tile::WARPS_L * Tile::WARP_K;
  const int own_row = row_of_load<Tile::SPREAD>(quarter, 0);
  const uint32 grad_at = (own_row * Tile::GRAD_PITCH + (warp_k / FEW + eighth) * Tile::SPREAD + warp_j) * 16;
  const uint32 x_at = (Tile::ROWS * Tile::GRAD_PITCH + own_row * Tile::X_PITCH +
                       (warp_l / FEW + eighth) * Tile::SPREAD + warp_j) * 16;
  float sums[Tile::M][Tile::N][J][4];
#pragma unroll
  for (int m = 0; m < Tile::M; ++m)
#pragma unroll
    for (int n = 0; n < Tile::N; ++n)
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][j][e] = 0.0f;
  const bool adds_bias = WITH_BIAS && l0 + warp_l == 0;
  float of_bias[WITH_BIAS ? Tile::RUNS_K : 1][Run::ELEMENTS] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_group<Tile::STAGES - 2>();
    __syncthreads();  // the stage is full for all, and the one before it is free
    if (step + Tile::STAGES - 1 < steps) load(step + Tile::STAGES - 1);
    cp_async_commit_group();
    const uint32 stage = memory + step % Tile::STAGES * Tile::STAGE_BYTES;
#pragma unroll
    for (int sixteen = 0; sixteen < Tile::ROWS / 16; ++sixteen) {
      uint32 of_grad[Tile::RUNS_K][Run::ELEMENTS][2];
#pragma unroll
      for (int run = 0; run < Tile::RUNS_K; ++run) {
        load_run<Run, Tile::GRAD_PITCH, Tile::SPREAD>(
            of_grad[run], stage + grad_at + (sixteen * 16 * Tile::GRAD_PITCH + run * 8 * Tile::SPREAD) * 16);
        if (!WITH_BIAS || !adds_bias) continue;
#pragma unroll
        for (int e = 0; e < Run::ELEMENTS; ++e)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32 pair = of_grad[run][e][half];
            of_bias[run][e] += to_float(T{static_cast<uint16>(pair)}) +
                               to_float(T{static_cast<uint16>(pair >> 16)});
          }
      }
#pragma unroll
      for (int run = 0; run < Tile::RUNS_L; ++run) {
        uint32 of_x[Run::ELEMENTS][2];
        load_run<Run, Tile::X_PITCH, Tile::SPREAD>(
            of_x, stage + x_at + (sixteen * 16 * Tile::X_PITCH + run * 8 * Tile::SPREAD) * 16);
#pragma unroll
        for (int few = 0; few < FEW; ++few)
#pragma unroll
          for (int j = 0; j < J; ++j)
#pragma unroll
            for (int m = 0; m < Tile::M; ++m) {
              const auto& low = of_grad[2 * m / FEW][2 * m % FEW * J + j];
              const auto& high = of_grad[(2 * m + 1) / FEW][(2 * m + 1) % FEW * J + j];
              const uint32 a[4] = {low[0], high[0], low[1], high[1]};
              mma_m16n8k16<T>(sums[m][run * FEW + few][j], a, of_x[few * J + j][0], of_x[few * J + j][1]);
            }
      }
    }
  }
  const bool rounded = arguments.shares == 1;
  void* const to = rounded ? arguments.to : static_cast<float*>(arguments.to) + share * SHARE;
  // Where the k of a thread's `at`th sums is.
  const auto k_of = [&](int at) { return k0 + warp_k + (at / FEW * 8 + eighth) * FEW + at % FEW; };
#pragma unroll
  for (int at = 0; at < 2 * Tile::M; ++at) {
    const int k = k_of(at);
    if (k >= P::B) continue;
#pragma unroll
    for (int run = 0; run < Tile::RUNS_L; ++run) {
      // Two runs of neighbouring lanes: 2 * FEW values of l, J of j.
      const int l = l0 + warp_l + (run * 8 + quarter * 2) * FEW;
#pragma unroll
      for (int chunk = 0; chunk < 2 * Run::CHUNKS; ++chunk) {
        if (l + chunk / Run::CHUNKS * FEW >= P::C) continue;
        float eight[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int element = chunk % Run::CHUNKS * 8 + e;
          eight[e] = sums[at / 2][run * FEW + element / J][element % J][at % 2 * 2 + chunk / Run::CHUNKS];
        }
        int64 place = ((int64(i) * P::B + k) * P::C + l) * P::D;
        place += Run::WIDE ? chunk * P::D + j0 + warp_j * 8 : chunk * 8;
        store_eight<T>(to, place, rounded, eight);
      }
    }
  }
  if (!WITH_BIAS || !adds_bias) return;
#pragma unroll
  for (int run = 0; run < Tile::RUNS_K; ++run)
#pragma unroll
    for (int e = 0; e < Run::ELEMENTS; ++e) {
      float sum = of_bias[run][e];
#pragma unroll
      for (int other = 1; other < 4; other *= 2)
        sum += __uint_as_float(__shfl_sync(~0u, __float_as_uint(sum), lane ^ other));
      const int k = k_of(run * FEW + e / J);
      if (quarter != 0 || k >= P::B) continue;
      const int64 feature = (int64(i) * P::B + k) * P::D + (Run::WIDE ? j0 + warp_j * 8 : 0) + e % J;
      if (rounded) {
        static_cast<uint16*>(arguments.bias)[feature] = static_cast<uint16>(pack_pair<T>(sum, 0.0f));
      } else {
        static_cast<float*>(to)[ELEMENTS + feature] = sum;
      }
    }
}
