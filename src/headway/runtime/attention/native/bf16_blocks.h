// One thread's memory, and blocks of keys and values on their way into it.
#pragma once

#include "bf16_call.h"

namespace {

// The memory of one thread, for the largest heads; smaller ones touch less of it.
struct Room {
    alignas(64) uint32_t q[kBlock * kMostDim / 2];
    alignas(64) float o[kBlock * kMostDim];
    alignas(64) bf16 k[kKeys * kMostDim];
    alignas(64) uint32_t v[kKeys / 2 * kMostDim];
    alignas(64) uint32_t p[kKeys / 2 * 16 * kWide];
    alignas(64) float s[kAmxStep * 16 * kAmxWide];
    const bf16* rows[kKeys];
    Tile tiles[kBlock / 16 / kAmxWide];
};

alignas(64) const bf16 kZeros[kMostDim] = {};

inline __m512i words(const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }

// Pair j of the block's values from two rows.
inline void interleave(i64 dim, const bf16* even, const bf16* odd, uint32_t* v, int j) {
    for (int t = 0; t < dim / 16; t++) {
        const __m512i x = _mm512_or_si512(words(even + 16 * t), _mm512_slli_epi32(words(odd + 16 * t), 16));
        uint32_t* to = v + (t * kKeys + j) * 8;
        _mm256_store_si256((__m256i*)to, _mm512_castsi512_si256(x));
        _mm256_store_si256((__m256i*)(to + kKeys / 2 * 8), _mm512_extracti64x4_epi64(x, 1));
    }
}

// How the kernels of vectors and of tile registers differ: rows and keys at a time, how values lie, and `attend`.
struct ByVectors {
    using Registers = NoRegisters;
    static constexpr int kVectors = kWide, kStep = ::kStep;
    static void values(i64 dim, int keys, Room& room) {
        for (int j = 0; j < keys / 2; j++) interleave(dim, room.rows[2 * j], room.rows[2 * j + 1], room.v, j);
    }
    static void attend(i64 dim, Tile& t, const bf16* k, i64 first, int keys, float scale, Room& room, Ahead& ahead) {
        (t.vectors == 1 ? ::attend<1> : t.vectors == 2 ? ::attend<2> : ::attend<3>)(dim, t, k, room.v, first, keys, scale,
                                                                                 room.p, ahead);
    }
};

struct ByTiles {
    using Registers = TileRegisters;
    static constexpr int kVectors = kAmxWide, kStep = kAmxStep;
    // 32 keys and 32 dimensions at a time: pairs of keys are woven into words, which `transpose16` turns.
    static void values(i64 dim, int keys, Room& room) {
        for (int j = 0; j < keys; j += kAmxStep)
            for (i64 d = 0; d < dim; d += 32) {
                __m512 low[16], high[16];
                for (int i = 0; i < 16; i++) {
                    const __m512i even = (__m512i)pack(room.rows[j + 2 * i] + d), odd = (__m512i)pack(room.rows[j + 2 * i + 1] + d);
                    low[i] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(even, odd));
                    high[i] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(even, odd));
                }
                transpose16(low);
                transpose16(high);
                // Weaving takes four dimensions of each eight to `low`.
                float* to = (float*)((bf16*)room.v + j * dim + d * 32);
                for (int i = 0; i < 16; i++) {
                    _mm512_store_ps(to + (i / 4 * 8 + i % 4) * 16, low[i]);
                    _mm512_store_ps(to + (i / 4 * 8 + 4 + i % 4) * 16, high[i]);
                }
            }
    }
    static void attend(i64 dim, Tile& t, const bf16* k, i64 first, int keys, float scale, Room& room, Ahead& ahead) {
        (t.vectors == 1 ? amx_attend<1> : amx_attend<2>)(dim, t, k, (const bf16*)room.v, first, keys, scale, room.s, room.p, ahead);
    }
};

// Keys begin .. begin + held of a KV head: values to room.v, and the keys where they lie or in room.k, with zeros up to the
// next multiple of Way::kStep.
template <class Way>
const bf16* load_block(const Call& call, const bf16* keys, const bf16* values, Slots& slots, i64 begin, int held, Room& room) {
    const i64 dim = call.dim;
    const int padded = (held + Way::kStep - 1) / Way::kStep * Way::kStep;
    i64 side, slot = slots.find(begin, side);
    const bool in_place = call.kv_row == dim && side >= padded;
    const bf16* k = in_place ? keys + slot * dim : room.k;
    for (int done = 0; done < held;) {
        slot = slots.find(begin + done, side);
        const int stop = int(std::min<i64>(held, done + side));
        for (i64 at = slot * call.kv_row; done < stop; done++, at += call.kv_row) {
            if (!in_place)
                for (i64 c = 0; c < dim; c += 32) _mm512_store_si512(room.k + done * dim + c, (__m512i)pack(keys + at + c));
            room.rows[done] = values + at;
        }
    }
    for (int j = held; j < padded; j++) room.rows[j] = kZeros;
    if (!in_place) memset(room.k + held * dim, 0, (padded - held) * dim * sizeof(bf16));
    Way::values(dim, padded, room);
    return k;
}

}  // namespace
