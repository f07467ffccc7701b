// What a split of an index row leaves for the merge. Per [token, split, head block]:
//
//     outputs  [quarter of the dims][32 dims][head tile][lane] uint4   o / l times a power of two, in f16: two MMA fragments
//     sums     [head] float2                                           maximum and sum
//              [quarter] float                                         what the outputs of a quarter are to be multiplied with
//
// f16 halves what is written and read again. Its rounding, 2^-11, is an eighth of the one to bf16 that follows. The power of two
// brings the largest output of a quarter, of all heads of the head block, near the top of its range: the rounding holds for outputs
// down to 2^-28 of that one, and below it the error is at most 2^-39 of it. The contract allows 8e-4 of the largest element of a
// row. Where that largest output is below 2^-112, outputs may become zero: denormal numbers are flushed.
// A split without a live row leaves a sum of zero and no outputs: what stands there is old, and must not be used.
#pragma once
#include "softmax.cuh"

constexpr int kUnits = kLatent / kUnitDims;

__device__ __forceinline__ int outputs_of_block(int heads) { return heads * (kLatent * 2 / 16); }          // uint4
__device__ __forceinline__ int sums_of_block(int heads) { return heads + kQuarters * sizeof(float) / sizeof(float2); }  // float2
