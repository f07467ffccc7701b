// From partial scores to weights. Scores are in units of log2 after the folded scale.
//
// The running maximum is stale on purpose: it follows a score only when a weight relative to it would exceed a limit, so that the
// output is rescaled a few times a row instead of at every small step. The limit is 256, and 2 for bf16 weights of short rows:
// with 256 their largest weights, exact when they are 1, were rounded like the others, and one short row in ten thousand missed a
// cosine of 0.999995. In a long row no single weight counts for so much, and f16 weights have three bits more.
//
// It starts at a finite number, and a masked row gets weight 0 from the mask, never from the difference of two sentinels: an
// all-masked row gives exact zeros, not NaN.
#pragma once
#include "operands.cuh"

constexpr float kLowest = -1e30f;
constexpr int kShortRow = 512;  // latent rows in the tiles of a block

template <class S>
__device__ __forceinline__ float weight_limit(int rows) {
  return S::kFp8 || rows >= kShortRow ? 256.0f : 2.0f;
}

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

__device__ __forceinline__ void add_fragment(float (&s)[4], const float4& part) {
  s[0] += part.x;
  s[1] += part.y;
  s[2] += part.z;
  s[3] += part.w;
}

// Replicated: this warp's partial scores for the other slice of its stream, in one of its buffers.
template <class S>
__device__ __forceinline__ void publish_scores(Shared<S>& sm, const Scores<S>& s, int buffer, const Place<S>& place) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      sm.partial[0][buffer][place.stream][place.slice][r][n][lane] = make_float4(s[r][n][0], s[r][n][1], s[r][n][2], s[r][n][3]);
    }
  }
}

// Replicated: the scores over both slices. A sum of two has the same bits in either order, so both warps go on alike.
template <class S>
__device__ __forceinline__ void add_partner(Scores<S>& s, const Shared<S>& sm, int buffer, const Place<S>& place) {
  static_assert(S::kSlices == 2, "with more slices the order of the sum matters");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) add_fragment(s[r][n], sm.partial[0][buffer][place.stream][1 - place.slice][r][n][lane]);
  }
}

// The same for one stream of four slices, which each warp sums in the same order.
template <class S>
__device__ __forceinline__ void add_slices(Scores<S>& s, const Shared<S>& sm, int buffer) {
  static_assert(S::kSlices == 4, "two pairs");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; ++n) {
      float4 parts[4];
#pragma unroll
      for (int slice = 0; slice < 4; ++slice) parts[slice] = sm.partial[0][buffer][0][slice][r][n][lane];
      s[r][n][0] = (parts[0].x + parts[1].x) + (parts[2].x + parts[3].x);
      s[r][n][1] = (parts[0].y + parts[1].y) + (parts[2].y + parts[3].y);
      s[r][n][2] = (parts[0].z + parts[1].z) + (parts[2].z + parts[3].z);
      s[r][n][3] = (parts[0].w + parts[1].w) + (parts[2].w + parts[3].w);
    }
  }
}

// Not replicated: this warp's partial scores of one row tile, each head tile to its owner. Its own one, number 0, stays.
template <class S>
__device__ __forceinline__ void deal_scores(Shared<S>& sm, const float (&s)[S::kHeadTiles][4], int r, const Place<S>& place) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 1; n < S::kHeadTiles; ++n) {
    sm.partial[place.group][0][0][place.head_tile(n)][r][n - 1][lane] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
  }
}

// Not replicated: the scores of the head tile that this warp owns, from its own partial ones and those dealt to it.
template <class S>
__device__ __forceinline__ void add_dealt(float (&s)[S::kRowTiles][1][4], const Shared<S>& sm, const Place<S>& place) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < S::kPartialTiles; ++i) add_fragment(s[r][0], sm.partial[place.group][0][0][place.slice][r][i][lane]);
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

template <int HeadTiles>
__device__ __forceinline__ void add_weights(Running<HeadTiles>& running, int n, const float (&w)[4]) {
  running.sum[n][0] += w[0] + w[2];
  running.sum[n][1] += w[1] + w[3];
}

// Weights of one fragment, rounded: the upper eight rows and the lower. Transposed they are the B operand of the second product.
template <class S>
__device__ __forceinline__ uint2 pack_weights(const float (&w)[4]) {
  return S::kFp8 ? make_uint2(pack_f16(w[0], w[1]), pack_f16(w[2], w[3])) : make_uint2(pack_bf16(w[0], w[1]), pack_bf16(w[2], w[3]));
}

template <class S>
__device__ __forceinline__ void rescale_output(Output<S>& o, int n, float first, float second) {
#pragma unroll
  for (int d = 0; d < S::kDimTiles; ++d) {
    o[d][n][0] *= first;
    o[d][n][1] *= second;
    o[d][n][2] *= first;
    o[d][n][3] *= second;
  }
}

// Every warp finishes all scores: the same sums in the same order, so all warps decide alike and nothing has to be told. Counts the
// weights, rounds them and turns them into operands of the second product.
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
      add_weights(running, n, w[r][n]);
      const uint2 pair = pack_weights<S>(w[r][n]);
      p[r][n][0] = transpose_matrix(pair.x);
      p[r][n][1] = transpose_matrix(pair.y);
    }
  }
}

template <class S>
__device__ __forceinline__ void leave_weights(Shared<S>& sm, const float (&w)[S::kRowTiles][1][4], const Place<S>& place) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
    const uint2 pair = pack_weights<S>(w[r][0]);
    sm.weights[place.group][r][place.slice][0][lane] = pair.x;
    sm.weights[place.group][r][place.slice][1][lane] = pair.y;
  }
}

// Not replicated: a warp leaves the weights of the head tile that it owns, and what it decided, to all. The weights are left
// before the vote on the maxima: they stand but for a few tiles of a row, and then they are left again.
template <class S>
__device__ __forceinline__ void weigh_own(Shared<S>& sm, const float (&s)[S::kRowTiles][1][4], const Place<S>& place,
                                          const float (&scale)[1][2], u32 live, float limit, Running<1>& running) {
  const int lane = threadIdx.x % 32;
  float w[S::kRowTiles][1][4];
  const float largest = exponentiate(w, running, scale, s, live);
  leave_weights(sm, w, place);
  const bool grown = __any_sync(kFullWarp, largest > limit);
  if (grown) {
    float factor[1][2];
    raise_maxima(running, scale, s, live, factor);
    if (lane < 4) {
      float* rescale = &sm.rescale[place.group][8 * place.slice + 2 * lane];
      rescale[0] = factor[0][0];
      rescale[1] = factor[0][1];
    }
    exponentiate(w, running, scale, s, live);
    leave_weights(sm, w, place);
  }
  if (lane == 0) sm.grown[place.group][place.slice] = grown;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) add_weights(running, 0, w[r][0]);
}

// The weights that the owners left, after a barrier; transposed on the way.
template <class S>
__device__ __forceinline__ void collect_weights(const Shared<S>& sm, Weights<S>& p, const Place<S>& place) {
  const u32 matrices = shared_address(sm.weights[place.group]) + 16 * (threadIdx.x % 32);
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < S::kHeadTiles; n += 2) {
      u32 two[4];
      load_matrices_transposed(two, matrices + (r * S::kHeadTiles + n) * 256);
      p[r][n][0] = two[0];
      p[r][n][1] = two[1];
      p[r][n + 1][0] = two[2];
      p[r][n + 1][1] = two[3];
    }
  }
}

// Owners that have raised their maxima have left the factors for what has been summed so far.
template <class S>
__device__ __forceinline__ void follow_maxima(const Shared<S>& sm, Output<S>& o, const Place<S>& place) {
  const int4 flags = *reinterpret_cast<const int4*>(sm.grown[place.group]);
  const int grown[4] = {flags.x, flags.y, flags.z, flags.w};
  if ((flags.x | flags.y | flags.z | flags.w) == 0) return;
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    if (grown[n]) {
      const float* rescale = &sm.rescale[place.group][8 * n + 2 * (threadIdx.x % 4)];
      rescale_output<S>(o, n, rescale[0], rescale[1]);
    }
  }
}
