// From partial scores to weights. Scores are in units of log2 after the folded scale.
//
// The running maximum is stale on purpose: it follows a score only when a weight relative to it would exceed a limit, so that the
// output is rescaled a few times a row instead of at every small step. The limit is 2 for the first tiles and 256 later. With 256
// throughout, the largest weights of a short row, exact when they are 1, were rounded like the others, and one row in ten
// thousand missed a cosine of 0.999995; in a long row no single weight counts for so much.
//
// It starts at a finite number, and a masked row gets weight 0 from the mask, never from the difference of two sentinels: an
// all-masked row gives exact zeros, not NaN.
#pragma once
#include "operands.cuh"

constexpr float kLowest = -1e30f;
constexpr int kFirstTiles = 32;

__device__ __forceinline__ float weight_limit(int tile) { return tile < kFirstTiles ? 2.0f : 256.0f; }

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

// One fragment summed over the slices, always in the same order.
template <class S>
__device__ __forceinline__ void sum_fragment(float (&s)[4], const Shared<S>& sm, int buffer, int r, int n) {
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
  s[0] = sum.x;
  s[1] = sum.y;
  s[2] = sum.z;
  s[3] = sum.w;
}

template <class S>
__device__ __forceinline__ void sum_scores(Scores<S>& s, const Shared<S>& sm, int buffer) {
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) sum_fragment(s[r][n], sm, buffer, r, n);
  }
}

// Whether the two rows of this lane's fragment r are live.
struct LiveRows {
  bool upper, lower;
  __device__ __forceinline__ LiveRows(u32 live, int r) {
    const u32 rows = live >> (16 * r + threadIdx.x % 32 / 4);
    upper = rows & 1;
    lower = rows & 256;
  }
  __device__ __forceinline__ bool operator[](int i) const { return i < 2 ? upper : lower; }
};

// Weights relative to the running maximum, of the fragments [row tile][head tile]. Scale and difference in one rounding: near the
// maximum the difference stays exact even where the scores are tens of thousands. Returns the largest.
template <int HeadTiles, int RowTiles>
__device__ __forceinline__ float exponentiate(float (&w)[RowTiles][HeadTiles][4], const Running<HeadTiles>& running,
                                              const float (&scale)[HeadTiles][2], const float (&s)[RowTiles][HeadTiles][4],
                                              u32 live) {
  float largest = 0.0f;
#pragma unroll
  for (int r = 0; r < RowTiles; ++r) {
    const LiveRows rows(live, r);
#pragma unroll
    for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[r][n][i] = rows[i] ? exp2_approx(fmaf(s[r][n][i], scale[n][i % 2], -running.maximum[n][i % 2])) : 0.0f;
        largest = fmaxf(largest, w[r][n][i]);
      }
    }
  }
  return largest;
}

// Raises the maxima to those of this tile and returns the factors for what has been summed so far.
template <int HeadTiles, int RowTiles>
__device__ __forceinline__ void raise_maxima(Running<HeadTiles>& running, const float (&scale)[HeadTiles][2],
                                             const float (&s)[RowTiles][HeadTiles][4], u32 live, float (&factor)[HeadTiles][2]) {
#pragma unroll
  for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float highest = running.maximum[n][i];
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        const LiveRows rows(live, r);
        if (rows.upper) highest = fmaxf(highest, s[r][n][i] * scale[n][i]);
        if (rows.lower) highest = fmaxf(highest, s[r][n][i + 2] * scale[n][i]);
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, lanes));
      factor[n][i] = exp2_approx(running.maximum[n][i] - highest);
      running.maximum[n][i] = highest;
      running.sum[n][i] *= factor[n][i];
    }
  }
}

// Adds the weights of one fragment to the running sums and turns them into the B operand of the second product.
template <class S, int HeadTiles>
__device__ __forceinline__ uint2 take_weights(const float (&w)[4], Running<HeadTiles>& running, int n) {
  running.sum[n][0] += w[0] + w[2];
  running.sum[n][1] += w[1] + w[3];
  const u32 upper = S::kFp8 ? pack_f16(w[0], w[1]) : pack_bf16(w[0], w[1]);
  const u32 lower = S::kFp8 ? pack_f16(w[2], w[3]) : pack_bf16(w[2], w[3]);
  return make_uint2(transpose_matrix(upper), transpose_matrix(lower));
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
__device__ __forceinline__ void weigh_all(const Scores<S>& s, const float (&scale)[S::kHeadTiles][2], u32 live, float limit,
                                          Running<S::kHeadTiles>& running, Output<S>& o, Weights<S>& p) {
  Scores<S> w;
  // Weights first, in the hope that the maxima stand: the vote then costs no time of its own.
  const float largest = exponentiate(w, running, scale, s, live);
  if (__any_sync(kFullWarp, largest > limit)) {
    float factor[S::kHeadTiles][2];
    raise_maxima(running, scale, s, live, factor);
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) rescale_output<S>(o, n, factor[n][0], factor[n][1]);
    exponentiate(w, running, scale, s, live);
  }
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      const uint2 pair = take_weights<S>(w[r][n], running, n);
      p[r][n][0] = pair.x;
      p[r][n][1] = pair.y;
    }
  }
}

// The warp of slice i finishes head tile i of its group and leaves weights and decision in shared memory.
template <class S>
__device__ __forceinline__ void weigh_own(Shared<S>& sm, int slice, int group, const float (&scale)[1][2], u32 live, float limit,
                                          Running<1>& running) {
  const int lane = threadIdx.x % 32;
  float s[S::kRowTiles][1][4], w[S::kRowTiles][1][4];
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) sum_fragment(s[r][0], sm, group, r, slice);
  const bool grown = __any_sync(kFullWarp, exponentiate(w, running, scale, s, live) > limit);
  if (grown) {
    float factor[1][2];
    raise_maxima(running, scale, s, live, factor);
    if (lane < 4) {
      float* rescale = &sm.rescale[group * S::kGroupHeads + 8 * slice + 2 * lane];
      rescale[0] = factor[0][0];
      rescale[1] = factor[0][1];
    }
    exponentiate(w, running, scale, s, live);
  }
  if (lane == 0) sm.grown[group][slice] = grown;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
    const uint2 pair = take_weights<S>(w[r][0], running, 0);
    reinterpret_cast<uint2*>(&sm.weights[group][r][slice / 2][lane])[slice % 2] = pair;
  }
}

// What the owners left, after a barrier.
template <class S>
__device__ __forceinline__ void collect_weights(const Shared<S>& sm, int group, Output<S>& o, Weights<S>& p) {
  const int lane = threadIdx.x % 32;
  const int4 grown = *reinterpret_cast<const int4*>(sm.grown[group]);
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; n += 2) {
      const uint4 pairs = sm.weights[group][r][n / 2][lane];
      p[r][n][0] = pairs.x;
      p[r][n][1] = pairs.y;
      p[r][n + 1][0] = pairs.z;
      p[r][n + 1][1] = pairs.w;
    }
  }
  if (grown.x | grown.y | grown.z | grown.w) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      if (sm.grown[group][n]) {
        const float* rescale = &sm.rescale[group * S::kGroupHeads + 8 * n + 2 * (lane % 4)];
        rescale_output<S>(o, n, rescale[0], rescale[1]);
      }
    }
  }
}
