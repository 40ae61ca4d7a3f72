// Attention of chunks of many rows over the keys and values of a pool. Conventions as in bf16_linear.cpp.
//
// The heads that share a KV head are rows too: row r of a chunk's KV head is token r / group, head r % group. A job is up
// to 768 such rows over one span of keys; long spans are cut where there would be fewer jobs than keep all threads busy,
// and their answers merged by log-sum-exp.

#ifdef __AVX512BF16__
#include <omp.h>

#include "bf16_blocks.h"

namespace {

void open_tile(const Call& call, const Job& job, i64 first, Tile& t) {
    const Chunk& chunk = call.chunks[job.chunk];
    for (int n = 0; n < t.vectors; n++) {
        const bf16* from[16];
        for (int lane = 0; lane < 16; lane++) {
            const i64 r = std::min(first + 16 * n + lane, job.first + job.rows - 1);
            const Place at = place(call, job.chunk, job.head, r);
            from[lane] = call.q + at.token * call.q_row + at.head * call.q_head;
            t.most = std::min(job.end, chunk.causal ? chunk.keys - chunk.rows + r / call.group + 1 : chunk.keys);
            if (n == 0 && lane == 0) t.least = t.most;
            t.limit[16 * n + lane] = int32_t(t.most);
            t.high[16 * n + lane] = kNever;
            t.sum[16 * n + lane] = 0.0f;
        }
        for (i64 c = 0; c < call.dim / 32; c++) {
            __m512 x[16];
            for (int lane = 0; lane < 16; lane++) x[lane] = _mm512_loadu_ps((const float*)(from[lane] + 32 * c));
            transpose16(x);
            for (int d = 0; d < 16; d++) _mm512_store_ps((float*)(t.q + ((16 * c + d) * t.vectors + n) * 16), x[d]);
        }
    }
    memset(t.o, 0, 16 * t.vectors * call.dim * sizeof(float));
}

// Write the tile's rows, or their part. A row that saw no key is zeros with -inf.
void close_tile(const Call& call, const Job& job, i64 first, const Tile& t) {
    for (int n = 0; n < t.vectors; n++) {
        const i64 base = first + 16 * n;
        const int live = int(std::min<i64>(16, job.first + job.rows - base));
        const __m512 sum = _mm512_load_ps(t.sum + 16 * n);
        const __mmask16 any = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        const __m512 inverse = _mm512_maskz_div_ps(any, _mm512_set1_ps(1.0f), sum);
        float* part = job.part < 0 ? nullptr : call.parts.get() + (job.part + base - job.first) * call.part_size();
        for (i64 c = 0; c < call.dim / 16; c++) {
            __m512 x[16];
            for (int d = 0; d < 16; d++)
                x[d] = _mm512_mul_ps(inverse, _mm512_load_ps(t.o + ((16 * c + d) * t.vectors + n) * 16));
            transpose16(x);
            for (int lane = 0; lane < live; lane++) {
                if (part) _mm512_storeu_ps(part + lane * call.part_size() + 16 * c, x[lane]);
                else put(call, place(call, job.chunk, job.head, base + lane), 16 * c, x[lane]);
            }
        }
        for (int lane = 0; lane < live; lane++) {
            const float total = t.sum[16 * n + lane];
            const float lse = total == 0 ? -INFINITY : t.high[16 * n + lane] * call.scale + std::log(total);
            if (part) part[lane * call.part_size() + call.dim] = lse;
            else put_lse(call, place(call, job.chunk, job.head, base + lane), lse);
        }
    }
}

template <class Way>
void run(const Call& call, const Job& job) {
    static thread_local std::unique_ptr<Room> kept(new Room);
    Room& room = *kept;
    const Chunk& chunk = call.chunks[job.chunk];
    const i64 dim = call.dim, vectors = (job.rows + 15) / 16, count = (vectors + Way::kVectors - 1) / Way::kVectors;
    for (i64 i = 0; i < count; i++) {
        const i64 from = vectors * i / count;
        Tile& t = room.tiles[i];
        t.vectors = int(vectors * (i + 1) / count - from);
        t.q = room.q + from * 16 * dim / 2;
        t.o = room.o + from * 16 * dim;
        open_tile(call, job, job.first + 16 * from, t);
    }
    const bf16 *keys = call.keys + job.head * call.kv_head, *values = call.values + job.head * call.kv_head;
    Slots slots{call.runs + 2 * chunk.run};
    for (i64 begin = job.begin; begin < job.end; begin += kKeys) {
        const int held = int(std::min<i64>(kKeys, job.end - begin));
        const bf16* k = load_block<Way>(call, keys, values, slots, begin, held, room);
        Ahead ahead;
        if (begin + held < job.end && call.kv_row == dim) {
            i64 side, slot = slots.find(begin + held, side);
            ahead.k = (const char*)(keys + slot * dim), ahead.v = (const char*)(values + slot * dim);
            ahead.left = std::min<i64>(side, kKeys) * dim * i64(sizeof(bf16));
            ahead.lines = int(ahead.left / 64 / (kKeys / Way::kStep * count) + 1);
        }
        for (i64 i = 0; i < count; i++) {
            Tile& t = room.tiles[i];
            if (t.most > begin) Way::attend(dim, t, k, begin, held, call.scale * kLog2e, room, ahead);
        }
    }
    for (i64 i = 0; i < count; i++) close_tile(call, job, job.first + 16 * (vectors * i / count), room.tiles[i]);
}

// The answer of row i of a cut block from its pieces.
void join(const Call& call, const Cut& cut, i64 i) {
    const i64 size = call.part_size();
    const float* part = call.parts.get() + (cut.part + i) * size;
    const Place at = place(call, cut.chunk, cut.head, cut.first + i);
    float high = -INFINITY, total = 0.0f;
    for (i64 s = 0; s < cut.pieces; s++) high = std::max(high, part[s * cut.rows * size + call.dim]);
    const float anchor = high == -INFINITY ? 0.0f : high;
    __m512 acc[8];
    for (auto& a : acc) a = _mm512_setzero_ps();
    for (i64 s = 0; s < cut.pieces; s++) {
        const float* piece = part + s * cut.rows * size;
        const float weight = std::exp(piece[call.dim] - anchor);
        total += weight;
        for (i64 c = 0; c < call.dim / 16; c++)
            acc[c] = _mm512_fmadd_ps(_mm512_set1_ps(weight), _mm512_loadu_ps(piece + 16 * c), acc[c]);
    }
    const __m512 inverse = _mm512_set1_ps(total == 0 ? 0.0f : 1.0f / total);
    for (i64 c = 0; c < call.dim / 16; c++) put(call, at, 16 * c, _mm512_mul_ps(acc[c], inverse));
    put_lse(call, at, anchor + std::log(total));
}

template <class Way>
void prefill(Call call, i64 count, i64 kv_heads) {
    std::vector<Job> jobs;
    std::vector<Cut> cuts;
    divide(call, {16, kBlock, kKeys}, count, kv_heads, omp_get_max_threads(), jobs, cuts);
#pragma omp parallel
    {
        [[maybe_unused]] const typename Way::Registers held;
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < jobs.size(); i++) run<Way>(call, jobs[i]);
        for (const Cut& cut : cuts) {
#pragma omp for schedule(static) nowait
            for (i64 i = 0; i < cut.rows; i++) join(call, cut, i);
        }
    }
}

}  // namespace

// Softmax attention of `count` chunks. q: row and head strides; keys, values: one layer, (kv_heads, slots, dim) by strides
// kv_head and kv_row. chunks: as Chunk; runs: (first slot, tokens) of each chunk, from run `run` on, holding at least its
// keys. out: bf16, or fp32 if wide; lse: natural logarithm, fp32, or null. dim is 32, 64, 96 or 128; scale positive; each
// chunk has at least one row, and at least as many keys as rows if causal.
#define HEADWAY_PREFILL(name, Way)                                                                                         \
    extern "C" void name(const bf16* q, i64 q_row, i64 q_head, const bf16* keys, const bf16* values, i64 kv_row,           \
                         i64 kv_head, void* out, i64 out_row, i64 out_head, int wide, float* lse, i64 lse_row,             \
                         i64 lse_head, const i64* chunks, i64 count, const i64* runs, i64 q_heads, i64 kv_heads, i64 dim,  \
                         float scale) {                                                                                    \
        prefill<Way>({q, q_row, q_head, keys, values, kv_row, kv_head, out, out_row, out_head, wide, lse, lse_row,   \
                            lse_head, (const Chunk*)chunks, runs, q_heads / kv_heads, dim, scale, {}}, count, kv_heads);   \
    }
HEADWAY_PREFILL(headway_prefill, ByVectors)
HEADWAY_PREFILL(headway_prefill_amx, ByTiles)
#endif
