// Linear layers and rotation of a bf16 decoder, for any number of rows.
//
// Called through ctypes by headway.runtime.attention.native, which compiles these files for the processor at hand. Nothing here
// depends on torch: pointers, sizes and strides (in elements) only. Accumulation is fp32; results are rounded to bf16
// once, where the general path rounds one or two times. Threads are those of the OpenMP runtime already in the process.
//
// A weight (n, k) lies in panels of 16 columns of the result, [n / 16][k / 2][16][2]: one vector holds 16 columns and two
// inputs, as vdpbf16ps takes them, and 32 of them are a tile of AMX. Rows are laid the same way, in blocks of at most 12:
// [k / 2][rows][2], to be broadcast; for AMX in blocks of 16 as tiles, [k / 32][16][32]. An element of the result is the
// same sum in the same order in any block: it does not depend on the other rows. By AMX it is another order, so that
// where there is AMX it takes any number of rows.

#ifndef __AVX512BF16__
extern "C" int headway_supported() { return 0; }
#else
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bf16_amx.h"

namespace {

constexpr i64 kRows = 12;       // in a block: 12 x 2 accumulators
constexpr i64 kFew = 6;         // blocks up to here take 4 panels at a time
constexpr i64 kShare = 128;     // rows of a thread from which on it takes all panels of its own rows

struct Epilogue {
    const bf16* bias;
    const bf16* residual;
    bf16* out;
    i64 n;
    void put(i64 m, i64 c, __m512 value) const {
        const __mmask16 live = n - c >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - c)) - 1);
        if (bias) value = _mm512_add_ps(value, widen(live, bias + c));
        if (residual) value = _mm512_add_ps(value, widen(live, residual + m * n + c));
        _mm256_mask_storeu_epi16(out + m * n + c, live, (__m256i)_mm512_cvtneps_pbh(value));
    }
    // 32 whole columns of `rows` rows, from tiles of 16 rows and 16 columns.
    void put_pairs(i64 m, i64 rows, i64 c, const float* sums) const {
        __m512 low = _mm512_setzero_ps(), high = low;
        if (bias) low = widen(bias + c), high = widen(bias + c + 16);
        for (i64 r = 0; r < rows; r++) {
            const float* from = sums + r / 16 * 512 + r % 16 * 16;
            const i64 at = (m + r) * n + c;
            __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 256);
            if (bias) a = _mm512_add_ps(a, low), b = _mm512_add_ps(b, high);
            if (residual) a = _mm512_add_ps(a, widen(residual + at)), b = _mm512_add_ps(b, widen(residual + at + 16));
            _mm512_storeu_si512(out + at, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
    }
};

// R rows from `row` on, C panels from column 16 * `panel` on. x: their block.
template <int R, int C>
void tile(const uint32_t* x, const bf16* w, i64 k, i64 row, i64 panel, const Epilogue& e) {
    __m512 acc[R * C];
    for (auto& a : acc) a = _mm512_setzero_ps();
    w += panel * 16 * k;
    for (i64 p = 0; p < k / 2; p++) {
        __m512bh in[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            in[c] = pack(w + c * 16 * k + p * 32);
            if (R <= kFew) _mm_prefetch((const char*)(w + c * 16 * k + p * 32 + 1024), _MM_HINT_T0);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const __m512bh a = (__m512bh)_mm512_set1_epi32(int(x[p * R + r]));
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r * C + c] = _mm512_dpbf16_ps(acc[r * C + c], a, in[c]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) e.put(row + r, 16 * (panel + c), acc[r * C + c]);
}

using TileFn = void (*)(const uint32_t*, const bf16*, i64, i64, i64, const Epilogue&);
#define ROWS_UP_TO_6(C) tile<1, C>, tile<2, C>, tile<3, C>, tile<4, C>, tile<5, C>, tile<6, C>
#define ROWS_UP_TO_12(C) ROWS_UP_TO_6(C), tile<7, C>, tile<8, C>, tile<9, C>, tile<10, C>, tile<11, C>, tile<12, C>
constexpr TileFn kOne[] = {ROWS_UP_TO_12(1)}, kTwo[] = {ROWS_UP_TO_12(2)}, kFour[] = {ROWS_UP_TO_6(4)};

// The panels first .. last - 1 of `rows` rows.
void panels(const uint32_t* x, const bf16* w, i64 k, i64 row, i64 rows, i64 first, i64 last, const Epilogue& e) {
    while (first < last) {
        const i64 left = last - first, taken = left >= 4 && rows <= kFew ? 4 : left >= 2 ? 2 : 1;
        (taken == 4 ? kFour : taken == 2 ? kTwo : kOne)[rows - 1](x, w, k, row, first, e);
        first += taken;
    }
}

// Rows row .. row + rows, at most 16 or, with R 2, 32, and C panels, from column 16 * `panel` on. x: their R blocks. later:
// what is fetched into the second cache, `lines` cache lines a step.
template <int R, int C>
void amx_tile(const uint32_t* x, const bf16* w, i64 k, i64 row, i64 rows, i64 panel, const char* later, i64 lines,
              const Epilogue& e) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    w += panel * 16 * k;
    // Each operand is loaded for the next step as soon as it was used: tiles are loaded while others are multiplied.
    TILE_STREAM(4, x, 64);
    TILE_LOAD(6, w, 64);
    if (R == 2) TILE_STREAM(5, x + 8 * k, 64);
    if (C == 2) TILE_LOAD(7, w + 16 * k, 64);
    for (i64 p = 0; p < k / 2; p += 16) {
        if (R == 1)
            for (int line = 0; line < 16; line++)
#pragma GCC unroll 2
                for (int c = 0; c < C; c++)
                    _mm_prefetch((const char*)(w + c * 16 * k + (p + line) * 32 + 1024), _MM_HINT_T0);
        for (const char* end = later + 64 * lines; later < end; later += 64) _mm_prefetch(later, _MM_HINT_T1);
        const i64 next = p + 16 < k / 2 ? p + 16 : p;
        TILE_MULTIPLY(0, 4, 6);
        if (C == 2) TILE_MULTIPLY(1, 4, 7);
        TILE_STREAM(4, x + 16 * next, 64);
        if (R == 2) TILE_MULTIPLY(2, 5, 6);
        TILE_LOAD(6, w + 32 * next, 64);
        if (R == 2 && C == 2) TILE_MULTIPLY(3, 5, 7);
        if (R == 2) TILE_STREAM(5, x + 8 * k + 16 * next, 64);
        if (C == 2) TILE_LOAD(7, w + 16 * k + 32 * next, 64);
    }
    alignas(64) float sums[4][256];
    TILE_STORE(0, sums[0], 64);
    TILE_STORE(1, sums[1], 64);
    TILE_STORE(2, sums[2], 64);
    TILE_STORE(3, sums[3], 64);
    if (C == 2 && 16 * (panel + 2) <= e.n) {
        e.put_pairs(row, rows, 16 * panel, sums[0]);
        return;
    }
    for (i64 r = 0; r < rows; r++)
        for (int c = 0; c < C; c++) e.put(row + r, 16 * (panel + c), _mm512_load_ps(sums[r / 16 * 2 + c] + r % 16 * 16));
}

// The prologues write a row in pieces of 32 columns, `apart` elements from one to the next.
void narrow(bf16* to, __m512 first, __m512 second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

void normalise(const bf16* x, const bf16* weight, float eps, i64 k, bf16* to, i64 apart) {
    __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (i64 c = 0; c < k; c += 32) {
        const __m512 a = widen(x + c), b = widen(x + c + 16);
        squares[0] = _mm512_fmadd_ps(a, a, squares[0]);
        squares[1] = _mm512_fmadd_ps(b, b, squares[1]);
    }
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1]));
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(sum / float(k) + eps));
    const auto scaled = [&](i64 c) { return _mm512_mul_ps(_mm512_mul_ps(widen(x + c), factor), widen(weight + c)); };
    for (i64 c = 0; c < k; c += 32, to += apart) narrow(to, scaled(c), scaled(c + 16));
}

// silu(gate) * up. Power and inverse are off by 7e-5 of it at most: little, where the result has 8 bits.
void swiglu(const bf16* x, i64 k, bf16* to, i64 apart) {
    const auto mixed = [&](i64 c) {
        const __m512 gate = widen(x + c), power = _mm512_mul_ps(gate, _mm512_set1_ps(-kLog2e));
        // Not beyond what has an inverse.
        const __m512 e = short_exp2_16(_mm512_min_ps(power, _mm512_set1_ps(120.0f)));
        const __m512 sigmoid = _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e));
        return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid), widen(x + k + c));
    };
    for (i64 c = 0; c < k; c += 32, to += apart) narrow(to, mixed(c), mixed(c + 16));
}

// Rows (rows, k), or (rows, 2k) if gated, before the prologue.
struct Rows {
    const bf16 *x, *norm;
    float eps;
    int gated;
    i64 k;
    // Row `row` after the prologue, in pieces of 32 columns from `to` on.
    void write(i64 row, bf16* to, i64 apart) const {
        const bf16* from = x + row * (gated ? 2 * k : k);
        if (gated) swiglu(from, k, to, apart);
        else if (norm) normalise(from, norm, eps, k, to, apart);
        else
            for (i64 c = 0; c < k; c += 32, to += apart) _mm512_storeu_si512(to, _mm512_loadu_si512(from + c));
    }
    // The same in one piece: in `scratch`, or where it lies.
    const bf16* get(i64 row, bf16* scratch) const {
        if (!gated && !norm) return x + row * k;
        write(row, scratch, 32);
        return scratch;
    }
};

// How the kernels of vectors and of tile registers differ. `lay`: block b of the `held` rows from `begin` on, into the room of
// all; `multiply`: all of them by some panels.
struct ByVectors {
    using Registers = NoRegisters;
    static constexpr i64 kTogether = 240;  // rows that one pass over the weights serves
    static i64 blocks(i64 held) { return (held + kRows - 1) / kRows; }
    static i64 panels_together(i64 held) { return held <= kFew ? 4 : 2; }
    static void lay(const Rows& in, i64 begin, i64 held, i64 b, bf16* scratch, uint32_t* laid) {
        const i64 first = held * b / blocks(held), rows = held * (b + 1) / blocks(held) - first;
        uint32_t* to = laid + first * in.k / 2;
        for (i64 r = 0; r < rows; r++) {
            const bf16* from = in.get(begin + first + r, scratch);
            if (rows == 1) memcpy(to, from, in.k * sizeof(bf16));
            else
                for (i64 p = 0; p < in.k / 2; p++) memcpy(to + p * rows + r, from + 2 * p, 4);
        }
    }
    static void multiply(const uint32_t* laid, const bf16* w, i64 k, i64 begin, i64 held, i64 panel, i64 last, const Epilogue& e) {
        for (i64 b = 0; b < blocks(held); b++) {
            const i64 first = held * b / blocks(held), end = held * (b + 1) / blocks(held);
            panels(laid + first * k / 2, w, k, begin + first, end - first, panel, last, e);
        }
    }
};

struct ByTiles {
    using Registers = TileRegisters;
    static constexpr i64 kTogether = 256;
    static i64 blocks(i64 held) { return (held + 15) / 16; }
    static i64 panels_together(i64) { return 2; }
    static void lay(const Rows& in, i64 begin, i64 held, i64 b, bf16*, uint32_t* laid) {
        const i64 first = 16 * b, rows = std::min<i64>(16, held - first);
        bf16* to = (bf16*)(laid + first * in.k / 2);
        if (rows < 16) memset(to, 0, 16 * in.k * sizeof(bf16));
        for (i64 r = 0; r < rows; r++) in.write(begin + first + r, to + 32 * r, 512);
    }
    static void multiply(const uint32_t* laid, const bf16* w, i64 k, i64 begin, i64 held, i64 panel, i64 last, const Epilogue& e) {
        // Each tile fetches its part of the next two panels, which are 32 lines for each step.
        const i64 tiles = (held + 31) / 32, lines = (32 + tiles - 1) / tiles;
        const char* later = (const char*)(w + 16 * last * k);
        for (i64 first = 0; first < held; first += 32, later += lines * 2 * k) {
            const i64 rows = std::min<i64>(32, held - first);
            (rows > 16 ? last - panel == 2 ? amx_tile<2, 2> : amx_tile<2, 1> : last - panel == 2 ? amx_tile<1, 2> : amx_tile<1, 1>)(
                laid + first * k / 2, w, k, begin + first, rows, panel, later, lines, e);
        }
    }
};

// Memory for a pass over so many rows, from the begin of a cache line on: no row of a tile lies in two.
uint32_t* room(std::vector<uint32_t>& kept, i64 rows, i64 k) {
    const i64 size = (rows + 15) / 16 * 16 * k / 2 + 16;
    if (i64(kept.size()) < size) kept.resize(size);
    return (uint32_t*)((uintptr_t(kept.data()) + 63) / 64 * 64);
}

// Many rows are divided among the threads, in the same way in each call: a thread finds in its own cache what it wrote, and
// waits for no other. Of few, each thread takes some panels, so that each weight is read once.
template <class Way>
void linear(const Rows& in, const bf16* w, const Epilogue& e, i64 rows) {
    static thread_local std::vector<uint32_t> shared;
    const i64 k = in.k, count = (e.n + 15) / 16;
    uint32_t* const common = room(shared, std::min(rows, Way::kTogether), k);
#pragma omp parallel
    {
        static thread_local std::vector<uint32_t> own;
        static thread_local std::vector<bf16> scratch;
        if (i64(scratch.size()) < k) scratch.resize(k);
        [[maybe_unused]] const typename Way::Registers registers;
        const i64 threads = omp_get_num_threads(), share = (rows + 32 * threads - 1) / (32 * threads) * 32;
        if (rows >= kShare * threads) {
            const i64 from = share * omp_get_thread_num(), to = std::min(rows, from + share);
            uint32_t* const laid = room(own, Way::kTogether, k);
            for (i64 begin = from; begin < to; begin += Way::kTogether) {
                const i64 held = std::min(to - begin, Way::kTogether), wide = Way::panels_together(held);
                for (i64 b = 0; b < Way::blocks(held); b++) Way::lay(in, begin, held, b, scratch.data(), laid);
                for (i64 panel = 0; panel < count; panel += wide)
                    Way::multiply(laid, w, k, begin, held, panel, std::min(count, panel + wide), e);
            }
        } else {
            for (i64 begin = 0; begin < rows; begin += Way::kTogether) {
                const i64 held = std::min(rows - begin, Way::kTogether), wide = Way::panels_together(held);
#pragma omp for schedule(static)
                for (i64 b = 0; b < Way::blocks(held); b++) Way::lay(in, begin, held, b, scratch.data(), common);
#pragma omp for schedule(static)
                for (i64 panel = 0; panel < count; panel += wide)
                    Way::multiply(common, w, k, begin, held, panel, std::min(count, panel + wide), e);
            }
        }
    }
}

}  // namespace

extern "C" {

int headway_supported() { return 1; }

// Whether the kernels by tiles of AMX were compiled, as far as a compiler knew them.
int headway_tiles() { return HEADWAY_TILES; }

// out (rows, n) = prologue(x) W^T + bias + residual, W in panels. Prologue: RMS norm by `norm`, or SwiGLU of x (rows, 2k),
// or none. k is a multiple of 32. out may be residual.
void headway_linear(const bf16* x, const bf16* norm, float eps, int gated, const bf16* w, const bf16* bias,
                    const bf16* residual, bf16* out, i64 rows, i64 n, i64 k) {
    linear<ByVectors>({x, norm, eps, gated, k}, w, {bias, residual, out, n}, rows);
}

void headway_linear_amx(const bf16* x, const bf16* norm, float eps, int gated, const bf16* w, const bf16* bias,
                        const bf16* residual, bf16* out, i64 rows, i64 n, i64 k) {
    linear<ByTiles>({x, norm, eps, gated, k}, w, {bias, residual, out, n}, rows);
}

// Rotate the first `heads` heads of each row in place: pairs (i, i + dim/2), cos and signed sin (rows, dim) as RotaryTable.
void headway_rotate(bf16* x, const bf16* cos, const bf16* sin, i64 rows, i64 row_stride, i64 heads, i64 head_dim, i64 dim) {
    i64 half = dim / 2;
#pragma omp parallel for schedule(static) if (rows > 16)
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
