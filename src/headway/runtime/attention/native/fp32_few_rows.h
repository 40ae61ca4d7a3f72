// Few rows that see the same keys, as those of a decode: lanes are dimensions, so that every lane works, and keys and
// values are read at the speed of memory. Four rows at a time; a row beyond the last repeats it.
#pragma once

#include <algorithm>
#include <cstring>

#include "fp32_vectors.h"

using i64 = int64_t;

namespace {

constexpr i64 kAhead = 16;                 // keys

// The sum of a vector's lanes, four by four.
inline four folded(vec x) {
    four sum = *(const four*)&x;
    for (int i = 1; i < kLanes / 4; i++) sum += *((const four*)&x + i);
    return sum;
}

// Sums of neighbours: x, y, x, y.
inline four halves(four x, four y) {
    return __builtin_shufflevector(x, y, 0, 4, 2, 6) + __builtin_shufflevector(x, y, 1, 5, 3, 7);
}

// p (keys, 4): the products of four rows with each key.
inline void few_scores(i64 dim, const float* q, const Block& b, float* p) {
    constexpr int kAtOnce = kStep / 2;     // keys; 4 x 4 accumulators, or 2 x 4
    for (int j = 0; j < b.keys; j += kAtOnce) {
        vec acc[4 * kAtOnce];
        const float* k[kAtOnce];
        for (int i = 0; i < kAtOnce; i++) {
            k[i] = b.k + std::min(j + i, b.keys - 1) * b.row;
            for (i64 c = 0; c < dim; c += 16) {
                __builtin_prefetch(k[i] + kAhead * b.row + c);
                __builtin_prefetch(b.v + (j + i) * b.row + c);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < 4 * kAtOnce; i++) acc[i] = vec{};
        for (i64 d = 0; d < dim; d += kLanes) {
#pragma GCC unroll 4
            for (int i = 0; i < kAtOnce; i++) {
                vec key;
                memcpy(&key, k[i] + d, sizeof(key));
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) acc[4 * i + r] += key * load(q + r * dim + d);
            }
        }
        for (int i = 0; i < kAtOnce; i++) {
            const vec* of = acc + 4 * i;
            const four xy = halves(folded(of[0]), folded(of[1])), zw = halves(folded(of[2]), folded(of[3]));
            *(four*)(p + 4 * (j + i)) =
                __builtin_shufflevector(xy, zw, 0, 1, 4, 5) + __builtin_shufflevector(xy, zw, 2, 3, 6, 7);
        }
    }
}

// o (4, dim) += P V, C vectors of dimensions from `from` on.
template <int C>
inline void few_values(i64 dim, i64 from, float* o, const float* p, const Block& b) {
    vec acc[4 * C];
#pragma GCC unroll 16
    for (int i = 0; i < 4 * C; i++) acc[i] = load(o + i / C * dim + from + i % C * kLanes);
    const float* v = b.v + from;
    for (int j = 0; j < b.keys; j++, v += b.row, p += 4) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            vec value;
            memcpy(&value, v + c * kLanes, sizeof(value));
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) acc[r * C + c] += value * p[r];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4 * C; i++) store(o + i / C * dim + from + i % C * kLanes, acc[i]);
}

// Four rows over a block. high, sum: of the four rows, over and over: a lane each, four by four.
inline void few_attend(i64 dim, const float* q, float* o, float* high, float* sum, const Block& b, float* p) {
    few_scores(dim, q, b, p);
    const int end = 4 * b.keys, padded = (end + kLanes - 1) / kLanes * kLanes;
    for (int i = end; i < padded; i++) p[i] = -INFINITY;
    vec top = load(high), total = vec{};
    for (int i = 0; i < padded; i += kLanes) top = top < load(p + i) ? load(p + i) : top;
    four most = *(const four*)&top;
    for (int i = 1; i < kLanes / 4; i++) {
        const four other = *((const four*)&top + i);
        most = most < other ? other : most;
    }
    for (int i = 0; i < kLanes / 4; i++) *((four*)&top + i) = most;
    const vec less = exp2(load(high) - top);
    store(high, top);
    for (int i = 0; i < padded; i += kLanes) {
        const vec x = exp2(load(p + i) - top);
        total += x;
        store(p + i, x);
    }
    // Each repetition holds the sums of its own keys.
    store(sum, load(sum) * less + total);
    for (int r = 0; r < 4; r++)
        if (less[r] != 1.0f)
            for (i64 d = 0; d < dim; d += kLanes) store(o + r * dim + d, load(o + r * dim + d) * less[r]);
    constexpr int kMost = kStep / 2;       // vectors; 4 x 4 accumulators, or 4 x 2
    i64 d = 0;
    for (; d + kMost * kLanes <= dim; d += kMost * kLanes) few_values<kMost>(dim, d, o, p, b);
    for (; d < dim; d += kLanes) few_values<1>(dim, d, o, p, b);
}

}  // namespace
