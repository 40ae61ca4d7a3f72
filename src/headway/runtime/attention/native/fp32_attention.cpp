// Attention of chunks of any number of rows, decodes among them, over the fp32 or bf16 keys and values of a pool, by fp32
// arithmetic. Those of bf16 are widened a block at a time.
//
// One source for every processor: vectors are the compiler's (`vector_size`), and only their width and the number of
// accumulators depend on the instruction set. Lanes are query rows, as in the bf16 kernel: S^T = K Q^T takes keys as they
// lie (broadcast) and queries that were transposed once, its maxima and sums need no reduction across lanes, and
// O^T = V^T P^T takes values as they lie. A decode is a chunk of one row; its few rows are computed with dimensions in
// the lanes.

#include <omp.h>

#include <cstring>
#include <type_traits>

#include "fp32_few_rows.h"
#include "jobs.h"

namespace {

constexpr int kWide = 3;                   // vectors of rows in a tile, at most
constexpr int kKeys = 64;                  // keys in a block
constexpr i64 kBlock = kLanes * kWide * 8; // rows in a job, at most
constexpr i64 kMostDim = 256;
constexpr float kNever = -1e30f, kLn2 = 0.693147181f;

// Rows of one KV head. A lane beyond the last row repeats it.
struct Tile {
    int vectors;
    float* q;                                   // [dim][vectors][lanes], times scale * log2(e)
    float* o;                                   // [dim][vectors][lanes], weighted values in units of 2^high
    alignas(64) float high[kLanes * kWide];     // the maximum so far
    alignas(64) float sum[kLanes * kWide];      // of the weights
    alignas(64) int32_t limit[kLanes * kWide];  // the lane sees the keys below it
    i64 least, most;                            // of the limits
};

// The memory of one thread, for the largest heads; smaller ones touch less of it.
struct Room {
    alignas(64) float q[kBlock * kMostDim];
    alignas(64) float o[kBlock * kMostDim];
    alignas(64) float k[kKeys * kMostDim];
    alignas(64) float v[kKeys * kMostDim];
    alignas(64) float p[kKeys * kLanes * kWide];
    Tile tiles[kBlock / kLanes / kWide];
};

template <int N>
inline void score(i64 dim, const float* q, const float* k, i64 row, vec* s) {
    const float* half[2] = {k, k + kStep / 2 * row};
#pragma GCC unroll 24
    for (int i = 0; i < kStep * N; i++) s[i] = vec{};
    for (i64 d = 0; d < dim; d++, q += N * kLanes) {
        vec in[N];
#pragma GCC unroll 3
        for (int n = 0; n < N; n++) in[n] = load(q + n * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kStep; i++) {
            const vec a = all(half[i / (kStep / 2)][i % (kStep / 2) * row + d]);
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) s[i * N + n] += a * in[n];
        }
    }
}

// O += P V over the first `end` keys of the block.
template <int N>
inline void weigh(i64 dim, float* o, const float* p, const Block& b, int end) {
    for (i64 t = 0; t < dim; t += kStep, o += kStep * N * kLanes) {
        vec acc[kStep * N];
#pragma GCC unroll 24
        for (int i = 0; i < kStep * N; i++) acc[i] = load(o + i * kLanes);
        const float* v = b.v + t;
        for (int j = 0; j < end; j++, v += b.row) {
            vec w[N];
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) w[n] = load(p + (j * N + n) * kLanes);
#pragma GCC unroll 8
            for (int d = 0; d < kStep; d++) {
                const vec a = all(v[d]);
#pragma GCC unroll 3
                for (int n = 0; n < N; n++) acc[d * N + n] += a * w[n];
            }
        }
#pragma GCC unroll 24
        for (int i = 0; i < kStep * N; i++) store(o + i * kLanes, acc[i]);
    }
}

template <int N>
void attend(i64 dim, Tile& t, const Block& b, float* p) {
    const int end = int(std::min<i64>(b.keys, t.most - b.first)), open = int(std::min<i64>(b.keys, t.least - b.first));
    vec top[N];
    for (int n = 0; n < N; n++) top[n] = load(t.high + n * kLanes);
    for (int j = 0; j < end; j += kStep) {
        vec s[kStep * N];
        // Values are read after the scores: on their way meanwhile.
        for (i64 c = 0; c < kStep * dim; c += 16) __builtin_prefetch(b.v + j * b.row + c);
        score<N>(dim, t.q, b.k + j * b.row, b.row, s);
        if (j + kStep > open) {
            for (int i = 0; i < kStep; i++)
                for (int n = 0; n < N; n++) {
                    const ivec key = int32_t(b.first) + j + i - ivec{};
                    s[i * N + n] = *(const ivec*)(t.limit + n * kLanes) > key ? s[i * N + n] : all(-INFINITY);
                }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kStep; i++)
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) {
                top[n] = top[n] < s[i * N + n] ? s[i * N + n] : top[n];
                store(p + ((j + i) * N + n) * kLanes, s[i * N + n]);
            }
    }
    if (memcmp(top, t.high, sizeof(top)) != 0) {
        vec less[N];
        for (int n = 0; n < N; n++) {
            less[n] = exp2(load(t.high + n * kLanes) - top[n]);
            store(t.high + n * kLanes, top[n]);
            store(t.sum + n * kLanes, load(t.sum + n * kLanes) * less[n]);
        }
        for (i64 d = 0; d < dim; d++)
            for (int n = 0; n < N; n++) {
                float* o = t.o + (d * N + n) * kLanes;
                store(o, load(o) * less[n]);
            }
    }
    for (int n = 0; n < N; n++) {
        vec sum = load(t.sum + n * kLanes);
        for (int j = 0; j < end; j++) {
            float* at = p + (j * N + n) * kLanes;
            const vec x = exp2(load(at) - top[n]);
            sum += x;
            store(at, x);
        }
        store(t.sum + n * kLanes, sum);
    }
    weigh<N>(dim, t.o, p, b, end);
}

template <class T>
void open_tile(const CallOf<T>& call, const Job& job, i64 first, Tile& t) {
    const Chunk& chunk = call.chunks[job.chunk];
    const float scale = call.scale * kLog2e;
    for (int i = 0; i < t.vectors * kLanes; i++) {
        const i64 r = std::min(first + i, job.first + job.rows - 1);
        const Place at = place(call, job.chunk, job.head, r);
        const T* from = call.q + at.token * call.q_row + at.head * call.q_head;
        for (i64 d = 0; d < call.dim; d++) t.q[d * t.vectors * kLanes + i] = wide(from[d]) * scale;
        t.most = std::min(job.end, chunk.causal ? chunk.keys - chunk.rows + r / call.group + 1 : chunk.keys);
        if (i == 0) t.least = t.most;
        t.limit[i] = int32_t(t.most);
        t.high[i] = kNever;
        t.sum[i] = 0.0f;
    }
    memset(t.o, 0, t.vectors * kLanes * call.dim * sizeof(float));
}

// Write a row's answer, in the call's type or in fp32.
template <class T>
void put(const CallOf<T>& call, Place at, const float* row) {
    const i64 to = at.token * call.out_row + at.head * call.out_head;
    if (call.wide) memcpy((float*)call.out + to, row, call.dim * sizeof(float));
    else
        for (i64 d = 0; d < call.dim; d++) narrow_one((T*)call.out + to + d, row[d]);
}

// Write row r, or its part, from weighted values that lie `step` apart. A row that saw no key is zeros with -inf.
template <class T>
void close_row(const CallOf<T>& call, const Job& job, i64 r, float high, float sum, const float* o, i64 step) {
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    const float lse = sum == 0 ? -INFINITY : high * kLn2 + std::log(sum);
    const Place at = place(call, job.chunk, job.head, r);
    float row[kMostDim], *to = row;
    if (job.part >= 0) to = call.parts.get() + (job.part + r - job.first) * call.part_size(), to[call.dim] = lse;
    for (i64 d = 0; d < call.dim; d++) to[d] = o[d * step] * inverse;
    if (job.part < 0) put(call, at, row), put_lse(call, at, lse);
}

template <class T>
void close_tile(const CallOf<T>& call, const Job& job, i64 first, const Tile& t) {
    const i64 step = t.vectors * kLanes, live = std::min<i64>(step, job.first + job.rows - first);
    for (i64 i = 0; i < live; i++) close_row(call, job, first + i, t.high[i], t.sum[i], t.o + i, step);
}

inline void widen_row(float* to, const float* from, i64 dim) { memcpy(to, from, dim * sizeof(float)); }
inline void widen_row(float* __restrict to, const bf16* __restrict from, i64 dim) {
    for (i64 d = 0; d < dim; d++) to[d] = wide(from[d]);
}

// Keys begin .. begin + held of a KV head: where they lie if they are fp32 and side by side, else widened in the room.
template <class T>
Block load_block(const CallOf<T>& call, i64 head, Slots& slots, i64 begin, int held, Room& room) {
    const T *keys = call.keys + head * call.kv_head, *values = call.values + head * call.kv_head;
    i64 side, slot = slots.find(begin, side);
    if constexpr (std::is_same_v<T, float>)
        if (side >= (held + kStep - 1) / kStep * kStep)
            return {keys + slot * call.kv_row, values + slot * call.kv_row, call.kv_row, begin, held};
    for (int t = 0; t < held; t++) {
        slot = slots.find(begin + t, side);
        widen_row(room.k + t * call.dim, keys + slot * call.kv_row, call.dim);
        widen_row(room.v + t * call.dim, values + slot * call.kv_row, call.dim);
    }
    return {room.k, room.v, call.dim, begin, held};
}

// Whether a job's rows are so few, and see the same keys.
template <class T>
bool are_few(const CallOf<T>& call, const Job& job) {
    const Chunk& chunk = call.chunks[job.chunk];
    return job.rows <= kLanes / 2 && (chunk.rows == 1 || !chunk.causal) && call.dim % kLanes == 0;
}

template <class T>
void run_few(const CallOf<T>& call, const Job& job, Room& room) {
    const i64 dim = call.dim, quads = (job.rows + 3) / 4;
    alignas(64) float high[2 * kLanes], sum[2 * kLanes];
    static_assert(kLanes / 2 <= 8, "at most two quads");
    const float scale = call.scale * kLog2e;
    const auto at = [&](i64 r) { return place(call, job.chunk, job.head, job.first + std::min(r, job.rows - 1)); };
    for (i64 r = 0; r < 4 * quads; r++) {
        const T* from = call.q + at(r).token * call.q_row + at(r).head * call.q_head;
        for (i64 d = 0; d < dim; d++) room.q[r * dim + d] = wide(from[d]) * scale, room.o[r * dim + d] = 0.0f;
    }
    for (i64 i = 0; i < quads * kLanes; i++) high[i] = kNever, sum[i] = 0.0f;
    Slots slots{call.runs + 2 * call.chunks[job.chunk].run};
    for (i64 begin = job.begin; begin < job.end; begin += kKeys) {
        const Block b = load_block(call, job.head, slots, begin, int(std::min<i64>(kKeys, job.end - begin)), room);
        for (i64 i = 0; i < quads; i++)
            few_attend(dim, room.q + 4 * i * dim, room.o + 4 * i * dim, high + i * kLanes, sum + i * kLanes, b, room.p);
    }
    for (i64 r = 0; r < job.rows; r++) {
        float total = 0.0f;
        for (int i = 0; i < kLanes; i += 4) total += sum[r / 4 * kLanes + i + r % 4];
        close_row(call, job, job.first + r, high[r / 4 * kLanes + r % 4], total, room.o + r * dim, 1);
    }
}

template <class T>
void run(const CallOf<T>& call, const Job& job) {
    static thread_local std::unique_ptr<Room> kept(new Room);
    Room& room = *kept;
    if (are_few(call, job)) return run_few(call, job, room);
    const i64 dim = call.dim, vectors = (job.rows + kLanes - 1) / kLanes, count = (vectors + kWide - 1) / kWide;
    for (i64 i = 0; i < count; i++) {
        const i64 from = vectors * i / count;
        Tile& t = room.tiles[i];
        t.vectors = int(vectors * (i + 1) / count - from);
        t.q = room.q + from * kLanes * dim;
        t.o = room.o + from * kLanes * dim;
        open_tile(call, job, job.first + kLanes * from, t);
    }
    Slots slots{call.runs + 2 * call.chunks[job.chunk].run};
    for (i64 begin = job.begin; begin < job.end; begin += kKeys) {
        const int held = int(std::min<i64>(kKeys, job.end - begin));
        const Block block = load_block(call, job.head, slots, begin, held, room);
        for (i64 i = 0; i < count; i++) {
            Tile& t = room.tiles[i];
            if (t.most <= begin) continue;
            if (t.vectors == 1) attend<1>(dim, t, block, room.p);
            else if (t.vectors == 2) attend<2>(dim, t, block, room.p);
            else attend<3>(dim, t, block, room.p);
        }
    }
    for (i64 i = 0; i < count; i++) close_tile(call, job, job.first + kLanes * (vectors * i / count), room.tiles[i]);
}

// The answer of row i of a cut block from its pieces.
template <class T>
void join(const CallOf<T>& call, const Cut& cut, i64 i) {
    const i64 size = call.part_size();
    const float* part = call.parts.get() + (cut.part + i) * size;
    const Place at = place(call, cut.chunk, cut.head, cut.first + i);
    float row[kMostDim], high = -INFINITY, total = 0.0f;
    for (i64 s = 0; s < cut.pieces; s++) high = std::max(high, part[s * cut.rows * size + call.dim]);
    const float anchor = high == -INFINITY ? 0.0f : high;
    for (i64 s = 0; s < cut.pieces; s++) total += std::exp(part[s * cut.rows * size + call.dim] - anchor);
    memset(row, 0, call.dim * sizeof(float));
    for (i64 s = 0; s < cut.pieces; s++) {
        const float* piece = part + s * cut.rows * size;
        const float weight = total == 0 ? 0.0f : std::exp(piece[call.dim] - anchor) / total;
        for (i64 d = 0; d < call.dim; d++) row[d] += weight * piece[d];
    }
    put(call, at, row);
    put_lse(call, at, anchor + std::log(total));
}

template <class T>
void prefill(CallOf<T>& call, i64 count, i64 kv_heads) {
    std::vector<Job> jobs;
    std::vector<Cut> cuts;
    divide(call, {kLanes, kBlock, kKeys}, count, kv_heads, omp_get_max_threads(), jobs, cuts);
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < jobs.size(); i++) run(call, jobs[i]);
        for (const Cut& cut : cuts) {
#pragma omp for schedule(static) nowait
            for (i64 i = 0; i < cut.rows; i++) join(call, cut, i);
        }
    }
}

}  // namespace

// Softmax attention of `count` chunks: arguments as of headway_prefill. dim is a multiple of 8 up to 256. fp32: out is
// always fp32.
extern "C" void headway_attend_fp32(const float* q, i64 q_row, i64 q_head, const float* keys, const float* values,
                                    i64 kv_row, i64 kv_head, void* out, i64 out_row, i64 out_head, int, float* lse,
                                    i64 lse_row, i64 lse_head, const i64* chunks, i64 count, const i64* runs, i64 q_heads,
                                    i64 kv_heads, i64 dim, float scale) {
    CallOf<float> call{q,   q_row,   q_head,   keys, values, kv_row, kv_head, out, out_row, out_head, 1,
                       lse, lse_row, lse_head, (const Chunk*)chunks, runs, q_heads / kv_heads, dim, scale, {}};
    prefill(call, count, kv_heads);
}

extern "C" void headway_attend_bf16(const bf16* q, i64 q_row, i64 q_head, const bf16* keys, const bf16* values, i64 kv_row,
                                    i64 kv_head, void* out, i64 out_row, i64 out_head, int wide, float* lse, i64 lse_row,
                                    i64 lse_head, const i64* chunks, i64 count, const i64* runs, i64 q_heads, i64 kv_heads,
                                    i64 dim, float scale) {
    CallOf<bf16> call{q,   q_row,   q_head,   keys, values, kv_row, kv_head, out, out_row, out_head, wide,
                      lse, lse_row, lse_head, (const Chunk*)chunks, runs, q_heads / kv_heads, dim, scale, {}};
    prefill(call, count, kv_heads);
}
