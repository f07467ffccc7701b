// From partial scores to weights. Scores are in units of log2 after the folded scale.
//
// The running maximum is stale on purpose: it follows a score only when that exceeds it by more than 8, so that a weight is at
// most 256 and the output is rescaled a few times a row instead of once a tile. It starts at a finite number, and a masked row
// gets weight 0 from the mask, never from the difference of two sentinels: an all-masked row gives exact zeros, not NaN.
#pragma once
#include "operands.cuh"

constexpr float kLowest = -1e30f;
constexpr float kSlack = 8.0f;

// Log-sum-exp of an index row from its maximum, in units of log2, and the sum of its weights.
__device__ __forceinline__ float natural_lse(float maximum, float sum) {
  return sum == 0.0f ? -__int_as_float(0x7f800000) : 0.6931471805599453f * (maximum + log2f(sum));
}

// Of the two heads per n8 tile that this lane sees: columns 2j and 2j+1 of a fragment.
template <int HeadTiles>
struct Running {
  float maximum[HeadTiles][2];
  float sum[HeadTiles][2];  // of this lane's rows only, until the end

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int n = 0; n < HeadTiles; ++n) {
      maximum[n][0] = maximum[n][1] = kLowest;
      sum[n][0] = sum[n][1] = 0.0f;
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum[n][i] += __shfl_xor_sync(kFullWarp, sum[n][i], lanes);
      }
    }
  }
};

template <class S>
__device__ __forceinline__ void publish_scores(Shared<S>& sm, const Scores<S>& s, int buffer, int slice) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      sm.partial[buffer][slice][r][n][lane] = make_float4(s[r][n][0], s[r][n][1], s[r][n][2], s[r][n][3]);
    }
  }
}

// One fragment summed over the slices, always in the same order, scaled and masked.
template <class S>
__device__ __forceinline__ void sum_scores(float (&s)[4], const Shared<S>& sm, int buffer, int r, int n, const float (&scale)[2],
                                           u32 live) {
  const int lane = threadIdx.x % 32;
  float4 sum = sm.partial[buffer][0][r][n][lane];
#pragma unroll
  for (int slice = 1; slice < kSlices; ++slice) {
    const float4 part = sm.partial[buffer][slice][r][n][lane];
    sum.x += part.x;
    sum.y += part.y;
    sum.z += part.z;
    sum.w += part.w;
  }
  const u32 rows = live >> (16 * r + lane / 4);
  s[0] = rows & 1 ? sum.x * scale[0] : kLowest;
  s[1] = rows & 1 ? sum.y * scale[1] : kLowest;
  s[2] = rows & 256 ? sum.z * scale[0] : kLowest;
  s[3] = rows & 256 ? sum.w * scale[1] : kLowest;
}

// Raises the maxima to those of this tile and returns the factors for what has been summed so far.
template <int HeadTiles, int RowTiles>
__device__ __forceinline__ void raise_maxima(Running<HeadTiles>& running, const float (&s)[RowTiles][HeadTiles][4],
                                             float (&factor)[HeadTiles][2]) {
#pragma unroll
  for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float highest = running.maximum[n][i];
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) highest = fmaxf(highest, fmaxf(s[r][n][i], s[r][n][i + 2]));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, lanes));
      factor[n][i] = exp2_approx(running.maximum[n][i] - highest);
      running.maximum[n][i] = highest;
      running.sum[n][i] *= factor[n][i];
    }
  }
}

template <int HeadTiles, int RowTiles>
__device__ __forceinline__ bool outgrown(const Running<HeadTiles>& running, const float (&s)[RowTiles][HeadTiles][4]) {
  bool grown = false;
#pragma unroll
  for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) grown |= s[r][n][i] > running.maximum[n][i % 2] + kSlack;
    }
  }
  return __any_sync(kFullWarp, grown);
}

// Weights of one fragment, added to the running sums and turned into the B operand of the second product.
template <class S, int HeadTiles>
__device__ __forceinline__ uint2 weigh(const float (&s)[4], Running<HeadTiles>& running, int n, int r, u32 live) {
  const u32 rows = live >> (16 * r + threadIdx.x % 32 / 4);
  const float w0 = rows & 1 ? exp2_approx(s[0] - running.maximum[n][0]) : 0.0f;
  const float w1 = rows & 1 ? exp2_approx(s[1] - running.maximum[n][1]) : 0.0f;
  const float w2 = rows & 256 ? exp2_approx(s[2] - running.maximum[n][0]) : 0.0f;
  const float w3 = rows & 256 ? exp2_approx(s[3] - running.maximum[n][1]) : 0.0f;
  running.sum[n][0] += w0 + w2;
  running.sum[n][1] += w1 + w3;
  const u32 lower = S::kFp8 ? pack_f16(w0, w1) : pack_bf16(w0, w1);
  const u32 upper = S::kFp8 ? pack_f16(w2, w3) : pack_bf16(w2, w3);
  return make_uint2(transpose_matrix(lower), transpose_matrix(upper));
}

template <class S>
__device__ __forceinline__ void rescale_output(Output<S>& o, int n, float first, float second) {
#pragma unroll
  for (int d = 0; d < kDimTiles; ++d) {
    o[d][n][0] *= first;
    o[d][n][1] *= second;
    o[d][n][2] *= first;
    o[d][n][3] *= second;
  }
}

// Every warp finishes all scores: the same sums in the same order, so all warps decide alike and nothing has to be told.
template <class S>
__device__ __forceinline__ void weigh_all(const Shared<S>& sm, int buffer, const float (&scale)[S::kHeadTiles][2], u32 live,
                                          Running<S::kHeadTiles>& running, Output<S>& o, Weights<S>& p) {
  Scores<S> s;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) sum_scores(s[r][n], sm, buffer, r, n, scale[n], live);
  }
  if (outgrown(running, s)) {
    float factor[S::kHeadTiles][2];
    raise_maxima(running, s, factor);
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) rescale_output<S>(o, n, factor[n][0], factor[n][1]);
  }
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      const uint2 pair = weigh<S>(s[r][n], running, n, r, live);
      p[r][n][0] = pair.x;
      p[r][n][1] = pair.y;
    }
  }
}

// The warp of slice i finishes head tile i of its group and leaves weights and decision in shared memory.
template <class S>
__device__ __forceinline__ void weigh_own(Shared<S>& sm, int slice, int group, const float (&scale)[2], u32 live,
                                          Running<1>& running) {
  const int lane = threadIdx.x % 32;
  float s[S::kRowTiles][1][4];
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) sum_scores(s[r][0], sm, group, r, slice, scale, live);
  const bool grown = outgrown(running, s);
  if (grown) {
    float factor[1][2];
    raise_maxima(running, s, factor);
    if (lane < 4) {
      float* rescale = &sm.rescale[group * S::kGroupHeads + 8 * slice + 2 * lane];
      rescale[0] = factor[0][0];
      rescale[1] = factor[0][1];
    }
  }
  if (lane == 0) sm.grown[group][slice] = grown;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) sm.weights[group][r][slice][lane] = weigh<S>(s[r][0], running, 0, r, live);
}

// What the owners left, after a barrier.
template <class S>
__device__ __forceinline__ void collect_weights(const Shared<S>& sm, int group, Output<S>& o, Weights<S>& p) {
  const int lane = threadIdx.x % 32;
  const int4 grown = *reinterpret_cast<const int4*>(sm.grown[group]);
  if (grown.x | grown.y | grown.z | grown.w) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      if (sm.grown[group][n]) {
        const float* rescale = &sm.rescale[group * S::kGroupHeads + 8 * n + 2 * (lane % 4)];
        rescale_output<S>(o, n, rescale[0], rescale[1]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      const uint2 pair = sm.weights[group][r][n][lane];
      p[r][n][0] = pair.x;
      p[r][n][1] = pair.y;
    }
  }
}
