// Vectors of fp32 as wide as the processor's, and bf16 read into them and rounded back: the part of fp32 arithmetic that
// depends on the instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

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

typedef uint32_t uvec __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint16_t halfvec __attribute__((vector_size(2 * kLanes), may_alias));

constexpr float kLog2e = 1.44269504f;

inline vec load(const float* p) { return *(const vec*)p; }
inline void store(float* p, vec x) { *(vec*)p = x; }
inline vec all(float x) { return x - vec{}; }

// Elements of either type as fp32, and back, rounded to the nearest; addresses need no alignment.
inline float wide(float x) { return x; }
inline float wide(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
inline vec widen(const float* p) {
    vec x;
    memcpy(&x, p, sizeof(x));
    return x;
}
inline vec widen(const bf16* p) {
    halfvec x;
    memcpy(&x, p, sizeof(x));
    return (vec)(__builtin_convertvector(x, uvec) << 16);
}
inline void narrow(float* p, vec x) { memcpy(p, &x, sizeof(x)); }
inline void narrow(bf16* p, vec x) {
    const uvec bits = (uvec)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    const halfvec y = __builtin_convertvector((x == x ? rounded : bits | 0x400000) >> 16, halfvec);
    memcpy(p, &y, sizeof(y));
}
inline void narrow_one(float* p, float x) { *p = x; }
inline void narrow_one(bf16* p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = bf16((x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) >> 16);
}

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
