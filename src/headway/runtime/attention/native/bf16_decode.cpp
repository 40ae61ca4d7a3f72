// Decode attention of a bf16 decoder: one row a request. Conventions as in bf16_linear.cpp.

#ifdef __AVX512BF16__
#include <cmath>
#include <cstring>

#include "bf16_vectors.h"

namespace {

constexpr i64 kTile = 512, kAhead = 32;

// Attention of up to four query rows over n keys: weighted values (4, D), then maxima (4) and sums (4), all fp32.
template <int C>
void tile(const bf16* q, const bf16* k, const bf16* v, i64 n, float scale, float* partial) {
    constexpr i64 D = 32 * C;
    alignas(64) float s[4 * (kTile + 4)];
    alignas(64) uint32_t weights[4 * (kTile / 2 + 2)];
    for (i64 t = 0; t < n; t += 4) {
        __m512 acc[16];
        for (auto& a : acc) a = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512bh key = pack(k + (t + j < n ? t + j : n - 1) * D + 32 * c);
#pragma GCC unroll 4
                for (int g = 0; g < 4; g++) acc[4 * j + g] = _mm512_dpbf16_ps(acc[4 * j + g], key, pack(q + g * D + 32 * c));
            }
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) _mm_prefetch((const char*)(k + (t + kAhead + j) * D + 32 * c), _MM_HINT_T0);
        }
        _mm512_store_ps(s + 4 * t, _mm512_mul_ps(sums16(acc), _mm512_set1_ps(scale)));
    }
    __m512 high = _mm512_set1_ps(-INFINITY);
    for (i64 t = n; t % 4; t++)
        for (int g = 0; g < 4; g++) s[4 * t + g] = -INFINITY;
    for (i64 t = 0; t < n; t += 4) high = _mm512_max_ps(high, _mm512_load_ps(s + 4 * t));
    high = _mm512_max_ps(high, _mm512_shuffle_f32x4(high, high, 0x4e));
    high = _mm512_max_ps(high, _mm512_shuffle_f32x4(high, high, 0xb1));
    __m512 total = _mm512_setzero_ps();
    const __m512i pairs = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    for (i64 t = 0; t < n; t += 4) {
        __m512 p = exp16(_mm512_sub_ps(_mm512_load_ps(s + 4 * t), high));
        if (t + 4 > n) p = _mm512_maskz_mov_ps(__mmask16((1u << (4 * (n - t))) - 1), p);
        total = _mm512_add_ps(total, p);
        _mm256_store_si256((__m256i*)(weights + 2 * t), (__m256i)_mm512_cvtneps_pbh(_mm512_permutexvar_ps(pairs, p)));
    }
    total = _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4e));
    total = _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0xb1));
    _mm_storeu_ps(partial + 4 * D, _mm512_castps512_ps128(high));
    _mm_storeu_ps(partial + 4 * D + 4, _mm512_castps512_ps128(total));
    constexpr int W = C % 2 ? 1 : 2;
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int c = 0; c < C; c += W) {
        __m512 acc[4 * W * 2];
        for (auto& a : acc) a = _mm512_setzero_ps();
        for (i64 t = 0; t < n; t += 2) {
            const bf16* even = v + t * D + 32 * c;
            const bf16* odd = t + 1 < n ? even + D : even;
#pragma GCC unroll 2
            for (int w = 0; w < W; w++) {
                _mm_prefetch((const char*)(even + kAhead * D + 32 * w), _MM_HINT_T0);
                _mm_prefetch((const char*)(even + (kAhead + 1) * D + 32 * w), _MM_HINT_T0);
                __m512i a = _mm512_loadu_si512(even + 32 * w), b = _mm512_loadu_si512(odd + 32 * w);
                __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), up = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
                for (int g = 0; g < 4; g++) {
                    __m512bh p = (__m512bh)_mm512_set1_epi32(int(weights[2 * t + g]));
                    acc[(w * 4 + g) * 2] = _mm512_dpbf16_ps(acc[(w * 4 + g) * 2], low, p);
                    acc[(w * 4 + g) * 2 + 1] = _mm512_dpbf16_ps(acc[(w * 4 + g) * 2 + 1], up, p);
                }
            }
        }
        for (int w = 0; w < W; w++)
            for (int g = 0; g < 4; g++) {
                __m512 low = acc[(w * 4 + g) * 2], up = acc[(w * 4 + g) * 2 + 1];
                float* to = partial + g * D + 32 * (c + w);
                _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, first, up));
                _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, second, up));
            }
    }
}

using TileFn = void (*)(const bf16*, const bf16*, const bf16*, i64, float, float*);
constexpr TileFn kTiles[] = {tile<1>, tile<2>, tile<3>, tile<4>};

}  // namespace

extern "C" {

// Decode attention of several requests, one row each: store the new key and value, then attend over the tiles.
// rows, slots (requests): the row in the batch and the slot to write. tiles (count, 2): first slot and tokens (<= 512);
// request i owns tiles edges[i]..edges[i+1]. keys, values: one layer of the pool, (kv_heads, slots, dim).
// With lse, answers are partial: nothing is stored, k and v may be null, out is fp32 and lse (rows, q_heads) is set.
// scratch: count * ceil(group / 4) * kv_heads * (4 * dim + 8) floats. dim is 32, 64, 96 or 128.
void headway_decode(const bf16* q, const bf16* k, const bf16* v, void* out, i64 q_stride, i64 kv_stride, bf16* keys,
                    bf16* values, i64 head_stride, const i64* rows, const i64* slots, i64 requests, const i64* tiles,
                    const i64* edges, i64 q_heads, i64 kv_heads, i64 dim, float scale, float* scratch,
                    float* lse) {
    const i64 group = q_heads / kv_heads, quads = (group + 3) / 4, count = edges[requests], size = 4 * dim + 8;
    const TileFn run = kTiles[dim / 32 - 1];
    for (i64 i = 0; !lse && i < requests; i++)
        for (i64 h = 0; h < kv_heads; h++) {
            memcpy(keys + h * head_stride + slots[i] * dim, k + rows[i] * kv_stride + h * dim, dim * sizeof(bf16));
            memcpy(values + h * head_stride + slots[i] * dim, v + rows[i] * kv_stride + h * dim, dim * sizeof(bf16));
        }
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (i64 job = 0; job < count * kv_heads; job++) {
            i64 t = job / kv_heads, h = job % kv_heads, low = 0, high = requests;
            while (high - low > 1) {
                i64 mid = (low + high) / 2;
                (edges[mid] <= t ? low : high) = mid;
            }
            i64 offset = h * head_stride + tiles[2 * t] * dim;
            for (i64 quad = 0; quad < quads; quad++) {
                bf16 padded[4 * 128];
                i64 held = group - 4 * quad < 4 ? group - 4 * quad : 4;
                const bf16* from = q + rows[low] * q_stride + (h * group + 4 * quad) * dim;
                if (held < 4) {
                    memset(padded, 0, sizeof(padded));
                    memcpy(padded, from, held * dim * sizeof(bf16));
                    from = padded;
                }
                run(from, keys + offset, values + offset, tiles[2 * t + 1], scale, scratch + (job * quads + quad) * size);
            }
        }
#pragma omp for schedule(static)
        for (i64 job = 0; job < requests * q_heads; job++) {
            i64 i = job / q_heads, h = job % q_heads / group, g = job % q_heads % group;
            float high = -INFINITY, total = 0.0f;
            for (i64 t = edges[i]; t < edges[i + 1]; t++)
                high = std::fmax(high, scratch[((t * kv_heads + h) * quads + g / 4) * size + 4 * dim + g % 4]);
            __m512 acc[8];
            for (auto& a : acc) a = _mm512_setzero_ps();
            for (i64 t = edges[i]; t < edges[i + 1]; t++) {
                const float* part = scratch + ((t * kv_heads + h) * quads + g / 4) * size;
                float weight = std::exp(part[4 * dim + g % 4] - high);
                total += weight * part[4 * dim + 4 + g % 4];
                for (i64 c = 0; c < dim / 16; c++)
                    acc[c] = _mm512_fmadd_ps(_mm512_set1_ps(weight), _mm512_loadu_ps(part + g % 4 * dim + 16 * c), acc[c]);
            }
            const i64 at = rows[i] * q_heads + job % q_heads;
            const __m512 inverse = _mm512_set1_ps(1.0f / total);
            if (lse) lse[at] = high + std::log(total);
            for (i64 c = 0; c < dim / 16; c++) {
                const __m512 x = _mm512_mul_ps(acc[c], inverse);
                if (lse) _mm512_storeu_ps((float*)out + at * dim + 16 * c, x);
                else narrow((bf16*)out + at * dim + 16 * c, x);
            }
        }
    }
}
}
#endif
