// The tile registers of AMX: eight of 16 rows of 64 bytes.
//
// The instructions are written as assembly: they need no compiler flag, so that one library serves processors with and
// without them, and `tileloadd` of the compiler's own header does not say that it reads memory.
#pragma once

#include <cstdint>

#include "bf16_vectors.h"

#ifndef HEADWAY_TILES
#if __has_include(<amxtileintrin.h>)
#define HEADWAY_TILES 1
#else
#define HEADWAY_TILES 0
#endif
#endif
#if HEADWAY_TILES
#define AMX(...) asm volatile(__VA_ARGS__)
#else
#define AMX(...)
#endif
#define TILE_ZERO(t) AMX("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, from, stride) \
    AMX("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void*)(from)), "r"(i64(stride)) : "memory")
// Of what is read once: it leaves in the first cache what is read again.
#define TILE_STREAM(t, from, stride) \
    AMX("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"((const void*)(from)), "r"(i64(stride)) : "memory")
#define TILE_STORE(t, to, stride) AMX("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void*)(to)), "r"(i64(stride)) : "memory")
#define TILE_MULTIPLY(c, a, b) AMX("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

namespace {

// This thread's tile registers as they are used here for as long as it lives; then as they were.
class TileRegisters {
    struct Shapes {
        uint8_t palette = 0, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    };
    alignas(64) Shapes before_, now_;

public:
    TileRegisters() {
        now_.palette = 1;
        for (int t = 0; t < 8; t++) now_.bytes[t] = 64, now_.rows[t] = 16;
        AMX("sttilecfg %0" : "=m"(before_));
        AMX("ldtilecfg %0" ::"m"(now_));
    }
    ~TileRegisters() { AMX("ldtilecfg %0" ::"m"(before_)); }
};

// What a kernel by vectors holds instead of `TileRegisters`.
struct NoRegisters {};

}  // namespace
