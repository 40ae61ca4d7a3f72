// The calls of bf16 attention.
#pragma once

#include "bf16_amx_tile.h"
#include "jobs.h"

namespace {

constexpr i64 kBlock = 16 * kWide * 16;    // rows in a job, at most
constexpr i64 kMostDim = 128;

using Call = CallOf<bf16>;

inline void put(const Call& call, Place at, i64 d, __m512 x) {
    const i64 to = at.token * call.out_row + at.head * call.out_head + d;
    if (call.wide) _mm512_storeu_ps((float*)call.out + to, x);
    else narrow((bf16*)call.out + to, x);
}

}  // namespace
