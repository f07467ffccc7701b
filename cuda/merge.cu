// Joins the partial results of a split index row, o_i normalised by their own sums l_i:
//     out = sum_i w_i o_i / sum_i w_i       w_i = 2^(m_i - m) l_i       m = max_i m_i
// A warp merges units of 32 dims by 8 heads, in the order in which the main kernel's registers held them: every read is a full
// line, and the transposition to rows happens once, here. Where a call has few units, several warps share the splits of each: a warp
// joins its own by the same formula, relative to their own maximum, and the block joins the warps. It is instructions that take the
// time there, one behind the other, and so each has few. Where a call has many units and few splits, a warp merges several with the
// weights it has computed once.
#include "partial.cuh"

constexpr int kMostWarps = 8;    // of a block: as many as share a unit, and at least four
constexpr int kMostUnits = 4;    // of a warp
constexpr int kMostSplits = 32;  // of a warp
constexpr int kSharedRow = kUnitDims + 4;  // floats: eight dims of every other head lie in as many banks

struct Merge {
  const uint4* partial_outputs;
  const float2* partial_sums;
  int splits, block_heads, heads, head_blocks, paired_dims;
  u8* out;
  i64 out_token_stride, out_head_stride;
  float* lse;
  i64 lse_stride;
};

// Shared memory of a warp, dynamic: a block has as many as it has warps.
struct alignas(16) MergeWarp {
  union {
    float2 weights[kMostSplits][4];       // of the heads 2j and 2j+1
    float rows[8][kSharedRow];            // of each head, this warp's share of a unit
    u8 units[kMostUnits][kUnitBytes];     // where it is not shared, on their way to rows
  };
  float2 sums[8];  // of each head, maximum and sum of this warp's splits
};

// One merged unit, rounded, on its way to rows.
__device__ __forceinline__ void stage_merged(const Merge& m, const float (&merged)[2][4], u8* stage) {
  u32 pairs[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) pairs[i][half] = pack_bf16(merged[i][2 * half], merged[i][2 * half + 1]);
  }
  if (m.paired_dims) stage_unit<true>(stage, pairs);
  else stage_unit<false>(stage, pairs);
}

// One warp's share of a unit, to rows that all who share it read.
__device__ __forceinline__ void write_shared(const Merge& m, float (&rows)[8][kSharedRow], const float (&merged)[2][4]) {
  const int lane = threadIdx.x % 32, c = lane / 4, j = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int dim = 16 * i + (m.paired_dims ? 2 * c + half : 8 * half + c);
      rows[2 * j][dim] = merged[i][2 * half];
      rows[2 * j + 1][dim] = merged[i][2 * half + 1];
    }
  }
}

// `Units` units of a warp at once, or a unit that `Sharers` warps share. A warp has up to 8 * Rounds splits and asks for `InFlight` of
// them at once; only a single unit may have more.
template <int Sharers, int Units, int InFlight, int Rounds>
__device__ __forceinline__ void merge_units(const Merge& m, MergeWarp* warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane / 4, j = lane % 4;
  const int head_tiles = m.block_heads / 8;
  const int head_tile = blockIdx.x % head_tiles;
  const int head_block = blockIdx.x / head_tiles % m.head_blocks;
  const int token = blockIdx.x / head_tiles / m.head_blocks;
  const i64 first_block = static_cast<i64>(token) * m.splits * m.head_blocks + head_block;
  const int share = warp % Sharers;
  const int unit = (blockIdx.y * (blockDim.x / 32) + warp) / Sharers * Units;
  // From split to split, in bytes: an address is one multiplication.
  const u32 output_stride = m.head_blocks * outputs_of_block(m.block_heads) * sizeof(uint4);
  const u32 sum_stride = m.head_blocks * sums_of_block(m.block_heads) * sizeof(float2);
  const float2* block_sums = m.partial_sums + first_block * sums_of_block(m.block_heads);
  const u8* outputs = reinterpret_cast<const u8*>(m.partial_outputs + first_block * outputs_of_block(m.block_heads) +
                                                  (unit * head_tiles + head_tile) * 32 + lane);
  const u8* sums = reinterpret_cast<const u8*>(block_sums + 8 * head_tile + 2 * j);
  const u8* scales = reinterpret_cast<const u8*>(reinterpret_cast<const float*>(block_sums + m.block_heads) + unit / (kUnits / kQuarters));
  const int row = head_block * m.block_heads + 8 * head_tile;
  u8* block_target = m.out + token * m.out_token_stride + row * m.out_head_stride + unit * kUnitDims * 2;
  u8* target = block_target + c * m.out_head_stride + 16 * j;
  // Where a unit is shared, a lane finishes two dims of a head; of two warps, those of a second head as well.
  const int pair_number = share * 32 + lane, shared_head = pair_number / (kUnitDims / 2), shared_dim = pair_number % (kUnitDims / 2) * 2;
  if (Sharers > 1) target = block_target + shared_head * m.out_head_stride + 2 * shared_dim;
  // Left alone, the compiler works out where everything is after the wait, 250 clocks of nothing else. The sum is a
  // multiple of 4.
  if (reinterpret_cast<u64>(outputs) + reinterpret_cast<u64>(sums) + reinterpret_cast<u64>(scales) + reinterpret_cast<u64>(target) == 1) return;

  MergeWarp& own = warps[warp];
  const int splits = (m.splits - share + Sharers - 1) / Sharers;  // of this warp: number `share`, and every Sharers-th one from there
  uint4 part[InFlight][Units];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < InFlight; ++i) {
      const u32 split = share + (first + i) * Sharers;
#pragma unroll
      for (int u = 0; u < Units; ++u) {
        const u8* output = outputs + static_cast<u64>(split) * output_stride + u * head_tiles * 32 * sizeof(uint4);
        if (first + i < splits) part[i][u] = __ldcg(reinterpret_cast<const uint4*>(output));
      }
    }
  };
  wait_for_prerequisites();
  fetch(0);  // with the sums beside it: a merge is two latencies long, or three
  float4 pair[Rounds];  // maximum and sum of both heads, this warp's splits c, c + 8, ...
  float scale[Rounds];
  float maximum[2] = {kLowest, kLowest};
#pragma unroll
  for (int i = 0; i < Rounds; ++i) {
    const u32 split = share + (8 * i + c) * Sharers;
    pair[i] = make_float4(kLowest, 0.0f, kLowest, 0.0f);
    scale[i] = 0.0f;
    if (split < m.splits) {
      pair[i] = __ldcg(reinterpret_cast<const float4*>(sums + static_cast<u64>(split) * sum_stride));
      scale[i] = __ldcg(reinterpret_cast<const float*>(scales + static_cast<u64>(split) * sum_stride));
    }
  }
#pragma unroll
  for (int i = 0; i < Rounds; ++i) {
    maximum[0] = fmaxf(maximum[0], pair[i].x);
    maximum[1] = fmaxf(maximum[1], pair[i].z);
  }
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    maximum[0] = fmaxf(maximum[0], __shfl_xor_sync(kFullWarp, maximum[0], lanes));
    maximum[1] = fmaxf(maximum[1], __shfl_xor_sync(kFullWarp, maximum[1], lanes));
  }
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < Rounds; ++i) {
    pair[i].x = exp2_approx(pair[i].x - maximum[0]) * pair[i].y;
    pair[i].z = exp2_approx(pair[i].z - maximum[1]) * pair[i].w;
    sum[0] += pair[i].x;
    sum[1] += pair[i].z;
  }
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    sum[0] += __shfl_xor_sync(kFullWarp, sum[0], lanes);
    sum[1] += __shfl_xor_sync(kFullWarp, sum[1], lanes);
  }
  // What several warps share is divided when they are joined.
  const auto norm_of = [](float of) { return of == 0.0f ? 0.0f : reciprocal(of); };
  const float norm[2] = {Sharers > 1 ? 1.0f : norm_of(sum[0]), Sharers > 1 ? 1.0f : norm_of(sum[1])};
#pragma unroll
  for (int i = 0; i < Rounds; ++i) {
    // What an empty split has left for a scale is as old as its outputs.
    own.weights[8 * i + c][j] = make_float2(pair[i].y == 0.0f ? 0.0f : pair[i].x * norm[0] * scale[i],
                                            pair[i].w == 0.0f ? 0.0f : pair[i].z * norm[1] * scale[i]);
  }
  if (Sharers > 1 && lane < 4) *reinterpret_cast<float4*>(&own.sums[2 * lane]) = make_float4(maximum[0], sum[0], maximum[1], sum[1]);
  __syncwarp();

  float merged[Units][2][4] = {};  // of each unit, two fragments
  const auto add = [&](int first) {
    float2 weight[InFlight];  // all asked for before the first one is used
#pragma unroll
    for (int i = 0; i < InFlight; ++i) weight[i] = own.weights[min(first + i, 8 * Rounds - 1)][j];
#pragma unroll
    for (int i = 0; i < InFlight; ++i) {
      if (first + i < splits) {
        const bool used = weight[i].x != 0.0f || weight[i].y != 0.0f;
#pragma unroll
        for (int u = 0; u < Units; ++u) {
          const u32 words[4] = {part[i][u].x, part[i][u].y, part[i][u].z, part[i][u].w};
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const u32 word = used ? words[w] : 0;
            merged[u][w / 2][w % 2 * 2] += weight[i].x * low_f16(word);
            merged[u][w / 2][w % 2 * 2 + 1] += weight[i].y * high_f16(word);
          }
        }
      }
    }
  };
  add(0);
  if constexpr (Units == 1) {
    for (int first = InFlight; first < splits; first += InFlight) {
      fetch(first);
      add(first);
    }
  }
  if constexpr (Sharers > 1) {
    __syncwarp();  // the weights have been read
    write_shared(m, own.rows, merged[0]);
    __syncthreads();
    constexpr int kMore = Sharers == 2 ? 2 : 1;
    if (Sharers > 4 && shared_head >= 8) return;  // a unit has no dims for these
#pragma unroll
    for (int more = 0; more < kMore; ++more) {
      const int head = shared_head + 4 * more;
      float2 of[Sharers], part[Sharers];
#pragma unroll
      for (int i = 0; i < Sharers; ++i) {
        const MergeWarp& other = warps[warp - share + i];
        of[i] = other.sums[head];
        part[i] = *reinterpret_cast<const float2*>(&other.rows[head][shared_dim]);
      }
      float most = kLowest, all = 0.0f, first = 0.0f, second = 0.0f;
#pragma unroll
      for (int i = 0; i < Sharers; ++i) most = fmaxf(most, of[i].x);
#pragma unroll
      for (int i = 0; i < Sharers; ++i) {
        const float factor = exp2_approx(of[i].x - most);
        all += factor * of[i].y;
        first += factor * part[i].x;
        second += factor * part[i].y;
      }
      const float inverse = norm_of(all);
      if (row + head < m.heads) {
        *reinterpret_cast<u32*>(target + 4 * more * m.out_head_stride) = pack_bf16(first * inverse, second * inverse);
        if (m.lse != nullptr && unit == 0 && shared_dim == 0) m.lse[token * m.lse_stride + row + head] = natural_lse(most, all);
      }
    }
    return;
  }
  static_assert(Units <= kMostUnits, "units of a warp");
  __syncwarp();  // the weights have been read
#pragma unroll
  for (int u = 0; u < Units; ++u) stage_merged(m, merged[u], own.units[u]);
  __syncwarp();
  const bool real = row + c < m.heads;
#pragma unroll
  for (int u = 0; u < Units; ++u) {
    const uint4 dims = unit_row(own.units[u]);
    if (real) *reinterpret_cast<uint4*>(target + u * kUnitDims * 2) = dims;
  }
  if (m.lse != nullptr && unit == 0 && lane < 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + 2 * j + i < m.heads) m.lse[token * m.lse_stride + row + 2 * j + i] = natural_lse(maximum[i], sum[i]);
    }
  }
}

// Grid: x = token, head block, head tile (last fastest); y = groups of the units of a head tile, as many as a block's warps times
// `units` over `sharers`. `sharers` is 1, 2, 4 or 8, with as many splits as each of them may have (MAX_SPLITS and _merge_shape in
// overlay/kernel/plan.py); `units` is 1, or without sharers 2 with up to 4 splits or 4 with 2.
extern "C" __global__ void __launch_bounds__(32 * kMostWarps)
    merge_splits(const uint4* partial_outputs, const float2* partial_sums, int splits, int sharers, int units, int block_heads,
                 int heads, int head_blocks, int paired_dims, u8* out, i64 out_token_stride, i64 out_head_stride, float* lse,
                 i64 lse_stride) {
  extern __shared__ __align__(1024) u8 dynamic_shared[];
  MergeWarp* warps = reinterpret_cast<MergeWarp*>(dynamic_shared);
  const Merge m{partial_outputs, partial_sums, splits, block_heads, heads, head_blocks, paired_dims,
                out, out_token_stride, out_head_stride, lse, lse_stride};
  if (units == 4) merge_units<1, 4, 2, 1>(m, warps);
  else if (units == 2) merge_units<1, 2, 4, 1>(m, warps);
  else if (sharers == 8) {
    if (splits <= 32) merge_units<8, 1, 4, 1>(m, warps);
    else if (splits <= 64) merge_units<8, 1, 8, 1>(m, warps);
    else merge_units<8, 1, 9, 2>(m, warps);
  } else if (sharers == 4) {
    if (splits <= 16) merge_units<4, 1, 4, 1>(m, warps);
    else merge_units<4, 1, 8, 1>(m, warps);
  } else if (sharers == 2) {
    if (splits <= 16) merge_units<2, 1, 8, 1>(m, warps);
    else merge_units<2, 1, 8, 2>(m, warps);
  } else {
    if (splits <= 8) merge_units<1, 1, 8, 1>(m, warps);
    else merge_units<1, 1, 8, 4>(m, warps);
  }
}
