// The few-rows path of a bf16 decoder: linear layers and rotation for up to a handful of rows.
//
// Called through ctypes by headway.attention.native, which compiles these files for the processor at hand. Nothing here
// depends on torch: pointers, sizes and strides (in elements) only. Accumulation is fp32; results are rounded to bf16
// once, where the general path rounds one or two times. Threads are those of the OpenMP runtime already in the process.

#ifndef __AVX512BF16__
extern "C" int headway_supported() { return 0; }
#else
#include <cmath>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

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
}
#endif
