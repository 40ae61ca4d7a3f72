// Blocked attention of one tile of query rows over one block of keys, by vdpbf16ps.
//
// Lanes are query rows: S^T = K Q^T takes keys as they lie (pairs of dimensions, broadcast) and packed queries, its maxima
// and sums need no reduction across lanes, and O^T = V^T P^T takes P^T as the exponentials leave it. Q is packed once a
// tile, values are interleaved by two keys once a block. A score goes from register to exponential to bf16 pair without
// being stored: the row's maximum may lag by kSlack, and only a score beyond that makes the tile rescale (the conditional
// rescaling of FlashAttention-4). fp32 holds what bf16 weights above one add up to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bf16_vectors.h"

namespace {

constexpr int kWide = 3;     // vectors of 16 rows in a tile, at most: 8 x 3 accumulators
constexpr int kKeys = 192;   // keys in a block; a power of two would make its slices collide in the first cache
constexpr int kStep = 8;     // keys or dimensions in an accumulator tile
constexpr float kSlack = 20; // powers of two by which a score may exceed the maximum in use
constexpr float kNever = -1e30f;

// Rows of one KV head. A lane beyond the last row repeats it.
struct Tile {
    int vectors;
    uint32_t* q;                              // [dim / 2][vectors][16], pairs of dimensions
    float* o;                                 // [dim][vectors][16], weighted values in units of 2^(high * scale)
    alignas(64) float high[16 * kWide];       // the maximum in use, before scaling
    alignas(64) float sum[16 * kWide];        // of the weights
    alignas(64) int32_t limit[16 * kWide];    // the lane sees the keys below it
    i64 least, most;                          // of the limits
};

// The next block on its way to the second cache while this one is worked on.
struct Ahead {
    const char *k = nullptr, *v = nullptr;
    i64 left = 0;
    int lines = 0;
    void go() {
        for (int i = 0; i < lines && left > 0; i++, left -= 64, k += 64, v += 64) {
            _mm_prefetch(k, _MM_HINT_T1);
            _mm_prefetch(v, _MM_HINT_T1);
        }
    }
};

// O += P V over keys begin..end of the block, multiples of 8. v: [dim / 8][kKeys / 2][8], pairs of keys.
template <int N>
inline void weigh(i64 dim, float* o, const uint32_t* p, const uint32_t* v, int begin, int end) {
    if (begin == end) return;
    for (int t = 0; t < dim / 8; t++, o += 8 * N * 16, v += kKeys / 2 * 8) {
        __m512 acc[8 * N];
#pragma GCC unroll 24
        for (int i = 0; i < 8 * N; i++) acc[i] = _mm512_load_ps(o + 16 * i);
        for (int j = begin / 2; j < end / 2; j++) {
            __m512bh w[N];
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) w[n] = (__m512bh)_mm512_load_si512(p + (j * N + n) * 16);
#pragma GCC unroll 8
            for (int d = 0; d < 8; d++) {
                const __m512bh a = (__m512bh)_mm512_set1_epi32(int(v[j * 8 + d]));
#pragma GCC unroll 3
                for (int n = 0; n < N; n++) acc[d * N + n] = _mm512_dpbf16_ps(acc[d * N + n], a, w[n]);
            }
        }
#pragma GCC unroll 24
        for (int i = 0; i < 8 * N; i++) _mm512_store_ps(o + 16 * i, acc[i]);
    }
}

// Rescale the tile to maxima that include `top`.
template <int N>
__attribute__((noinline, cold)) void raise(i64 dim, Tile& t, const __m512* top, float scale) {
    __m512 less[N];
    for (int n = 0; n < N; n++) {
        const __m512 old = _mm512_load_ps(t.high + 16 * n), now = _mm512_max_ps(old, top[n]);
        less[n] = exp2_16(_mm512_mul_ps(_mm512_sub_ps(old, now), _mm512_set1_ps(scale)));
        _mm512_store_ps(t.high + 16 * n, now);
        _mm512_store_ps(t.sum + 16 * n, _mm512_mul_ps(_mm512_load_ps(t.sum + 16 * n), less[n]));
    }
    for (int i = 0; i < dim * N; i++)
        _mm512_store_ps(t.o + 16 * i, _mm512_mul_ps(_mm512_load_ps(t.o + 16 * i), less[i % N]));
}

// The scores of keys j..j+7, times nothing yet.
template <int N>
inline void score(i64 dim, const uint32_t* q, const bf16* k, __m512* s) {
    const bf16* half[2] = {k, k + 4 * dim};
#pragma GCC unroll 24
    for (int i = 0; i < 8 * N; i++) s[i] = _mm512_setzero_ps();
    for (i64 d = 0; d < dim / 2; d++, half[0] += 2, half[1] += 2) {
        __m512bh in[N];
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) in[n] = (__m512bh)_mm512_load_si512(q + (d * N + n) * 16);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            int pair;
            memcpy(&pair, half[i / 4] + i % 4 * dim, 4);
            const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) s[i * N + n] = _mm512_dpbf16_ps(s[i * N + n], a, in[n]);
        }
    }
}

// The tile over a block of `keys` keys, the first of which is key `first`. k: [keys][dim], readable up to the next
// multiple of 8; scale: of the scores, times log2(e), positive; p: scratch, kKeys / 2 * 16 * N words.
template <int N>
void attend(i64 dim, Tile& t, const bf16* k, const uint32_t* v, i64 first, int keys, float scale, uint32_t* p, Ahead& ahead) {
    const int end = int(std::min<i64>(keys, t.most - first)), all = int(std::min<i64>(keys, t.least - first));
    const __m512 factor = _mm512_set1_ps(scale), slack = _mm512_set1_ps(kSlack / scale);
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    int done = 0;
    for (int j = 0; j < end; j += kStep) {
        __m512 s[8 * N], top[N];
        score<N>(dim, t.q, k + j * dim, s);
        ahead.go();
        if (j + kStep > all) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
#pragma GCC unroll 3
                for (int n = 0; n < N; n++) {
                    const __m512i key = _mm512_set1_epi32(int(first) + j + i);
                    const __mmask16 seen = _mm512_cmpgt_epi32_mask(_mm512_load_si512(t.limit + 16 * n), key);
                    s[i * N + n] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, s[i * N + n]);
                }
        }
        __mmask16 over = 0;
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) {
            top[n] = s[n];
#pragma GCC unroll 8
            for (int i = 1; i < 8; i++) top[n] = _mm512_max_ps(top[n], s[i * N + n]);
            const __m512 bound = _mm512_add_ps(_mm512_load_ps(t.high + 16 * n), slack);
            over |= _mm512_cmp_ps_mask(top[n], bound, _CMP_GT_OQ);
        }
        if (__builtin_expect(over, 0)) {
            weigh<N>(dim, t.o, p, v, done, j);
            raise<N>(dim, t, top, scale);
            done = j;
        }
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) {
            const __m512 shift = _mm512_fnmadd_ps(_mm512_load_ps(t.high + 16 * n), factor, _mm512_setzero_ps());
            __m512 sum = _mm512_load_ps(t.sum + 16 * n);
#pragma GCC unroll 4
            for (int i = 0; i < 8; i += 2) {
                const __m512 x = exp2_16(_mm512_fmadd_ps(s[i * N + n], factor, shift));
                const __m512 y = exp2_16(_mm512_fmadd_ps(s[(i + 1) * N + n], factor, shift));
                sum = _mm512_add_ps(sum, _mm512_add_ps(x, y));
                const __m512i pairs = _mm512_permutexvar_epi16(zip, (__m512i)_mm512_cvtne2ps_pbh(y, x));
                _mm512_store_si512(p + ((j + i) / 2 * N + n) * 16, pairs);
            }
            _mm512_store_ps(t.sum + 16 * n, sum);
        }
    }
    weigh<N>(dim, t.o, p, v, done, (end + 7) / 8 * 8);
}

}  // namespace
