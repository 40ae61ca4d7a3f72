// Blocked attention of one tile of query rows over one block of keys, by AMX: `attend` of bf16_tile.h where a processor has
// tile registers.
//
// The shapes are those of bf16_tile.h, so that lanes are query rows: S^T = K Q^T takes keys as they lie and packed queries,
// and O^T = V^T P^T takes pairs of weights as the exponentials leave them; values are transposed once a block. A step is 32
// keys, whose scores go through memory. Exponentials, at 16 a vector, cost more here than both products, so that their
// polynomial is as short as weights and log-sum-exps allow. (Multiplying the next step's scores between them gains nothing:
// vectors and tiles share a port.)
#pragma once

#include "bf16_amx.h"
#include "bf16_tile.h"

namespace {

constexpr int kAmxWide = 2;    // vectors of 16 rows in a tile, at most: 2 x 2 accumulators, 2 of each operand
constexpr int kAmxStep = 32;   // keys in a step

// The scores of 32 keys, times nothing yet. s: [32][N][16].
template <int N>
inline void amx_score(i64 dim, const uint32_t* q, const bf16* k, float* s) {
    TILE_ZERO(0);
    TILE_ZERO(2);
    if (N == 2) {
        TILE_ZERO(1);
        TILE_ZERO(3);
    }
    for (i64 d = 0; d < dim; d += 32) {
        TILE_LOAD(4, k + d, 2 * dim);
        TILE_LOAD(6, q + d / 2 * N * 16, 64 * N);
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(5, k + 16 * dim + d, 2 * dim);
        TILE_MULTIPLY(2, 5, 6);
        if (N == 2) {
            TILE_LOAD(7, q + d / 2 * N * 16 + 16, 64 * N);
            TILE_MULTIPLY(1, 4, 7);
            TILE_MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, s, 64 * N);
    TILE_STORE(2, s + 16 * N * 16, 64 * N);
    if (N == 2) {
        TILE_STORE(1, s + 16, 64 * N);
        TILE_STORE(3, s + 16 * N * 16 + 16, 64 * N);
    }
}

// O += P V over keys begin..end of the block, multiples of 32. v: [kKeys / 32][dim / 16][16][32], dimension by key.
template <int N>
inline void amx_weigh(i64 dim, float* o, const uint32_t* p, const bf16* v, int begin, int end) {
    if (begin == end) return;
    for (i64 d = 0; d < dim; d += 32) {
        float* low = o + d * N * 16;
        float* high = low + 16 * N * 16;
        TILE_LOAD(0, low, 64 * N);
        TILE_LOAD(2, high, 64 * N);
        if (N == 2) {
            TILE_LOAD(1, low + 16, 64 * N);
            TILE_LOAD(3, high + 16, 64 * N);
        }
        for (int j = begin; j < end; j += kAmxStep) {
            TILE_LOAD(4, v + j * dim + d * 32, 64);
            TILE_LOAD(6, p + j / 2 * N * 16, 64 * N);
            TILE_MULTIPLY(0, 4, 6);
            TILE_LOAD(5, v + j * dim + (d + 16) * 32, 64);
            TILE_MULTIPLY(2, 5, 6);
            if (N == 2) {
                TILE_LOAD(7, p + j / 2 * N * 16 + 16, 64 * N);
                TILE_MULTIPLY(1, 4, 7);
                TILE_MULTIPLY(3, 5, 7);
            }
        }
        TILE_STORE(0, low, 64 * N);
        TILE_STORE(2, high, 64 * N);
        if (N == 2) {
            TILE_STORE(1, low + 16, 64 * N);
            TILE_STORE(3, high + 16, 64 * N);
        }
    }
}

// Which lanes see key `first` + i.
template <bool Masked>
struct Sees {
    __m512i limit;
    Sees(const Tile& t, int n, int first)
        : limit(_mm512_sub_epi32(_mm512_load_si512(t.limit + 16 * n), _mm512_set1_epi32(first))) {}
    __mmask16 operator()(int i) const { return Masked ? _mm512_cmpgt_epi32_mask(limit, _mm512_set1_epi32(i)) : 0xffff; }
};

// The greatest of the scores of 32 keys that a lane sees, and whether one exceeds the maximum in use by too much.
template <int N, bool Masked>
inline bool amx_top(const Tile& t, const float* s, int first, float scale, __m512* top) {
    __mmask16 over = 0;
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) {
        const Sees<Masked> sees(t, n, first);
        __m512 most[4];
        for (__m512& m : most) m = _mm512_set1_ps(kNever);
#pragma GCC unroll 32
        for (int i = 0; i < kAmxStep; i++)
            most[i % 4] = _mm512_mask_max_ps(most[i % 4], sees(i), most[i % 4], _mm512_load_ps(s + (i * N + n) * 16));
        top[n] = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
        const __m512 bound = _mm512_add_ps(_mm512_load_ps(t.high + 16 * n), _mm512_set1_ps(kSlack / scale));
        over |= _mm512_cmp_ps_mask(top[n], bound, _CMP_GT_OQ);
    }
    return over;
}

// The weights of 32 keys from their scores, into p: [16][N][16] pairs of keys.
template <int N, bool Masked>
inline void amx_weights(Tile& t, const float* s, int first, float scale, uint32_t* p) {
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) {
        const Sees<Masked> sees(t, n, first);
        const __m512 shift = _mm512_fnmadd_ps(_mm512_load_ps(t.high + 16 * n), factor, _mm512_setzero_ps());
        __m512 sum[2] = {_mm512_load_ps(t.sum + 16 * n), _mm512_setzero_ps()};
#pragma GCC unroll 16
        for (int i = 0; i < kAmxStep; i += 2) {
            __m512 x[2];
#pragma GCC unroll 2
            for (int e = 0; e < 2; e++) {
                x[e] = _mm512_fmadd_ps(_mm512_load_ps(s + ((i + e) * N + n) * 16), factor, shift);
                x[e] = _mm512_maskz_mov_ps(sees(i + e), short_exp2_16(x[e]));
                sum[e] = _mm512_add_ps(sum[e], x[e]);
            }
            const __m512i pairs = _mm512_permutexvar_epi16(zip, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
            _mm512_store_si512(p + (i / 2 * N + n) * 16, pairs);
        }
        _mm512_store_ps(t.sum + 16 * n, _mm512_add_ps(sum[0], sum[1]));
    }
}

// The tile over a block of `keys` keys, the first of which is key `first`. k: [keys][dim], readable up to the next multiple
// of 32; v: as `amx_weigh` takes it; s: scratch, 32 * 16 * N; p: scratch, kKeys / 2 * 16 * N.
template <int N>
void amx_attend(i64 dim, Tile& t, const bf16* k, const bf16* v, i64 first, int keys, float scale, float* s, uint32_t* p,
                Ahead& ahead) {
    const int end = int(std::min<i64>(keys, t.most - first)), all = int(std::min<i64>(keys, t.least - first));
    int done = 0;
    for (int j = 0; j < end; j += kAmxStep) {
        const bool masked = j + kAmxStep > all;
        const int at = int(first) + j;
        __m512 top[N];
        amx_score<N>(dim, t.q, k + j * dim, s);
        ahead.go();
        if (masked ? amx_top<N, true>(t, s, at, scale, top) : amx_top<N, false>(t, s, at, scale, top)) {
            amx_weigh<N>(dim, t.o, p, v, done, j);
            raise<N>(dim, t, top, scale);
            done = j;
        }
        (masked ? amx_weights<N, true> : amx_weights<N, false>)(t, s, at, scale, p + j / 2 * N * 16);
    }
    amx_weigh<N>(dim, t.o, p, v, done, (end + kAmxStep - 1) / kAmxStep * kAmxStep);
}

}  // namespace
