// Joins the partial results of a split index row:
//     out = sum_i 2^(m_i - m) o_i / sum_i 2^(m_i - m) l_i       m = max_i m_i
// A warp merges one MMA fragment, 16 dims by 8 heads, in the order in which the main kernel's registers held it: every read is a
// full line, and the transposition to rows happens once, here.
#include "softmax.cuh"

constexpr int kMaxSplits = 32;
constexpr int kMergeWarps = 4;
constexpr int kInFlight = 16;  // fragments that a lane asks for at once

__device__ __forceinline__ void fetch(float4 (&part)[kInFlight], const float4* __restrict__ source, i64 step, int count) {
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (i < count) part[i] = __ldg(source + i * step);
  }
}

// Grid: x = token, head block, head tile (last fastest); y = groups of kMergeWarps fragments of the 32 in a head tile.
extern "C" __global__ void __launch_bounds__(32 * kMergeWarps)
    merge_splits(const float4* __restrict__ partial_output, const float2* __restrict__ partial_sums, int splits, int block_heads,
                 int group_heads, int heads, int head_blocks, int paired_dims, u8* out, i64 out_token_stride, i64 out_head_stride,
                 float* lse, i64 lse_stride) {
  __shared__ float2 sums[kMaxSplits][8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane / 4, j = lane % 4;
  const int head_tiles = block_heads / 8, group_tiles = group_heads / 8;
  const int head_tile = blockIdx.x % head_tiles;
  const int head_block = blockIdx.x / head_tiles % head_blocks;
  const int token = blockIdx.x / head_tiles / head_blocks;
  const i64 first_block = static_cast<i64>(token) * splits * head_blocks + head_block;

  const int fragment = blockIdx.y * kMergeWarps + warp;  // of the 32 tiles of 16 dims
  const int group = head_tile / group_tiles;
  const i64 step = static_cast<i64>(head_blocks) * block_heads * (kLatent / 4);
  const float4* source = partial_output + first_block * block_heads * (kLatent / 4) +
                         ((group * (kLatent / 16) + fragment) * group_tiles + head_tile % group_tiles) * 32 + lane;
  float4 part[kInFlight];
  fetch(part, source, step, splits);  // before anything else: a merge is two latencies long, or three
  for (int i = threadIdx.x; i < splits * 8; i += 32 * kMergeWarps) {
    sums[i / 8][i % 8] = partial_sums[(first_block + static_cast<i64>(i / 8) * head_blocks) * block_heads + 8 * head_tile + i % 8];
  }
  __syncthreads();
  float maximum[2] = {kLowest, kLowest};
  for (int i = 0; i < splits; ++i) {
    maximum[0] = fmaxf(maximum[0], sums[i][2 * j].x);
    maximum[1] = fmaxf(maximum[1], sums[i][2 * j + 1].x);
  }

  float sum[2] = {0.0f, 0.0f};
  float merged[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = 0; first < splits; first += kInFlight) {
    if (first > 0) fetch(part, source + first * step, step, splits - first);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i < splits) {
        const float2 even = sums[first + i][2 * j], odd = sums[first + i][2 * j + 1];
        const float factor[2] = {exp2_approx(even.x - maximum[0]), exp2_approx(odd.x - maximum[1])};
        sum[0] += factor[0] * even.y;
        sum[1] += factor[1] * odd.y;
        merged[0] += factor[0] * part[i].x;
        merged[1] += factor[1] * part[i].y;
        merged[2] += factor[0] * part[i].z;
        merged[3] += factor[1] * part[i].w;
      }
    }
  }
  const int row = head_block * block_heads + 8 * head_tile;
  const float norm[2] = {sum[0] == 0.0f ? 0.0f : 1.0f / sum[0], sum[1] == 0.0f ? 0.0f : 1.0f / sum[1]};
  if (lse != nullptr && fragment == 0 && lane < 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + 2 * j + i < heads) lse[token * lse_stride + row + 2 * j + i] = natural_lse(maximum[i], sum[i]);
    }
  }
  u8* target = out + token * out_token_stride + fragment * 16 * 2;
  if (paired_dims) {  // fp8: this lane holds dims 2c and 2c+1 of heads 2j and 2j+1
    const u32 even = pack_bf16(merged[0] * norm[0], merged[2] * norm[0]), odd = pack_bf16(merged[1] * norm[1], merged[3] * norm[1]);
    if (row + 2 * j < heads) *reinterpret_cast<u32*>(target + (row + 2 * j) * out_head_stride + 4 * c) = even;
    if (row + 2 * j + 1 < heads) *reinterpret_cast<u32*>(target + (row + 2 * j + 1) * out_head_stride + 4 * c) = odd;
  } else {  // after the transposition: dims 2j and 2j+1, then those plus 8, of head c
    const u32 lower = transpose_matrix(pack_bf16(merged[0] * norm[0], merged[1] * norm[1]));
    const u32 upper = transpose_matrix(pack_bf16(merged[2] * norm[0], merged[3] * norm[1]));
    if (row + c < heads) {
      *reinterpret_cast<u32*>(target + (row + c) * out_head_stride + 4 * j) = lower;
      *reinterpret_cast<u32*>(target + (row + c) * out_head_stride + 16 + 4 * j) = upper;
    }
  }
}
