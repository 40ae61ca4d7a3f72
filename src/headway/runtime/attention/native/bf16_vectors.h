// What the kernels share: bf16 vectors, a power, a transposition.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

using bf16 = uint16_t;
using i64 = int64_t;

namespace {

inline __m512 widen(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void narrow(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
inline __m512bh pack(const bf16* p) { return (__m512bh)_mm512_loadu_si512((const void*)p); }
inline __m512 widen(__mmask16 live, const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live, p)), 16));
}

// 2^x, relative error below 3e-7; zero below -150, and for -inf. The polynomial is the minimax one on [-1/2, 1/2].
inline __m512 exp2_16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
    const __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.32764715e-3f);
    for (float c : {9.67554133e-3f, 5.55071327e-2f, 2.40221197e-1f, 6.93146967e-1f, 1.00000007f})
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, n);
}

// 2^x, relative error below 3e-6; zero far below. The polynomial is the minimax one on [0, 1].
inline __m512 short_exp2_16(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, 9);  // from the integer below, to which scalef rounds too
    __m512 y = _mm512_set1_ps(1.3534168e-2f);
    for (float c : {5.2011461e-2f, 2.4144276e-1f, 6.9300383e-1f, 1.0000026f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, x);
}

constexpr float kLog2e = 1.44269504f;

// e^x for small |x| or x <= 0: relative error below 3e-7 + 1e-7 |x|.
inline __m512 exp16(__m512 x) { return exp2_16(_mm512_mul_ps(x, _mm512_set1_ps(kLog2e))); }

// 16 vectors of 16 words of 32 bits, transposed in place.
inline void transpose16(__m512* a) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d x = _mm512_castps_pd(t[i + j]), y = _mm512_castps_pd(t[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    for (int i = 0; i < 4; i++) {
        const __m512 x = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), y = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        const __m512 z = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88), w = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
        t[i] = _mm512_shuffle_f32x4(x, z, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(x, z, 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(y, w, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(y, w, 0xdd);
    }
    for (int i = 0; i < 16; i++) a[i] = t[i];
}

// The sums of 16 vectors, in order, as one vector.
inline __m512 sums16(const __m512* a) {
    __m512 v[4];
    for (int i = 0; i < 4; i++) {
        __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(a[4 * i], a[4 * i + 1]), _mm512_unpackhi_ps(a[4 * i], a[4 * i + 1]));
        __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(a[4 * i + 2], a[4 * i + 3]),
                                 _mm512_unpackhi_ps(a[4 * i + 2], a[4 * i + 3]));
        __m512d xd = _mm512_castps_pd(x), yd = _mm512_castps_pd(y);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(xd, yd)), _mm512_castpd_ps(_mm512_unpackhi_pd(xd, yd)));
    }
    __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
    __m512 t = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(s, t, 0x88), _mm512_shuffle_f32x4(s, t, 0xdd));
}

}  // namespace
