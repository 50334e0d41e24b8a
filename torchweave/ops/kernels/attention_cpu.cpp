// Causal attention over a paged KV cache on a CPU, float32. HEAD_DIM, VALUE_DIM, GROUP (query heads that share a key head) and
// CACHE (cache dtype: 0 float, 1 e4m3, 2 e5m2) are prepended as constants; Inductor's C++ code cache builds it.
// Shapes and meaning are those of AttentionStep.forward.
//
// Every token is a row of its own, in decode and prefill: its result depends on its own sequence only, never on the batch or on
// the chunking of a prompt. The cache is read block by block, all heads of a block while it is in the L1 cache; reading
// dominates the cost.

#include <torch/csrc/inductor/cpp_prefix.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <omp.h>
#include <array>
#include <limits>
#include <type_traits>
#include <vector>

using Vec = at::vec::Vectorized<float>;
constexpr int64_t WIDTH = Vec::size();
constexpr int64_t padded(int64_t size) { return (size + WIDTH - 1) / WIDTH * WIDTH; }

using Cached = std::conditional_t<CACHE == 0, float, std::conditional_t<CACHE == 1, c10::Float8_e4m3fn, c10::Float8_e5m2>>;

// x in the cache's dtype; see torchweave.ops.attention.kv_cache_dtype.quantize_kv.
inline Cached quantize_kv(float x, float scale) {
    if constexpr (CACHE == 0) return x;
    constexpr float largest = CACHE == 1 ? 448.0f : 57344.0f;
    return Cached(std::clamp(x / scale, -largest, largest));
}

// n slots of `width` numbers each from `cached` on, `stride` apart, as floats without their scale; those of the result are
// `step` apart.
template <typename T>
inline const float* dequantize_kv(const T* cached, int64_t stride, int64_t width, int64_t n, std::vector<float>& room,
                                  int64_t& step) {
    if constexpr (std::is_same_v<T, float>) {
        step = stride;
        return cached;
    } else {
        static const auto table = [] {
            std::array<float, 256> all;
            for (int i = 0; i < 256; ++i) all[i] = static_cast<float>(T(static_cast<uint8_t>(i), T::from_bits()));
            return all;
        }();
        step = width;
        if (static_cast<int64_t>(room.size()) < n * width) room.resize(n * width);
        for (int64_t j = 0; j < n; ++j)
            for (int64_t i = 0; i < width; ++i) room[j * width + i] = table[cached[j * stride + i].x];
        return room.data();
    }
}

// Vector i of an array of SIZE floats; lanes after its end are zero.
template <int64_t SIZE>
inline Vec load(const float* array, int64_t i) {
    return (i + 1) * WIDTH <= SIZE ? Vec::loadu(array + i * WIDTH) : Vec::loadu(array + i * WIDTH, SIZE - i * WIDTH);
}

inline float total(const Vec& x) {
    return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

// Lane j is the total of f(FROM + j): COUNT totals at the cost of three. Neighbouring lanes of pairs of vectors are added.
template <int64_t COUNT, int64_t FROM, typename F>
inline Vec totals(const F& f) {
    if constexpr (COUNT == 1) {
        return f(FROM);
    } else {
        const auto [even, odd] = at::vec::deinterleave2(totals<COUNT / 2, FROM>(f), totals<COUNT / 2, FROM + COUNT / 2>(f));
        return even + odd;
    }
}

// Visible keys of a token, as runs that are contiguous in the cache: f(i, slot, n) for keys i .. i + n.
template <typename F>
inline void for_runs(const int32_t* blocks, int64_t block_size, int64_t first, int64_t count, const F& f) {
    for (int64_t i = 0; i < count;) {
        const int64_t offset = (first + i) % block_size, n = std::min(count - i, block_size - offset);
        f(i, blocks[(first + i) / block_size] * block_size + offset, n);
        i += n;
    }
}

// scores[0..n) = dot(query, keys).
inline void score(const float* query, const float* key, int64_t stride, int64_t n, float* scores) {
    const auto products = [&](const float* some) {
        Vec sum = load<HEAD_DIM>(query, 0) * load<HEAD_DIM>(some, 0);
        for (int64_t i = 1; i < padded(HEAD_DIM) / WIDTH; ++i)
            sum = at::vec::fmadd(load<HEAD_DIM>(query, i), load<HEAD_DIM>(some, i), sum);
        return sum;
    };
    int64_t j = 0;
    for (; j + WIDTH <= n; j += WIDTH)
        totals<WIDTH, 0>([&](int64_t i) { return products(key + (j + i) * stride); }).store(scores + j);
    for (; j < n; ++j) scores[j] = total(products(key + j * stride));
}

// sum[VALUE_DIM] += weights times values; `sum` has padded(VALUE_DIM) elements.
inline void mix(const float* weights, const float* value, int64_t stride, int64_t n, float* sum) {
    constexpr int64_t PARTS = padded(VALUE_DIM) / WIDTH;
    Vec parts[PARTS];
    for (int64_t i = 0; i < PARTS; ++i) parts[i] = Vec::loadu(sum + i * WIDTH);
    for (int64_t j = 0; j < n; ++j, value += stride)
        for (int64_t i = 0; i < PARTS; ++i)
            parts[i] = at::vec::fmadd(Vec(weights[j]), load<VALUE_DIM>(value, i), parts[i]);
    for (int64_t i = 0; i < PARTS; ++i) parts[i].store(sum + i * WIDTH);
}

// In place: softmax of the scaled, capped scores; `slope` is ALiBi's, the last key is the token itself; `sink` is added to the
// denominator, -inf for none. `scores` has padded(count) elements.
inline void softmax(float* scores, int64_t count, float scale, float softcap, float slope, float sink) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        Vec x = Vec::loadu(scores + i) * Vec(scale);
        if (softcap > 0) x = Vec(softcap) * (x / Vec(softcap)).tanh();
        if (slope != 0) x = x + Vec(slope) * Vec::arange(static_cast<float>(i - count + 1), 1.0f);
        x.store(scores + i);
    }
    for (int64_t i = count; i < padded(count); ++i) scores[i] = -std::numeric_limits<float>::infinity();
    Vec most(sink), sum(0);
    for (int64_t i = 0; i < count; i += WIDTH) most = at::vec::maximum(most, Vec::loadu(scores + i));
    const float largest = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, most);
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Vec weights = (Vec::loadu(scores + i) - Vec(largest)).exp();
        weights.store(scores + i);
        sum = sum + weights;
    }
    const Vec factor(1.0f / (total(sum) + std::exp(sink - largest)));
    for (int64_t i = 0; i < count; i += WIDTH) (Vec::loadu(scores + i) * factor).store(scores + i);
}

// slots[T]: row of the block table; lengths[T]: visible keys of the token, itself included, or 0: only cache its key and value;
// mapping[T]: its cache slot, or -1 for padding. Strides are in elements; the last dimension is contiguous, the cache and
// out are contiguous.
extern "C" void kernel(const float* q, const float* k, const float* v, float* out, void* k_cached, void* v_cached,
                       const float* sinks, const float* slopes, const int32_t* slots, const int32_t* lengths,
                       const int64_t* mapping, const int32_t* block_table, int64_t tokens, int64_t kv_heads, int64_t q_token, int64_t q_head,
                       int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head, int64_t max_blocks,
                       int64_t block_size, int64_t window, int64_t chunk, int64_t has_sinks, int64_t has_slopes, int64_t threads,
                       float scale, float softcap, float k_scale, float v_scale) {
    Cached *k_cache = static_cast<Cached*>(k_cached), *v_cache = static_cast<Cached*>(v_cached);
    const int64_t key_stride = kv_heads * HEAD_DIM, value_stride = kv_heads * VALUE_DIM;
    const int64_t share = tokens < 4 * threads ? 1 : kv_heads;  // key heads of a token that one thread takes
    const int64_t shares = tokens * (kv_heads / share);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            if (mapping[t] < 0) continue;
            for (int64_t h = 0; h < kv_heads; ++h) {
                const float *key = k + t * k_token + h * k_head, *value = v + t * v_token + h * v_head;
                Cached *key_at = k_cache + mapping[t] * key_stride + h * HEAD_DIM;
                Cached *value_at = v_cache + mapping[t] * value_stride + h * VALUE_DIM;
                std::transform(key, key + HEAD_DIM, key_at, [&](float x) { return quantize_kv(x, k_scale); });
                std::transform(value, value + VALUE_DIM, value_at, [&](float x) { return quantize_kv(x, v_scale); });
            }
        }
        std::vector<float> scores, room, sums(share * GROUP * padded(VALUE_DIM));
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < shares; ++i) {
            const int64_t t = i * share / kv_heads, head = i * share % kv_heads * GROUP, heads = share * GROUP;
            float* result = out + (t * kv_heads * GROUP + head) * VALUE_DIM;
            if (mapping[t] < 0) std::fill_n(result, heads * VALUE_DIM, 0.0f);
            if (mapping[t] < 0 || lengths[t] == 0) continue;

            const int64_t last = lengths[t] - 1;
            int64_t first = window ? std::max<int64_t>(last - window + 1, 0) : 0;
            if (chunk) first = std::max(first, last / chunk * chunk);
            const int64_t count = last - first + 1, width = padded(count);
            const int32_t* blocks = block_table + slots[t] * max_blocks;
            if (static_cast<int64_t>(scores.size()) < heads * width) scores.resize(heads * (width + 16 * WIDTH));

            for_runs(blocks, block_size, first, count, [&](int64_t from, int64_t place, int64_t n) {
                int64_t step;
                const Cached* at = k_cache + place * key_stride + head / GROUP * HEAD_DIM;
                const float* keys = dequantize_kv(at, key_stride, share * HEAD_DIM, n, room, step);
                for (int64_t h = 0; h < heads; ++h)
                    score(q + t * q_token + (head + h) * q_head, keys + h / GROUP * HEAD_DIM, step, n,
                          scores.data() + h * width + from);
            });
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t h = 0; h < heads; ++h) {
                const float sink = has_sinks ? sinks[head + h] : -std::numeric_limits<float>::infinity();
                const float slope = has_slopes ? slopes[head + h] : 0.0f;
                softmax(scores.data() + h * width, count, scale * k_scale, softcap, slope, sink);
            }
            for_runs(blocks, block_size, first, count, [&](int64_t from, int64_t place, int64_t n) {
                int64_t step;
                const Cached* at = v_cache + place * value_stride + head / GROUP * VALUE_DIM;
                const float* values = dequantize_kv(at, value_stride, share * VALUE_DIM, n, room, step);
                for (int64_t h = 0; h < heads; ++h)
                    mix(scores.data() + h * width + from, values + h / GROUP * VALUE_DIM, step, n,
                        sums.data() + h * padded(VALUE_DIM));
            });
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t i = 0; i < VALUE_DIM; ++i)
                    result[h * VALUE_DIM + i] = sums[h * padded(VALUE_DIM) + i] * v_scale;
        }
    }
}
