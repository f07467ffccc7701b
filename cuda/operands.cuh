// The two matrix products of a tile, heads on the N side of the MMA:
//     S^T [rows, heads] = K [rows, dims] Q^T [dims, heads]        O^T [dims, heads] += V^T [dims, rows] P^T [rows, heads]
// With 8 heads on N nothing is padded, Q stays in registers for the whole block, and the tile in shared memory is the A operand
// of both products: K through ldmatrix, V^T through its transposing form.
//
// bf16 rows are multiplied in bf16. e4m3 rows become f16, exactly, as the fragment is loaded; Q goes to f16 with a power of two
// per head that brings its largest element near the top of f16's range.
#pragma once
#include "rows.cuh"

template <class S>
using Query = u32[S::kDimTiles][S::kHeadTiles][2];
template <class S>
using Scores = float[S::kRowTiles][S::kHeadTiles][4];
template <class S>
using Weights = u32[S::kRowTiles][S::kHeadTiles][2];
template <class S>
using Output = float[S::kDimTiles][S::kHeadTiles][4];
template <class S>
using Quarter = float[kQuarterTiles][S::kHeadTiles][4];

// --- scaling to f16 -----------------------------------------------------------------------------------------------------------

// Numbers times half_factor of the exponent field of the largest of them, given as its bits: that one lies in [2^14, 2^15), and
// every bf16 down to 2^-29 of it is exact in f16. The field is at least 15, so that factor and inverse are normal numbers.
__device__ __forceinline__ u32 half_exponent(u32 largest) { return max(largest >> 23, 15u); }
__device__ __forceinline__ float half_factor(u32 exponent) { return __uint_as_float((268u - exponent) << 23); }
__device__ __forceinline__ float half_inverse_factor(u32 exponent) { return __uint_as_float((exponent - 14u) << 23); }

// --- Q -----------------------------------------------------------------------------------------------------------------------

// B fragments of Q^T from the staging area, still bf16. Element pairs of the fp8 kernel follow the bytes of an e4m3 fragment:
// lane j of four holds dims 4j to 4j+3 of a k16 step as k = 2j, 2j+1, 2j+8, 2j+9. The order of k is free as long as both
// operands agree, and this one needs no shuffle of bytes.
template <class S>
__device__ __forceinline__ void load_query(Query<S>& q, const u8* stage, const Place<S>& place) {
  constexpr int kRowBytes = S::kSliceDims * 2;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    const int first = 8 * place.head_tile(n);
    if constexpr (S::kFp8) {
#pragma unroll
      for (int k = 0; k < S::kDimTiles; ++k) {
        const int head = first + lane / 4, j = lane % 4;
        const uint2 pairs = *reinterpret_cast<const uint2*>(stage + swizzled(head, 2 * k + j / 2, kRowBytes) + 8 * (j % 2));
        q[k][n][0] = pairs.x;
        q[k][n][1] = pairs.y;
      }
    } else if constexpr (!S::kReplicated) {  // of two head tiles, so that those of a step lie side by side
      if (n % 2 == 1) continue;
      const int head = 8 * place.head_tile(n + lane / 16) + lane % 8;
#pragma unroll
      for (int k = 0; k < S::kDimTiles; ++k) {
        u32 fragment[4];
        load_matrices(fragment, shared_address(stage) + swizzled(head, 2 * k + lane / 8 % 2, kRowBytes));
        q[k][n][0] = fragment[0];
        q[k][n][1] = fragment[1];
        q[k][n + 1][0] = fragment[2];
        q[k][n + 1][1] = fragment[3];
      }
    } else {
#pragma unroll
      for (int k = 0; k < S::kDimTiles; k += 2) {
        u32 fragment[4];
        load_matrices(fragment, shared_address(stage) + swizzled(first + lane % 8, 2 * k + lane / 8, kRowBytes));
        q[k][n][0] = fragment[0];
        q[k][n][1] = fragment[1];
        q[k + 1][n][0] = fragment[2];
        q[k + 1][n][1] = fragment[3];
      }
    }
  }
}

// The largest magnitude of the head that this lane has part of, n8 tile `n`, over `Steps` steps of dims, as bits: those of numbers
// without a sign order like the numbers.
template <class S, int Steps>
__device__ __forceinline__ u32 largest_of_query(const Query<S>& q, int n, int first) {
  u32 pairs[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < Steps; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) pairs[i] = larger_bf16(pairs[i], q[first + k][n][i] & 0x7fff7fffu);
  }
  const u32 pair = larger_bf16(pairs[0], pairs[1]);
  return max(pair << 16, pair & 0xffff0000u);
}

// The same over the lanes that share the head.
__device__ __forceinline__ u32 largest_of_four(u32 largest) {
  largest = max(largest, __shfl_xor_sync(kFullWarp, largest, 1));
  return max(largest, __shfl_xor_sync(kFullWarp, largest, 2));
}

// From bf16 to f16, times a factor.
template <class S>
__device__ __forceinline__ void scale_query(Query<S>& q, int n, float factor) {
#pragma unroll
  for (int k = 0; k < S::kDimTiles; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) q[k][n][i] = pack_f16(low_bf16(q[k][n][i]) * factor, high_bf16(q[k][n][i]) * factor);
  }
}

// fp8 only: the largest magnitude of each head over this warp's slice, or where streams have the same Q, its part of it.
template <class S>
__device__ __forceinline__ void publish_query_max(Shared<S>& sm, const Query<S>& q, const Place<S>& place) {
  constexpr int kSteps = S::kDimTiles / S::kStreams;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    const u32 largest = largest_of_four(place.stream == 0 ? largest_of_query<S, kSteps>(q, n, 0)
                                                          : largest_of_query<S, kSteps>(q, n, kSteps * (S::kStreams - 1)));
    const int head = 8 * place.head_tile(n) + lane / 4;
    if (lane % 4 == 0) sm.query_max(place.slice * S::kStreams + place.stream)[head] = largest;
  }
}

// Exponent field of the largest magnitude of a head.
template <class S>
__device__ __forceinline__ u32 query_exponent(Shared<S>& sm, int head) {
  u32 largest = 0;
#pragma unroll
  for (int part = 0; part < S::kSlices * S::kStreams; ++part) largest = max(largest, sm.query_max(part)[head]);
  return half_exponent(largest);
}

// fp8 only: Q from bf16 to scaled f16, in place.
template <class S>
__device__ __forceinline__ void convert_query(Shared<S>& sm, Query<S>& q, const Place<S>& place) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    const int head = 8 * place.head_tile(n) + lane / 4;
    scale_query<S>(q, n, half_factor(query_exponent(sm, head)));
  }
}

// The same by each warp alone: its part of Q gets a factor of its own, and its partial scores want `inverse` of their two heads
// before they meet those of others.
template <class S>
__device__ __forceinline__ void convert_own_query(Query<S>& q, float (&inverse)[S::kHeadTiles][2]) {
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
    const u32 exponent = half_exponent(largest_of_four(largest_of_query<S, S::kDimTiles>(q, n, 0)));
    scale_query<S>(q, n, half_factor(exponent));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int lane_of_head = 4 * (2 * (threadIdx.x % 4) + i);
      inverse[n][i] = half_inverse_factor(__shfl_sync(kFullWarp, exponent, lane_of_head));
    }
  }
}

// --- products ----------------------------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (S::kFp8) {
    mma_f16(c, a, b[0], b[1]);
  } else {
    mma_bf16(c, a, b[0], b[1]);
  }
}

// A single accumulator is a chain of dependent MMAs. Where there are few of them side by side, more sets shorten the chain; from
// four on they only cost registers.
template <class S>
constexpr int kSets = S::kHeadTiles * S::kRowTiles >= 4 ? 1 : 4 / (S::kHeadTiles * S::kRowTiles);
template <class S>
using ScoreSets = float[kSets<S>][S::kHeadTiles][4];  // of one row tile

// Where a lane finds its row of a fragment within a piece, of K (and of e4m3 V) and of V.
__device__ __forceinline__ u32 keys_lane() { return swizzled(threadIdx.x % 16, threadIdx.x % 32 / 16, kPieceRowBytes); }
__device__ __forceinline__ u32 values_lane() {
  const int lane = threadIdx.x % 32;
  return swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2, kPieceRowBytes);
}

// Adds piece `number`, `offset` from the start of the ring, to the partial scores of row tile `r`. `lane_row` is the lane's row in
// the first piece: offsets are added to the swizzled address, not swizzled with it, so that its few values serve every piece.
template <class S>
__device__ __forceinline__ void multiply_keys(ScoreSets<S>& sets, const Query<S>& q, int r, u32 lane_row, u32 offset, int number) {
  offset += r * 16 * kPieceRowBytes;
  if constexpr (S::kFp8) {
#pragma unroll
    for (int step = 0; step < S::kPieceTiles; step += 2) {
      const int k = number * S::kPieceTiles + step;
      u32 bytes[4], even[4], odd[4];  // rows 0-7 and 8-15 of step k, then of step k + 1
      load_matrices(bytes, (lane_row ^ (step << 4)) + offset);
      unpack_e4m3(bytes[0], even[0], even[2]);
      unpack_e4m3(bytes[1], even[1], even[3]);
      unpack_e4m3(bytes[2], odd[0], odd[2]);
      unpack_e4m3(bytes[3], odd[1], odd[3]);
#pragma unroll
      for (int n = 0; n < S::kHeadTiles; ++n) mma<S>(sets[k % kSets<S>][n], even, q[k][n]);
#pragma unroll
      for (int n = 0; n < S::kHeadTiles; ++n) mma<S>(sets[(k + 1) % kSets<S>][n], odd, q[k + 1][n]);
    }
  } else {
#pragma unroll
    for (int step = 0; step < S::kPieceTiles; ++step) {
      const int k = number * S::kPieceTiles + step;
      u32 keys[4];
      load_matrices(keys, (lane_row ^ (step << 5)) + offset);
#pragma unroll
      for (int n = 0; n < S::kHeadTiles; ++n) mma<S>(sets[k % kSets<S>][n], keys, q[k][n]);
    }
  }
}

template <class S>
__device__ __forceinline__ void join_sets(float (&s)[S::kHeadTiles][4], const ScoreSets<S>& sets) {
#pragma unroll
  for (int n = 0; n < S::kHeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = sets[0][n][i];
      if constexpr (kSets<S> == 2) s[n][i] += sets[1][n][i];
      if constexpr (kSets<S> == 4) s[n][i] = (s[n][i] + sets[1][n][i]) + (sets[2][n][i] + sets[3][n][i]);
    }
  }
}

// A operands of one step of the second product, some of the dims of a piece by one row tile; e4m3 as it lies in memory, two tiles
// of 16 dims to four registers.
template <class S>
using Values = u32[S::kStepTiles / (S::kFp8 ? 2 : 1)][4];

template <class S>
__device__ __forceinline__ void load_values(Values<S>& v, int r, u32 lane_row, u32 offset, int first) {
  offset += r * 16 * kPieceRowBytes;
#pragma unroll
  for (int d = 0; d < S::kStepTiles; d += S::kFp8 ? 2 : 1) {
    load_matrices_transposed(v[S::kFp8 ? d / 2 : d], (lane_row ^ ((first + d) << (S::kFp8 ? 4 : 5))) + offset);
  }
}

// o += V^T P^T over one row tile. An e4m3 fragment holds two rows of two neighbouring dims: one byte permutation pairs the rows,
// so dim 2c of a tile of 16 becomes row c of the MMA and dim 2c+1 row c+8.
template <class S>
__device__ __forceinline__ void multiply_values(Output<S>& o, const Weights<S>& p, int r, const Values<S>& v, int first) {
  if constexpr (S::kFp8) {
#pragma unroll
    for (int d = 0; d < S::kStepTiles; d += 2) {
      const u32(&bytes)[4] = v[d / 2];
      u32 even[4], odd[4];
      unpack_e4m3(__byte_perm(bytes[0], 0, 0x3120), even[0], even[1]);
      unpack_e4m3(__byte_perm(bytes[1], 0, 0x3120), even[2], even[3]);
      unpack_e4m3(__byte_perm(bytes[2], 0, 0x3120), odd[0], odd[1]);
      unpack_e4m3(__byte_perm(bytes[3], 0, 0x3120), odd[2], odd[3]);
#pragma unroll
      for (int n = 0; n < S::kHeadTiles; ++n) mma<S>(o[first + d][n], even, p[r][n]);
#pragma unroll
      for (int i = 0; i < S::kHeadTiles; ++i) {
        const int n = S::kThereAndBack ? S::kHeadTiles - 1 - i : i;
        mma<S>(o[first + d + 1][n], odd, p[r][n]);
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < S::kStepTiles; ++d) {
#pragma unroll
      for (int i = 0; i < S::kHeadTiles; ++i) {
        const int n = S::kThereAndBack && d % 2 == 1 ? S::kHeadTiles - 1 - i : i;
        mma<S>(o[first + d][n], v[d], p[r][n]);
      }
    }
  }
}
