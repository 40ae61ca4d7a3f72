// Linear layers and rotation of a decoder by fp32 arithmetic, weights and rows in fp32 or bf16, for any number of rows.
//
// Conventions as in bf16_linear.cpp. A weight (n, k) lies in panels of 16 columns of the result, [n / 16][k][16], for every
// width of vector; rows are widened and laid in blocks of at most kRows, [k][rows], to be broadcast. An element of the
// result is the same sum in the same order in any block, by any number of threads: it does not depend on the other rows.

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "fp32_vectors.h"

using i64 = int64_t;

namespace {

constexpr int kPanel = 16, kEach = kPanel / kLanes;  // columns in a panel, vectors in it
#if defined(__AVX512F__)
constexpr int kSums = 24;                            // accumulators, of 32 registers
#else
constexpr int kSums = 12;                            // of 16
#endif
constexpr int kRows = kSums / (kEach > 1 ? kEach : 2);  // in a block
constexpr i64 kTogether = 240;                       // rows that one pass over the weights serves
constexpr i64 kQuad = 4;                             // rows that are laid at a time

// Panels that a block of `rows` takes at a time.
constexpr int panels_of(int rows) {
    const int most = kSums / (rows * kEach);
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

template <class T>
struct Epilogue {
    const T *bias, *residual;
    T* out;
    i64 n;
    // Not in line: it is small beside a tile's products, and would be compiled once for each tile.
    __attribute__((noinline)) void put(i64 row, i64 rows, i64 first, i64 vectors, const vec* sums) const {
        for (i64 m = row; m < row + rows; m++)
            for (i64 c = first; c < first + vectors * kLanes; c += kLanes) {
                vec value = *sums++;
                if (n - c >= kLanes) {
                    if (bias) value += widen(bias + c);
                    if (residual) value += widen(residual + m * n + c);
                    narrow(out + m * n + c, value);
                    continue;
                }
                for (i64 i = 0; c + i < n; i++) {
                    float x = value[i];
                    if (bias) x += wide(bias[c + i]);
                    if (residual) x += wide(residual[m * n + c + i]);
                    narrow_one(out + m * n + c + i, x);
                }
            }
    }
};

// R rows from `row` on, C panels from panel `panel` on. x: their block.
template <class T, int R, int C>
void tile(const float* x, const T* w, i64 k, i64 row, i64 panel, const Epilogue<T>& e) {
    constexpr int kVectors = C * kEach;
    vec acc[R * kVectors];
#pragma GCC unroll 24
    for (int i = 0; i < R * kVectors; i++) acc[i] = vec{};
    w += panel * kPanel * k;
    for (i64 p = 0; p < k; p++, x += R) {
        vec in[kVectors];
#pragma GCC unroll 8
        for (int c = 0; c < kVectors; c++) {
            const T* from = w + c / kEach * kPanel * k + p * kPanel + c % kEach * kLanes;
            in[c] = widen(from);
            if (c % kEach == 0) __builtin_prefetch(from + 1024);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const vec a = all(x[r]);
#pragma GCC unroll 8
            for (int c = 0; c < kVectors; c++) acc[r * kVectors + c] += a * in[c];
        }
    }
    vec sums[R * kVectors];
#pragma GCC unroll 24
    for (int i = 0; i < R * kVectors; i++) sums[i] = acc[i];
    e.put(row, R, kPanel * panel, kVectors, sums);
}

template <class T>
using TileFn = void (*)(const float*, const T*, i64, i64, i64, const Epilogue<T>&);
template <class T, int... R>
constexpr std::array<TileFn<T>, kRows> wide_tiles(std::integer_sequence<int, R...>) {
    return {tile<T, R + 1, panels_of(R + 1)>...};
}
template <class T, int... R>
constexpr std::array<TileFn<T>, kRows> single_tiles(std::integer_sequence<int, R...>) {
    return {tile<T, R + 1, 1>...};
}

// The panels first .. last - 1 of `rows` rows.
template <class T>
void panels(const float* x, const T* w, i64 k, i64 row, i64 rows, i64 first, i64 last, const Epilogue<T>& e) {
    static constexpr auto kWide = wide_tiles<T>(std::make_integer_sequence<int, kRows>{});
    static constexpr auto kSingle = single_tiles<T>(std::make_integer_sequence<int, kRows>{});
    const i64 at_once = panels_of(int(rows));
    for (; last - first >= at_once; first += at_once) kWide[rows - 1](x, w, k, row, first, e);
    for (; first < last; first++) kSingle[rows - 1](x, w, k, row, first, e);
}

// Rows of the input, and what is done to them before the product.
template <class T>
struct Rows {
    const T *x, *norm;
    float eps;
    int gated;
    i64 k;
};

template <class T>
void normalise(const T* x, const T* weight, float eps, i64 k, float* y) {
    vec squares{};
    for (i64 c = 0; c < k; c += kLanes) {
        const vec v = widen(x + c);
        squares += v * v;
    }
    float sum = 0.0f;
    for (int i = 0; i < kLanes; i++) sum += squares[i];
    const float factor = 1.0f / std::sqrt(sum / float(k) + eps);
    for (i64 c = 0; c < k; c += kLanes) narrow(y + c, widen(x + c) * factor * widen(weight + c));
}

template <class T>
void swiglu(const T* x, i64 k, float* y) {
    for (i64 c = 0; c < k; c += kLanes) {
        const vec g = widen(x + c), below = g < vec{} ? g : -g, e = exp2(below * kLog2e);
        narrow(y + c, g * (g < vec{} ? e : all(1.0f)) / (e + 1.0f) * widen(x + k + c));
    }
}

// Rows r .. r + 3 of a block of `rows` rows, which begins at `row`, as far as it has them. scratch: 4 k.
template <class T>
void lay(const Rows<T>& in, i64 row, i64 rows, i64 r, float* scratch, float* to) {
    const i64 k = in.k, count = std::min(rows - r, kQuad);
    for (i64 i = 0; i < count; i++) {
        const T* from = in.x + (row + r + i) * (in.gated ? 2 * k : k);
        float* flat = rows == 1 ? to : scratch + i * k;
        if (in.gated) swiglu(from, k, flat);
        else if (in.norm) normalise(from, in.norm, in.eps, k, flat);
        else
            for (i64 c = 0; c < k; c += kLanes) narrow(flat + c, widen(from + c));
    }
    if (count < kQuad) {
        if (rows > 1)
            for (i64 i = 0; i < count; i++)
                for (i64 p = 0; p < k; p++) to[p * rows + r + i] = scratch[i * k + p];
        return;
    }
    for (i64 p = 0; p < k; p += kQuad) {
        four x[kQuad];
        for (i64 i = 0; i < kQuad; i++) memcpy(x + i, scratch + i * k + p, sizeof(four));
        const four a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
        const four c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
        x[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
        x[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
        x[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
        x[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
        for (i64 i = 0; i < kQuad; i++) memcpy(to + (p + i) * rows + r, x + i, sizeof(four));
    }
}

template <class T>
void linear(const T* x, const T* norm, float eps, int gated, const T* w, const T* bias, const T* residual, T* out,
            i64 rows, i64 n, i64 k) {
    static thread_local std::vector<float> kept;
    const i64 most = std::min(rows, kTogether);
    if (i64(kept.size()) < most * k) kept.resize(most * k);
    float* laid = kept.data();
    const Epilogue<T> e{bias, residual, out, n};
    const Rows<T> in{x, norm, eps, gated, k};
    const i64 count = (n + kPanel - 1) / kPanel;
#pragma omp parallel
    {
        static thread_local std::vector<float> scratch;
        if (i64(scratch.size()) < kQuad * k) scratch.resize(kQuad * k);
        for (i64 begin = 0; begin < rows; begin += kTogether) {
            const i64 held = std::min(rows - begin, kTogether), blocks = (held + kRows - 1) / kRows;
#pragma omp for schedule(static)
            for (i64 b = 0; b < blocks; b++) {
                const i64 first = held * b / blocks, count = held * (b + 1) / blocks - first;
                for (i64 r = 0; r < count; r += kQuad) lay(in, begin + first, count, r, scratch.data(), laid + first * k);
            }
            const i64 together = panels_of(int((held + blocks - 1) / blocks)), groups = (count + together - 1) / together;
#pragma omp for schedule(static) collapse(2)
            for (i64 g = 0; g < groups; g++)
                for (i64 b = 0; b < blocks; b++) {
                    const i64 first = held * b / blocks, last = held * (b + 1) / blocks;
                    panels(laid + first * k, w, k, begin + first, last - first, together * g,
                           std::min(count, together * (g + 1)), e);
                }
        }
    }
}

template <class T>
void rotate(T* x, const T* cos, const T* sin, i64 rows, i64 row_stride, i64 heads, i64 head_dim, i64 dim) {
    const i64 half = dim / 2;
#pragma omp parallel for schedule(static) if (rows > 16)
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++) {
            T* p = x + r * row_stride + h * head_dim;
            const T *c = cos + r * dim, *s = sin + r * dim;
            for (i64 i = 0; i < half; i += kLanes) {
                const vec a = widen(p + i), b = widen(p + half + i);
                narrow(p + i, a * widen(c + i) + b * widen(s + i));
                narrow(p + half + i, b * widen(c + half + i) + a * widen(s + half + i));
            }
        }
}

}  // namespace

extern "C" {

// As headway_linear, with fp32 arithmetic: out (rows, n) = prologue(x) W^T + bias + residual, W in panels.
void headway_linear_fp32(const float* x, const float* norm, float eps, int gated, const float* w, const float* bias,
                         const float* residual, float* out, i64 rows, i64 n, i64 k) {
    linear(x, norm, eps, gated, w, bias, residual, out, rows, n, k);
}

void headway_linear_bf16(const bf16* x, const bf16* norm, float eps, int gated, const bf16* w, const bf16* bias,
                         const bf16* residual, bf16* out, i64 rows, i64 n, i64 k) {
    linear(x, norm, eps, gated, w, bias, residual, out, rows, n, k);
}

// As headway_rotate.
void headway_rotate_fp32(float* x, const float* cos, const float* sin, i64 rows, i64 row_stride, i64 heads, i64 head_dim,
                         i64 dim) {
    rotate(x, cos, sin, rows, row_stride, heads, head_dim, dim);
}

void headway_rotate_bf16(bf16* x, const bf16* cos, const bf16* sin, i64 rows, i64 row_stride, i64 heads, i64 head_dim,
                         i64 dim) {
    rotate(x, cos, sin, rows, row_stride, heads, head_dim, dim);
}
}
