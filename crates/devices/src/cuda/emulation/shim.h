// Emulation of a GPU on the host, for tests: the counterpart of kernels/primitives.cu.
//
// The threads of a block are fibers of one host thread. A warp runs as far ahead of the others as barriers allow, from the first warp or
// from the last; asynchronous copies are performed when they are started, or as late as possible, when they are waited for. A kernel's
// result must not depend on these choices. If a barrier or a wait is missing, it does. Dynamic shared memory starts as NaNs. A deadlock
// among the threads of a block ends the process with a message.

#pragma once
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef u16 half_t;

#define __global__
#define __device__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __shared__ static thread_local
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define KERNEL(threads) extern "C" void
#define KERNEL_ALONE(threads) extern "C" void
#define DYNAMIC_SHARED(name) unsigned char *name = emulation::dynamic_shared()
#define INFINITY_F INFINITY

struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct uint3 {
    u32 x, y, z;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
using std::max;
using std::min;

namespace emulation {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 64 << 10;

struct Copy {
    void *to;
    const void *from;
    bool present;
};

/// The values that a lane passes to its warp.
struct Shown {
    u64 words[3];
};

/// One thread of a block.
struct Fiber {
    enum { READY, AT_BLOCK, AT_WARP, DONE } state;
    const char *operation;
    ucontext_t context;
    jmp_buf place;
    bool begun;
    uint3 index;
    u32 exchanges;
    std::vector<std::vector<Copy>> copies;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<unsigned char> shared;
    std::vector<Shown> shown[2];
    Fiber *current;
    jmp_buf scheduler;
    uint3 index, grid;
    bool copies_immediate;
    void (*run)(void *);
    void *arguments;
};

inline Block *&block() {
    static thread_local Block *block = nullptr;
    return block;
}

inline Fiber &fiber() { return *block()->current; }
inline unsigned char *dynamic_shared() {
    auto address = reinterpret_cast<uintptr_t>(block()->shared.data());
    return reinterpret_cast<unsigned char *>((address + 127) / 128 * 128);
}

/// Suspends this thread until the scheduler resumes it.
inline void wait(decltype(Fiber::READY) state, const char *operation) {
    Fiber &self = fiber();
    self.state = state, self.operation = operation;
    if (_setjmp(self.place) == 0) _longjmp(block()->scheduler, 1);
}

/// Passes a value to the warp, waits for all lanes to do so, and returns their values, lane 0 first. All lanes must be at the same
/// operation.
inline const Shown *exchange(const char *operation, Shown own) {
    Fiber &self = fiber();
    // There are two buffers, because a lane may pass its next value before another lane has read this one. Two suffice, because the value
    // after the next can be passed only when all lanes have passed their next value.
    auto &places = block()->shown[self.exchanges++ % 2];
    places[self.index.x] = own;
    wait(Fiber::AT_WARP, operation);
    return &places[self.index.x / LANES * LANES];
}

template <class T> u64 bits_of(T value) {
    u64 bits = 0;
    static_assert(sizeof(T) <= sizeof bits && std::is_trivially_copyable<T>::value, "only trivially copyable values are passed");
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> T value_of(u64 bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

} // namespace emulation

#define threadIdx (emulation::fiber().index)
#define blockIdx (emulation::block()->index)
#define gridDim (emulation::block()->grid)

static inline float __uint_as_float(u32 bits) { return emulation::value_of<float>(bits); }
static inline u32 __float_as_uint(float number) { return static_cast<u32>(emulation::bits_of(number)); }
static inline double cospi(double half_turns) { return std::cos(M_PI * std::fmod(half_turns, 2.0)); }
static inline double sinpi(double half_turns) { return std::sin(M_PI * std::fmod(half_turns, 2.0)); }
static inline int __clz(u32 bits) { return bits ? __builtin_clz(bits) : 32; }
static inline int __ffs(u32 bits) { return __builtin_ffs(static_cast<int>(bits)); }

DEVICE float widen(half_t bits) {
#if HALF_IS_FLOAT16
    const float magnitude = std::ldexp(static_cast<float>(bits & 0x3ff) + ((bits & 0x7c00) ? 1024.0f : 0.0f),
                                       std::max((bits >> 10 & 31) - 25, -24));
    const float number = (bits & 0x7c00) == 0x7c00 ? ((bits & 0x3ff) ? NAN : INFINITY) : magnitude;
    return bits & 0x8000 ? -number : number;
#else
    return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}

DEVICE half_t narrow(float number) {
    const u32 bits = __float_as_uint(number);
#if HALF_IS_FLOAT16
    const u16 sign = bits >> 16 & 0x8000;
    if (number != number) return sign | 0x7fff;
    // The number is scaled to units in the last place. The host's default rounding mode then rounds ties to even.
    int exponent;
    std::frexp(number, &exponent);
    const int place = std::max(exponent - 11, -24);
    const float rounded = std::ldexp(std::nearbyint(std::ldexp(std::fabs(number), -place)), place);
    if (rounded > 65504.0f) return sign | 0x7c00;
    if (rounded < 6.103515625e-5f) return sign | static_cast<u16>(std::ldexp(rounded, 24));
    std::frexp(rounded, &exponent);
    return sign | static_cast<u16>((exponent + 14) << 10) | (static_cast<u16>(std::ldexp(rounded, 11 - exponent)) & 0x3ff);
#else
    if (number != number) return 0x7fff;
    return static_cast<half_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

DEVICE u32 narrow_pair(float first, float second) { return narrow(first) | static_cast<u32>(narrow(second)) << 16; }
DEVICE float exp2_fast(float x) { return std::exp2(x); }

DEVICE void block_sync() { emulation::wait(emulation::Fiber::AT_BLOCK, "block_sync"); }
/// Thread blocks run one after another, so all that a block has written is visible to the next one.
DEVICE void device_fence() {}
DEVICE u32 count_up(u32 *counter) { return (*counter)++; }
DEVICE void warp_sync() { emulation::exchange("warp_sync", {}); }

template <class T> DEVICE T shuffle_from(const char *operation, T value, int from) {
    const auto shown = emulation::exchange(operation, {{emulation::bits_of(value)}});
    return emulation::value_of<T>(shown[from].words[0]);
}
template <class T> DEVICE T shuffle_xor(T value, int lanes) {
    return shuffle_from("shuffle_xor", value, (threadIdx.x % emulation::LANES) ^ lanes);
}
template <class T> DEVICE T shuffle_up(T value, int lanes) {
    const int lane = threadIdx.x % emulation::LANES;
    return shuffle_from("shuffle_up", value, lane < lanes ? lane : lane - lanes);
}
template <class T> DEVICE T shuffle(T value, int lane) { return shuffle_from("shuffle", value, lane); }
DEVICE u32 ballot(bool yes) {
    const auto shown = emulation::exchange("ballot", {{yes}});
    u32 lanes = 0;
    for (int lane = 0; lane < emulation::LANES; lane++) lanes |= static_cast<u32>(shown[lane].words[0]) << lane;
    return lanes;
}

DEVICE void add_shared(u32 *low, u32 *high, u64 value) {
    const u64 sum = (static_cast<u64>(*high) << 32 | *low) + value;
    *low = static_cast<u32>(sum), *high = static_cast<u32>(sum >> 32);
}

/// The fragment layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type". For a lane, let `group` =
/// lane / 4 and `t` = lane % 4. Register i of the first operand holds columns 2t and 2t + 1 (+ 8 if i > 1) of row `group` (+ 8 if i is
/// odd). The registers of the second operand hold rows 2t and 2t + 1 (+ 8 in the second register) of column `group`. Element i of the sum
/// is in row `group` (+ 8 if i > 1) and column 2t + i % 2.
DEVICE void multiply_add(float d[4], const u32 a[4], u32 b0, u32 b1) {
    const auto pair = [](u32 low, u32 high) { return low | static_cast<u64>(high) << 32; };
    const auto shown = emulation::exchange("multiply_add", {{pair(a[0], a[1]), pair(a[2], a[3]), pair(b0, b1)}});
    const auto number = [](u64 word, int half_of, int which) {
        const u32 reg = static_cast<u32>(word >> (32 * half_of));
        return widen(static_cast<half_t>(reg >> (16 * which)));
    };
    const int lane = threadIdx.x % emulation::LANES, group = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * t + i % 2;
        for (int k = 0; k < 16; k++) {
            const float first = number(shown[group * 4 + k % 8 / 2].words[k / 8], i / 2, k % 2);
            const float second = number(shown[column * 4 + k % 8 / 2].words[2], k / 8, k % 2);
            d[i] += first * second;
        }
    }
}

/// As ldmatrix in the PTX ISA: of each matrix, a lane receives the elements 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4. In the
/// transposed variant, they are elements of column lane / 4.
DEVICE void load_matrices(u32 to[4], const half_t *row) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fprintf(stderr, "load_matrices: a row is not aligned to 16 bytes\n"), abort();
    const auto shown = emulation::exchange("load_matrices", {{emulation::bits_of(row)}});
    const int lane = threadIdx.x % emulation::LANES;
    for (int i = 0; i < 4; i++) memcpy(&to[i], emulation::value_of<const half_t *>(shown[i * 8 + lane / 4].words[0]) + lane % 4 * 2, 4);
}

DEVICE void load_matrices_transposed(u32 to[4], const half_t *row) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fprintf(stderr, "load_matrices_transposed: a row is not aligned to 16 bytes\n"), abort();
    const auto shown = emulation::exchange("load_matrices_transposed", {{emulation::bits_of(row)}});
    const int lane = threadIdx.x % emulation::LANES;
    for (int i = 0; i < 4; i++) {
        const auto from = [&](int which) { return emulation::value_of<const half_t *>(shown[i * 8 + lane % 4 * 2 + which].words[0])[lane / 4]; };
        to[i] = from(0) | static_cast<u32>(from(1)) << 16;
    }
}

namespace emulation {

inline void perform(const Copy &copy) {
    if (copy.present) {
        memcpy(copy.to, copy.from, 16);
    } else {
        memset(copy.to, 0, 16);
    }
}

} // namespace emulation

DEVICE void copy_async(half_t *shared, const half_t *global, bool present) {
    const auto misaligned = [](const void *pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 != 0; };
    if (misaligned(shared) || misaligned(global)) fprintf(stderr, "copy_async: an address is not aligned to 16 bytes\n"), abort();
    const emulation::Copy copy = {shared, global, present};
    if (emulation::block()->copies_immediate) {
        emulation::perform(copy);
    } else {
        emulation::fiber().copies.back().push_back(copy);
    }
}

DEVICE void copy_commit() { emulation::fiber().copies.emplace_back(); }

template <int LEFT> DEVICE void copy_wait() {
    auto &copies = emulation::fiber().copies;
    // The last entry is the group that is still open, so `LEFT` complete groups remain.
    while (copies.size() > LEFT + 1) {
        for (const auto &copy : copies.front()) emulation::perform(copy);
        copies.erase(copies.begin());
    }
}
