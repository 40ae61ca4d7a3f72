// Vectors of fp32 as wide as the processor's: the part of fp32 attention that depends on the instruction set.
#pragma once

#include <cmath>
#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kStep = 8;      // 8 x 3 of 32 registers accumulate
#elif defined(__AVX__)
constexpr int kLanes = 8, kStep = 4;       // 4 x 3 of 16
#else
constexpr int kLanes = 4, kStep = 4;
#endif

typedef float vec __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * kLanes), may_alias));
typedef float four __attribute__((vector_size(16), may_alias));

inline vec load(const float* p) { return *(const vec*)p; }
inline void store(float* p, vec x) { *(vec*)p = x; }
inline vec all(float x) { return x - vec{}; }

// 2^x for x <= 0, relative error below 3e-7; zero below -126.5, and for -inf; NaN stays. The polynomial is the minimax one
// on [-1/2, 1/2].
inline vec exp2(vec x) {
    x = x < all(-127.0f) ? all(-127.0f) : x;
    // The sum's last bits are the nearest integer.
    const vec magic = all(12582912.0f), shifted = x + magic, r = x - (shifted - magic);
    vec y = all(1.32764715e-3f);
    y = y * r + 9.67554133e-3f;
    y = y * r + 5.55071327e-2f;
    y = y * r + 2.40221197e-1f;
    y = y * r + 6.93146967e-1f;
    y = y * r + 1.00000007f;
    return y * (vec)(((ivec)shifted - (ivec)magic + 127) << 23);
}

// Keys and values of a block: key t at k + t * row. Readable up to the next multiple of kStep keys.
struct Block {
    const float *k, *v;
    int64_t row, first;
    int keys;
};

}  // namespace
