// Joins the partial results of a split index row:
//     out = sum_i 2^(m_i - m) o_i / sum_i 2^(m_i - m) l_i       m = max_i m_i
// A warp merges one MMA fragment, 16 dims by 8 heads, in the order in which the main kernel's registers held it: every read is a
// full line, and the transposition to rows happens once, here. Where a call has few fragments, several warps share the splits of
// each, so that more multiprocessors read.
#include "softmax.cuh"

constexpr int kMaxSplits = 32;
constexpr int kMergeWarps = 4;
constexpr int kInFlight = 8;  // fragments that a lane asks for at once

// The splits first, first + step, ... of one fragment, as many as are in flight.
__device__ __forceinline__ void fetch(float4 (&part)[kInFlight], const float4* source, i64 stride, int first, int step, int splits) {
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (first + i * step < splits) part[i] = __ldcg(source + (first + i * step) * stride);
  }
}

// Grid: x = token, head block, head tile (last fastest); y = groups of kMergeWarps / sharers fragments of the 32 in a head tile.
extern "C" __global__ void __launch_bounds__(32 * kMergeWarps)
    merge_splits(const float4* partial_output, const float2* partial_sums, int splits, int sharers, int block_heads,
                 int heads, int head_blocks, int paired_dims, u8* out, i64 out_token_stride, i64 out_head_stride, float* lse,
                 i64 lse_stride) {
  __shared__ float2 factors[kMergeWarps][kMaxSplits][4];  // of the heads 2j and 2j+1
  __shared__ float4 shares[kMergeWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane / 4, j = lane % 4;
  const int head_tiles = block_heads / 8;
  const int head_tile = blockIdx.x % head_tiles;
  const int head_block = blockIdx.x / head_tiles % head_blocks;
  const int token = blockIdx.x / head_tiles / head_blocks;
  const i64 first_block = static_cast<i64>(token) * splits * head_blocks + head_block;
  const int share = warp % sharers;
  const int fragment = (blockIdx.y * kMergeWarps + warp) / sharers;  // of the 32 tiles of 16 dims
  const i64 stride = static_cast<i64>(head_blocks) * block_heads * (kLatent / 4);
  const float4* source = partial_output + first_block * block_heads * (kLatent / 4) +
                         (fragment * head_tiles + head_tile) * 32 + lane;
  const float2* sums = partial_sums + first_block * block_heads + 8 * head_tile + 2 * j;

  wait_for_prerequisites();
  float4 part[kInFlight];
  fetch(part, source, stride, share, sharers, splits);  // with the sums beside it: a merge is two latencies long, or three
  float4 pair[kMaxSplits / 8];                           // maximum and sum of both heads, splits c, c + 8, ...
  float maximum[2] = {kLowest, kLowest};
#pragma unroll
  for (int i = 0; i < kMaxSplits / 8; ++i) {
    const int split = 8 * i + c;
    pair[i] = make_float4(kLowest, 0.0f, kLowest, 0.0f);
    if (split < splits) {
      pair[i] = __ldcg(reinterpret_cast<const float4*>(sums + static_cast<i64>(split) * head_blocks * block_heads));
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
    if (8 * i < splits) {
      const float2 factor = make_float2(exp2_approx(pair[i].x - maximum[0]), exp2_approx(pair[i].z - maximum[1]));
      sum[0] += factor.x * pair[i].y;
      sum[1] += factor.y * pair[i].w;
      factors[warp][8 * i + c][j] = factor;
    }
  }
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    sum[0] += __shfl_xor_sync(kFullWarp, sum[0], lanes);
    sum[1] += __shfl_xor_sync(kFullWarp, sum[1], lanes);
  }
  __syncwarp();

  float merged[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = share; first < splits; first += kInFlight * sharers) {
    if (first > share) fetch(part, source, stride, first, sharers, splits);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * sharers < splits) {
        const float2 factor = factors[warp][first + i * sharers][j];
        merged[0] += factor.x * part[i].x;
        merged[1] += factor.y * part[i].y;
        merged[2] += factor.x * part[i].z;
        merged[3] += factor.y * part[i].w;
      }
    }
  }
  if (sharers > 1) {
    if (share > 0) shares[warp][lane] = make_float4(merged[0], merged[1], merged[2], merged[3]);
    __syncthreads();
    if (share > 0) return;
    for (int i = 1; i < sharers; ++i) add_fragment(merged, shares[warp + i][lane]);
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
