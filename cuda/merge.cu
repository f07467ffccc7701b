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
  float2 weights[kMergeWarps][kMaxSplits][4];  // of the heads 2j and 2j+1
  float4 shares[kMergeWarps][2][32];
};

// Four words a lane become those of four lanes: word i of lane j of a quad goes to lane i as its word j.
__device__ __forceinline__ void transpose_quad(u32 (&words)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 taken = __shfl_xor_sync(kFullWarp, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = taken;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 taken = __shfl_xor_sync(kFullWarp, upper ? words[i] : words[i + 2], 2);
    (upper ? words[i] : words[i + 2]) = taken;
  }
}

// Rows of bf16 from one unit, `target` being its first dim of head 0.
__device__ __forceinline__ void write_unit(const Merge& m, const float (&merged)[2][4], u8* target, int row) {
  const int lane = threadIdx.x % 32, c = lane / 4, j = lane % 4;
  if (m.paired_dims) {  // fp8: this lane holds dims 2c and 2c+1 of either fragment, of heads 2j and 2j+1
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u8* head = target + (row + 2 * j + i) * m.out_head_stride + 4 * c;
      if (row + 2 * j + i < m.heads) {
        *reinterpret_cast<u32*>(head) = pack_bf16(merged[0][i], merged[0][i + 2]);
        *reinterpret_cast<u32*>(head + 32) = pack_bf16(merged[1][i], merged[1][i + 2]);
      }
    }
  } else {  // after the first transposition: dims 8i + 2j and 8i + 2j + 1 of head c; after the second one: dims 8j to 8j+7
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = transpose_matrix(pack_bf16(merged[i / 2][i % 2 * 2], merged[i / 2][i % 2 * 2 + 1]));
    transpose_quad(words);
    if (row + c < m.heads) {
      u8* head = target + (row + c) * m.out_head_stride + 16 * j;
      *reinterpret_cast<uint4*>(head) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
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
  const i64 output_stride = m.head_blocks * outputs_of_block(m.block_heads);
  const i64 sum_stride = m.head_blocks * sums_of_block(m.block_heads);
  const uint4* source = m.partial_outputs + first_block * outputs_of_block(m.block_heads) +
                        (unit * head_tiles + head_tile) * 32 + lane;
  const float2* sums = m.partial_sums + first_block * sums_of_block(m.block_heads);
  const float* scales = reinterpret_cast<const float*>(sums + m.block_heads) + unit / (kUnits / kQuarters);
  sums += 8 * head_tile + 2 * j;

  uint4 part[kSplits][Units];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const int split = first + i * sharers;
#pragma unroll
      for (int u = 0; u < Units; ++u) {
        if (split < m.splits) part[i][u] = __ldcg(source + split * output_stride + u * head_tiles * 32);
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
    const int split = 8 * i + c;
    pair[i] = make_float4(kLowest, 0.0f, kLowest, 0.0f);
    scale[i] = 0.0f;
    if (split < m.splits) {
      pair[i] = __ldcg(reinterpret_cast<const float4*>(sums + split * sum_stride));
      scale[i] = __ldcg(scales + split * sum_stride * 2);
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
    if (8 * i < m.splits) {
      pair[i].x = exp2_approx(pair[i].x - maximum[0]) * pair[i].y;
      pair[i].z = exp2_approx(pair[i].z - maximum[1]) * pair[i].w;
      sum[0] += pair[i].x;
      sum[1] += pair[i].z;
    }
  }
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    sum[0] += __shfl_xor_sync(kFullWarp, sum[0], lanes);
    sum[1] += __shfl_xor_sync(kFullWarp, sum[1], lanes);
  }
  const float norm[2] = {sum[0] == 0.0f ? 0.0f : 1.0f / sum[0], sum[1] == 0.0f ? 0.0f : 1.0f / sum[1]};
#pragma unroll
  for (int i = 0; i < kMaxSplits / 8; ++i) {
    // What an empty split has left for a scale is as old as its outputs.
    if (8 * i < m.splits) {
      sm.weights[warp][8 * i + c][j] = make_float2(pair[i].y == 0.0f ? 0.0f : pair[i].x * norm[0] * scale[i],
                                                   pair[i].w == 0.0f ? 0.0f : pair[i].z * norm[1] * scale[i]);
    }
  }
  __syncwarp();

  float merged[Units][2][4] = {};  // of each unit, two fragments
  const auto add = [&](int first) {
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      if (first + i * sharers < m.splits) {
        const float2 weight = sm.weights[warp][first + i * sharers][j];
        if (weight.x != 0.0f || weight.y != 0.0f) {
#pragma unroll
          for (int u = 0; u < Units; ++u) {
            const u32 words[4] = {part[i][u].x, part[i][u].y, part[i][u].z, part[i][u].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              merged[u][w / 2][w % 2 * 2] += weight.x * low_f16(words[w]);
              merged[u][w / 2][w % 2 * 2 + 1] += weight.y * high_f16(words[w]);
            }
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
      float(&own)[2][4] = merged[0];
      if (share > 0) {
#pragma unroll
        for (int f = 0; f < 2; ++f) sm.shares[warp][f][lane] = make_float4(own[f][0], own[f][1], own[f][2], own[f][3]);
      }
      __syncthreads();
      if (share > 0) return;
      for (int i = 1; i < sharers; ++i) {
#pragma unroll
        for (int f = 0; f < 2; ++f) add_fragment(own[f], sm.shares[warp + i][f][lane]);
      }
    }
  }
  const int row = head_block * m.block_heads + 8 * head_tile;
  if (m.lse != nullptr && unit == 0 && lane < 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + 2 * j + i < m.heads) m.lse[token * m.lse_stride + row + 2 * j + i] = natural_lse(maximum[i], sum[i]);
    }
  }
  u8* target = m.out + token * m.out_token_stride + unit * kUnitDims * 2;
#pragma unroll
  for (int u = 0; u < Units; ++u) write_unit(m, merged[u], target + u * kUnitDims * 2, row);
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
