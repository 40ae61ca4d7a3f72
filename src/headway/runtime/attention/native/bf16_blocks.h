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
    Tile tiles[kBlock / 16 / kWide];
};

inline __m512i words(const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }

// Pair j of the block's values from two rows; no second row means zeros.
inline void interleave(i64 dim, const bf16* even, const bf16* odd, uint32_t* v, int j) {
    for (int t = 0; t < dim / 16; t++) {
        __m512i x = words(even + 16 * t);
        if (odd) x = _mm512_or_si512(x, _mm512_slli_epi32(words(odd + 16 * t), 16));
        uint32_t* to = v + (t * kKeys + j) * 8;
        _mm256_store_si256((__m256i*)to, _mm512_castsi512_si256(x));
        _mm256_store_si256((__m256i*)(to + kKeys / 2 * 8), _mm512_extracti64x4_epi64(x, 1));
    }
}

// Keys begin .. begin + held of a KV head: values to room.v, and the keys where they lie or in room.k.
const bf16* load_block(const Call& call, const bf16* keys, const bf16* values, Slots& slots, i64 begin, int held, Room& room) {
    const i64 dim = call.dim;
    const int padded = (held + kStep - 1) / kStep * kStep;
    i64 side, slot = slots.find(begin, side);
    const bool in_place = call.kv_row == dim && side >= padded;
    const bf16* k = in_place ? keys + slot * dim : room.k;
    const bf16* even = nullptr;
    for (int done = 0; done < held;) {
        slot = slots.find(begin + done, side);
        const int stop = int(std::min<i64>(held, done + side));
        for (i64 at = slot * call.kv_row; done < stop; done++, at += call.kv_row) {
            if (!in_place)
                for (i64 c = 0; c < dim; c += 32) _mm512_store_si512(room.k + done * dim + c, (__m512i)pack(keys + at + c));
            if (done % 2) interleave(dim, even, values + at, room.v, done / 2);
            even = values + at;
        }
    }
    if (held % 2) interleave(dim, even, nullptr, room.v, held / 2);
    for (int j = (held + 1) / 2; j < padded / 2; j++)
        for (int t = 0; t < dim / 8; t++) memset(room.v + (t * kKeys / 2 + j) * 8, 0, 32);
    if (!in_place) memset(room.k + held * dim, 0, (padded - held) * dim * sizeof(bf16));
    return k;
}

}  // namespace
