// The main kernel's arguments, and what becomes of a block's sums: two streams are joined, then rows are written, or partial
// results are left to the merge.
#pragma once
#include "partial.cuh"

struct SparseMla {
  const u8* q;            // [tokens, heads, 512] bf16; strides in bytes, multiples of 16
  i64 q_token_stride;
  i64 q_head_stride;
  const u8* kv;           // [rows, 512] bf16 or e4m3
  u32 kv_stride;          // bytes from row to row, a multiple of 16
  int rows;
  const int* indices;     // [tokens, columns]; anything outside [0, rows) is skipped
  i64 index_stride;       // elements
  int columns;
  int split_columns;      // columns of a split, a multiple of 32
  int heads;
  int head_blocks;
  float scale;            // softmax scale times log2(e)
  const float* kv_scale;  // one number, or null for 1
  u8* out;                // [tokens, heads, 512] bf16
  i64 out_token_stride;
  i64 out_head_stride;
  float* lse;             // [tokens, heads] or null
  i64 lse_stride;         // elements
  uint4* partial_outputs;  // with more than one split, as partial.cuh has it
  float2* partial_sums;
};

// Writes this warp's quarter of the outcome as final rows. `norm` is 1 / sum, or 0 for an empty row.
template <class S>
__device__ __forceinline__ void write_rows(u8* stage, const SparseMla& a, const Quarter<S>& o, float (&norm)[S::kHeadTiles][2],
                                           float kv_scale, int token, int head_block, int quarter) {
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    norm[n][0] *= kv_scale;
    norm[n][1] *= kv_scale;
  }
  constexpr int kUnitsOfQuarter = kQuarterDims / kUnitDims;
  static_assert(S::kHeadTiles * kUnitsOfQuarter * kUnitBytes <= S::kQueryBytes, "rows where Q was staged");
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
    for (int unit = 0; unit < kUnitsOfQuarter; ++unit) {
      u32 pairs[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float(&f)[4] = o[2 * unit + i][n];
        pairs[i][0] = pack_bf16(f[0] * norm[n][0], f[1] * norm[n][1]);
        pairs[i][1] = pack_bf16(f[2] * norm[n][0], f[3] * norm[n][1]);
      }
      stage_unit<S::kFp8>(stage + (n * kUnitsOfQuarter + unit) * kUnitBytes, pairs);
    }
  }
  __syncwarp();
  const int lane = threadIdx.x % 32, first_head = head_block * S::kHeads + lane / 4;
  u8* out = a.out + token * a.out_token_stride + first_head * a.out_head_stride + quarter * kQuarterDims * 2 + 16 * (lane % 4);
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
    for (int unit = 0; unit < kUnitsOfQuarter; ++unit) {
      const uint4 row = unit_row(stage + (n * kUnitsOfQuarter + unit) * kUnitBytes);
      if (first_head + 8 * n < a.heads) *reinterpret_cast<uint4*>(out + 8 * n * a.out_head_stride + unit * kUnitDims * 2) = row;
    }
  }
}

// Log-sum-exps of two heads of a token, where they are asked for.
template <class S>
__device__ __forceinline__ void write_lse(const SparseMla& a, int token, int head, const float (&maximum)[2], const float (&sum)[2]) {
  if (a.lse == nullptr) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (head + i < a.heads) a.lse[token * a.lse_stride + head + i] = natural_lse(maximum[i], sum[i]);
  }
}

// What a block leaves to the merge: its outputs, and its maxima and sums.
struct Partial {
  uint4* outputs;
  float2* sums;
  template <class S>
  __device__ __forceinline__ static Partial of(const SparseMla& a, int token, int head_block) {
    const i64 block = static_cast<i64>((token * gridDim.y + blockIdx.y) * a.head_blocks + head_block);
    return {a.partial_outputs + block * outputs_of_block(S::kHeads), a.partial_sums + block * sums_of_block(S::kHeads)};
  }
  // Where a split without a live row leaves that it is one.
  template <class S>
  __device__ __forceinline__ void leave_nothing() const {
    const float none[2] = {kLowest, kLowest}, zeros[2] = {0.0f, 0.0f};
    const int lane = threadIdx.x % 32;
    if (lane < S::kHeads / 2) leave_sums(2 * lane, none, zeros);
  }
  // Of two heads, the first one even.
  __device__ __forceinline__ void leave_sums(int head, const float (&maximum)[2], const float (&sum)[2]) const {
    *reinterpret_cast<float4*>(sums + head) = make_float4(maximum[0], sum[0], maximum[1], sum[1]);
  }
};

// Leaves this warp's quarter of the outcome to the merge.
template <class S>
__device__ __forceinline__ void leave_quarter(const Partial& partial, const Quarter<S>& o, const float (&norm)[S::kHeadTiles][2],
                                              float kv_scale, int quarter) {
  const int lane = threadIdx.x % 32;
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_head = 0.0f;
#pragma unroll
      for (int d = 0; d < kQuarterTiles; ++d) of_head = fmaxf(of_head, fmaxf(fabsf(o[d][n][i]), fabsf(o[d][n][i + 2])));
      largest = fmaxf(largest, of_head * norm[n][i]);
    }
  }
  const u32 exponent = half_exponent(largest_of_warp(__float_as_uint(largest)));
  const float factor = half_factor(exponent);
  uint4* outputs = partial.outputs + quarter * (kQuarterTiles / 2 * S::kHeadTiles * 32) + lane;
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    const float first = norm[n][0] * factor, second = norm[n][1] * factor;
#pragma unroll
    for (int d = 0; d < kQuarterTiles; d += 2) {
      outputs[(d / 2 * S::kHeadTiles + n) * 32] =
          make_uint4(pack_f16(o[d][n][0] * first, o[d][n][1] * second), pack_f16(o[d][n][2] * first, o[d][n][3] * second),
                     pack_f16(o[d + 1][n][0] * first, o[d + 1][n][1] * second), pack_f16(o[d + 1][n][2] * first, o[d + 1][n][3] * second));
    }
  }
  if (lane == 0) reinterpret_cast<float*>(partial.sums + S::kHeads)[quarter] = half_inverse_factor(exponent) * kv_scale;
}

// Two streams have summed different rows of the same heads and dims. Each hands one half of its dims to the other and keeps the
// rest: `Kept` is the half.
template <class S, int Kept>
__device__ __forceinline__ void give_half(float4* given, const Output<S>& o, Quarter<S>& kept) {
#pragma unroll
  for (int d = 0; d < kQuarterTiles; ++d) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      const float(&away)[4] = o[(1 - Kept) * kQuarterTiles + d][n];
      given[(d * S::kHeadTiles + n) * 32] = make_float4(away[0], away[1], away[2], away[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[d][n][i] = o[Kept * kQuarterTiles + d][n][i];
    }
  }
}

// Leaves in `quarter` the output over both streams, and in `running` their common maxima and sums.
template <class S>
__device__ __forceinline__ void join_streams(Shared<S>& sm, const Place<S>& place, const Output<S>& o, Quarter<S>& quarter,
                                             Running<S::kHeadTiles>& running) {
  const int lane = threadIdx.x % 32;
  if (lane < 4 && place.slice == 0) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sm.sums[place.stream][8 * n + 2 * lane + i] = make_float2(running.maximum[n][i], running.sum[n][i]);
      }
    }
  }
  float4* given = reinterpret_cast<float4*>(sm.tiles[place.stream * S::kSlices + place.slice]) + lane;
  const float4* taken = reinterpret_cast<const float4*>(sm.tiles[(1 - place.stream) * S::kSlices + place.slice]) + lane;
  if (place.stream == 0) {
    give_half<S, 0>(given, o, quarter);
  } else {
    give_half<S, 1>(given, o, quarter);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    float own[2], other[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 8 * n + 2 * (lane % 4) + i;
      const float2 first = sm.sums[0][head], second = sm.sums[1][head];
      const float maximum = fmaxf(first.x, second.x);
      const float factors[2] = {exp2_approx(first.x - maximum), exp2_approx(second.x - maximum)};
      running.sum[n][i] = factors[0] * first.y + factors[1] * second.y;
      running.maximum[n][i] = maximum;
      own[i] = place.stream == 0 ? factors[0] : factors[1];
      other[i] = place.stream == 0 ? factors[1] : factors[0];
    }
#pragma unroll
    for (int d = 0; d < kQuarterTiles; ++d) {
      const float4 part = taken[(d * S::kHeadTiles + n) * 32];
      quarter[d][n][0] = quarter[d][n][0] * own[0] + part.x * other[0];
      quarter[d][n][1] = quarter[d][n][1] * own[1] + part.y * other[1];
      quarter[d][n][2] = quarter[d][n][2] * own[0] + part.z * other[0];
      quarter[d][n][3] = quarter[d][n][3] * own[1] + part.w * other[1];
    }
  }
  if (gridDim.y == 1) __syncthreads();  // what was taken makes room for the staging of rows
}
