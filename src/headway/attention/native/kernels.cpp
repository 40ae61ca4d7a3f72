// The few-rows path of a bf16 decoder: linear layers, rotation and decode attention for up to a handful of rows.
//
// Called through ctypes by headway.attention.native, which compiles this file for the processor at hand. Nothing here
// depends on torch: pointers, sizes and strides (in elements) only. Accumulation is fp32; results are rounded to bf16
// once, where the general path rounds one or two times. Threads are those of the OpenMP runtime already in the process.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifndef __AVX512BF16__
extern "C" int headway_supported() { return 0; }
#else
#include <immintrin.h>

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

// e^x for x <= 0, relative error about 2e-7; below -87 it goes to zero.
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, n);
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

// Dot products of R weight rows with M input rows (R * M == 16), into sums[r * M + m]. k is a multiple of 32.
template <int R, int M>
inline void dots(const bf16* w, const bf16* x, i64 k, float* sums) {
    __m512 acc[16];
    for (auto& a : acc) a = _mm512_setzero_ps();
    for (i64 c = 0; c < k; c += 32) {
        __m512bh row[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            row[r] = pack(w + r * k + c);
            _mm_prefetch((const char*)(w + r * k + c + R * k), _MM_HINT_T0);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            __m512bh in = pack(x + m * k + c);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) acc[r * M + m] = _mm512_dpbf16_ps(acc[r * M + m], row[r], in);
        }
    }
    _mm512_storeu_ps(sums, sums16(acc));
}

constexpr i64 kBlock = 32;

struct Epilogue {
    const bf16* bias;
    const bf16* residual;
    bf16* out;
    i64 n;
    // Columns begin .. begin + kBlock (those below end) of row m, from sums.
    void put(i64 m, i64 begin, i64 end, const float* sums) const {
        for (i64 c = begin; c < end; c += 16) {
            __mmask16 live = end - c >= 16 ? __mmask16(0xffff) : __mmask16((1u << (end - c)) - 1);
            __m512 value = _mm512_loadu_ps(sums + c - begin);
            if (bias) value = _mm512_add_ps(value, widen(live, bias + c));
            if (residual) value = _mm512_add_ps(value, widen(live, residual + m * n + c));
            _mm256_mask_storeu_epi16(out + m * n + c, live, (__m256i)_mm512_cvtneps_pbh(value));
        }
    }
};

// Output columns begin..end (at most kBlock, at least R) for `rows` rows of x, which is readable up to M rows.
template <int R, int M>
void columns(const bf16* w, const bf16* x, i64 k, i64 begin, i64 end, i64 rows, i64 first, const Epilogue& e) {
    float sums[16], block[M][kBlock];
    for (i64 col = begin; col < end; col += R) {
        i64 base = col + R <= end ? col : end - R;
        dots<R, M>(w + base * k, x, k, sums);
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) block[m][base - begin + r] = sums[r * M + m];
    }
    for (i64 m = 0; m < rows; m++) e.put(first + m, begin, end, block[m]);
}

void normalise(const bf16* x, const bf16* weight, float eps, i64 k, bf16* y) {
    __m512 squares = _mm512_setzero_ps();
    for (i64 c = 0; c < k; c += 16) {
        __m512 v = widen(x + c);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(k) + eps));
    for (i64 c = 0; c < k; c += 16) narrow(y + c, _mm512_mul_ps(_mm512_mul_ps(widen(x + c), factor), widen(weight + c)));
}

void swiglu(const bf16* x, i64 k, i64 begin, i64 end, bf16* y) {
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    for (i64 c = begin; c < end; c += 16) {
        __m512 g = widen(x + c);
        __m512 e = exp16(_mm512_sub_ps(zero, _mm512_abs_ps(g)));
        __mmask16 negative = _mm512_cmp_ps_mask(g, zero, _CMP_LT_OQ);
        __m512 top = _mm512_mask_blend_ps(negative, one, e);
        __m512 silu = _mm512_div_ps(_mm512_mul_ps(g, top), _mm512_add_ps(one, e));
        narrow(y + c, _mm512_mul_ps(silu, widen(x + k + c)));
    }
}

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

int headway_supported() { return 1; }

// out (rows, n) = prologue(x) W^T + bias + residual. Prologue: RMS norm by `norm`, or SwiGLU of x (rows, 2k), or none.
// n is at least 16, k a multiple of 32. out may be residual if n is a multiple of 16: the last columns then overlap none.
void headway_linear(const bf16* x, const bf16* norm, float eps, int gated, const bf16* w, const bf16* bias,
                    const bf16* residual, bf16* out, i64 rows, i64 n, i64 k) {
    static thread_local std::vector<bf16> kept;
    i64 padded = rows <= 4 ? (rows == 3 ? 4 : rows) : (rows + 7) / 8 * 8;
    const bf16* ready = x;
    bf16* scratch = nullptr;
    if (norm || gated || padded != rows) {
        if (i64(kept.size()) < padded * k) kept.assign(padded * k, 0);
        ready = scratch = kept.data();
    }
    const Epilogue e{bias, residual, out, n};
    const i64 blocks = (n + kBlock - 1) / kBlock;
#pragma omp parallel
    {
        if (gated) {
            const i64 piece = 256, pieces = (k + piece - 1) / piece;
#pragma omp for schedule(static)
            for (i64 i = 0; i < rows * pieces; i++) {
                i64 m = i / pieces, begin = i % pieces * piece;
                swiglu(x + 2 * m * k, k, begin, begin + piece < k ? begin + piece : k, scratch + m * k);
            }
        } else if (scratch) {
#pragma omp for schedule(static)
            for (i64 m = 0; m < rows; m++) {
                if (norm) normalise(x + m * k, norm, eps, k, scratch + m * k);
                else memcpy(scratch + m * k, x + m * k, k * sizeof(bf16));
            }
        }
#pragma omp for schedule(static)
        for (i64 b = 0; b < blocks; b++) {
            i64 begin = b * kBlock, end = begin + kBlock < n ? begin + kBlock : n;
            if (end - begin < 16) begin = end - 16;
            for (i64 m = 0; m < padded;) {
                i64 left = rows - m;
                const bf16* in = ready + m * k;
                if (padded - m == 1) columns<16, 1>(w, in, k, begin, end, left, m, e), m += 1;
                else if (padded - m == 2) columns<8, 2>(w, in, k, begin, end, left, m, e), m += 2;
                else if (padded - m == 4) columns<4, 4>(w, in, k, begin, end, left, m, e), m += 4;
                else columns<2, 8>(w, in, k, begin, end, left < 8 ? left : 8, m, e), m += 8;
            }
        }
    }
}

// Rotate the first `heads` heads of each row in place: pairs (i, i + dim/2), cos and signed sin (rows, dim) as RotaryTable.
void headway_rotate(bf16* x, const bf16* cos, const bf16* sin, i64 rows, i64 row_stride, i64 heads, i64 head_dim, i64 dim) {
    i64 half = dim / 2;
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++) {
            bf16* p = x + r * row_stride + h * head_dim;
            const bf16 *c = cos + r * dim, *s = sin + r * dim;
            for (i64 i = 0; i < half; i += 16) {
                __m512 a = widen(p + i), b = widen(p + half + i);
                narrow(p + i, _mm512_fmadd_ps(a, widen(c + i), _mm512_mul_ps(b, widen(s + i))));
                narrow(p + half + i, _mm512_fmadd_ps(b, widen(c + half + i), _mm512_mul_ps(a, widen(s + half + i))));
            }
        }
}

// Decode attention of several requests, one row each: store the new key and value, then attend over the tiles.
// rows, slots (requests): the row in the batch and the slot to write. tiles (count, 2): first slot and tokens (<= 512);
// request i owns tiles edges[i]..edges[i+1]. keys, values: one layer of the pool, (kv_heads, slots, dim).
// scratch: count * ceil(group / 4) * kv_heads * (4 * dim + 8) floats. dim is 32, 64, 96 or 128.
void headway_decode(const bf16* q, const bf16* k, const bf16* v, bf16* out, i64 q_stride, i64 kv_stride, bf16* keys,
                    bf16* values, i64 head_stride, const i64* rows, const i64* slots, i64 requests, const i64* tiles,
                    const i64* edges, i64 q_heads, i64 kv_heads, i64 dim, float scale, float* scratch) {
    const i64 group = q_heads / kv_heads, quads = (group + 3) / 4, count = edges[requests], size = 4 * dim + 8;
    const TileFn run = kTiles[dim / 32 - 1];
    for (i64 i = 0; i < requests; i++)
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
            for (i64 c = 0; c < dim / 16; c++)
                narrow(out + (rows[i] * q_heads + job % q_heads) * dim + 16 * c, _mm512_mul_ps(acc[c], _mm512_set1_ps(1.0f / total)));
        }
    }
}
}
#endif
