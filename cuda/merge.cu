// Joins the partial results of a split index row, o_i normalised by their own sums l_i:
//     out = sum_i w_i o_i / sum_i w_i       w_i = 2^(m_i - m) l_i       m = max_i m_i
// A warp merges units of 32 dims by 8 heads, in the order in which the main kernel's registers held them: every read is a full
// line, and the transposition to rows happens once, here. Where a call has few units, several warps share the splits of each, so
// that more multiprocessors read; where it has many and few splits, a warp merges several with the weights it has computed once.
#include "partial.cuh"

constexpr int kMaxSplits = 32;
constexpr int kMergeWarps = 4;
constexpr int kInFlight = 8;  // uint4 that a lane asks for at once: of so many splits, or of several units and fewer splits

struct Merge {
  const uint4* partial_outputs;
  const float2* partial_sums;
  int splits, sharers, block_heads, heads, head_blocks, paired_dims;
  u8* out;
  i64 out_token_stride, out_head_stride;
  float* lse;
  i64 lse_stride;
};

// What the warps of a block share.
struct MergeShared {
  struct alignas(16) Warp {
    float2 weights[kMaxSplits][4];  // of the heads 2j and 2j+1
    float4 share[2][32];
  } warps[kMergeWarps];  // in the end, units on their way to rows
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

// `Units` units of a warp at once, of as many splits as that leaves in flight: all there are, but for a single unit.
template <int Units>
__device__ __forceinline__ void merge_units(const Merge& m, MergeShared& sm) {
  constexpr int kSplits = kInFlight / Units;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane / 4, j = lane % 4;
  const int head_tiles = m.block_heads / 8;
  const int head_tile = blockIdx.x % head_tiles;
  const int head_block = blockIdx.x / head_tiles % m.head_blocks;
  const int token = blockIdx.x / head_tiles / m.head_blocks;
  const i64 first_block = static_cast<i64>(token) * m.splits * m.head_blocks + head_block;
  const int sharers = Units == 1 ? m.sharers : 1;
  const int share = warp % sharers;
  const int unit = (blockIdx.y * kMergeWarps + warp) / sharers * Units;
  // From split to split, in bytes: an address is one multiplication.
  const u32 output_stride = m.head_blocks * outputs_of_block(m.block_heads) * sizeof(uint4);
  const u32 sum_stride = m.head_blocks * sums_of_block(m.block_heads) * sizeof(float2);
  const float2* block_sums = m.partial_sums + first_block * sums_of_block(m.block_heads);
  const u8* outputs = reinterpret_cast<const u8*>(m.partial_outputs + first_block * outputs_of_block(m.block_heads) +
                                                  (unit * head_tiles + head_tile) * 32 + lane);
  const u8* sums = reinterpret_cast<const u8*>(block_sums + 8 * head_tile + 2 * j);
  const u8* scales = reinterpret_cast<const u8*>(reinterpret_cast<const float*>(block_sums + m.block_heads) + unit / (kUnits / kQuarters));
  const int row = head_block * m.block_heads + 8 * head_tile;
  u8* target = m.out + token * m.out_token_stride + (row + c) * m.out_head_stride + unit * kUnitDims * 2 + 16 * j;
  // Left alone, the compiler works out where everything is after the wait, 250 clocks of nothing else. The sum is a
  // multiple of 4.
  if (reinterpret_cast<u64>(outputs) + reinterpret_cast<u64>(sums) + reinterpret_cast<u64>(scales) + reinterpret_cast<u64>(target) == 1) return;

  MergeShared::Warp& own = sm.warps[warp];
  uint4 part[kSplits][Units];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const u32 split = first + i * sharers;
#pragma unroll
      for (int u = 0; u < Units; ++u) {
        const u8* output = outputs + static_cast<u64>(split) * output_stride + u * head_tiles * 32 * sizeof(uint4);
        if (split < m.splits) part[i][u] = __ldcg(reinterpret_cast<const uint4*>(output));
      }
    }
  };
  wait_for_prerequisites();
  fetch(share);  // with the sums beside it: a merge is two latencies long, or three
  float4 pair[kMaxSplits / 8];  // maximum and sum of both heads, splits c, c + 8, ...
  float scale[kMaxSplits / 8];
  float maximum[2] = {kLowest, kLowest};
#pragma unroll
  for (int i = 0; i < kMaxSplits / 8; ++i) {
    const u32 split = 8 * i + c;
    pair[i] = make_float4(kLowest, 0.0f, kLowest, 0.0f);
    scale[i] = 0.0f;
    if (split < m.splits) {
      pair[i] = __ldcg(reinterpret_cast<const float4*>(sums + static_cast<u64>(split) * sum_stride));
      scale[i] = __ldcg(reinterpret_cast<const float*>(scales + static_cast<u64>(split) * sum_stride));
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxSplits / 8; ++i) {
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
  for (int i = 0; i < kMaxSplits / 8; ++i) {
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
  const float norm[2] = {sum[0] == 0.0f ? 0.0f : reciprocal(sum[0]), sum[1] == 0.0f ? 0.0f : reciprocal(sum[1])};
#pragma unroll
  for (int i = 0; i < kMaxSplits / 8; ++i) {
    // What an empty split has left for a scale is as old as its outputs.
    own.weights[8 * i + c][j] = make_float2(pair[i].y == 0.0f ? 0.0f : pair[i].x * norm[0] * scale[i],
                                            pair[i].w == 0.0f ? 0.0f : pair[i].z * norm[1] * scale[i]);
  }
  __syncwarp();

  float merged[Units][2][4] = {};  // of each unit, two fragments
  const auto add = [&](int first) {
    float2 weight[kSplits];  // all asked for before the first one is used
#pragma unroll
    for (int i = 0; i < kSplits; ++i) weight[i] = own.weights[(first + i * sharers) % kMaxSplits][j];
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      if (first + i * sharers < m.splits) {
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
  add(share);
  if constexpr (Units == 1) {
    for (int first = share + kSplits * sharers; first < m.splits; first += kSplits * sharers) {
      fetch(first);
      add(first);
    }
    if (sharers > 1) {
      float(&joined)[2][4] = merged[0];
      if (share > 0) {
#pragma unroll
        for (int f = 0; f < 2; ++f) own.share[f][lane] = make_float4(joined[f][0], joined[f][1], joined[f][2], joined[f][3]);
      }
      __syncthreads();
      if (share > 0) return;
#pragma unroll
      for (int i = 1; i < kMergeWarps; ++i) {
        if (i < sharers) {
#pragma unroll
          for (int f = 0; f < 2; ++f) add_fragment(joined[f], sm.warps[warp + i].share[f][lane]);
        }
      }
    }
  }
  static_assert(sizeof(own) >= Units * kUnitBytes, "units of a warp");
  u8* stage = reinterpret_cast<u8*>(&own);
  __syncwarp();  // the weights have been read
#pragma unroll
  for (int u = 0; u < Units; ++u) stage_merged(m, merged[u], stage + u * kUnitBytes);
  __syncwarp();
  const bool real = row + c < m.heads;
#pragma unroll
  for (int u = 0; u < Units; ++u) {
    const uint4 dims = unit_row(stage + u * kUnitBytes);
    if (real) *reinterpret_cast<uint4*>(target + u * kUnitDims * 2) = dims;
  }
  if (m.lse != nullptr && unit == 0 && lane < 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + 2 * j + i < m.heads) m.lse[token * m.lse_stride + row + 2 * j + i] = natural_lse(maximum[i], sum[i]);
    }
  }
}

// Grid: x = token, head block, head tile (last fastest); y = groups of kMergeWarps * units / sharers of the units of a head tile.
// One of `sharers` and `units` is 1; `units` is 1, or 2 or 4 with at most kInFlight / units splits.
extern "C" __global__ void __launch_bounds__(32 * kMergeWarps)
    merge_splits(const uint4* partial_outputs, const float2* partial_sums, int splits, int sharers, int units, int block_heads,
                 int heads, int head_blocks, int paired_dims, u8* out, i64 out_token_stride, i64 out_head_stride, float* lse,
                 i64 lse_stride) {
  __shared__ MergeShared sm;
  const Merge m{partial_outputs, partial_sums, splits, sharers, block_heads, heads, head_blocks, paired_dims,
                out, out_token_stride, out_head_stride, lse, lse_stride};
  if (units == 1) merge_units<1>(m, sm);
  else if (units == 2) merge_units<2>(m, sm);
  else merge_units<4>(m, sm);
}
