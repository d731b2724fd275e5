// Runs a kernel by name, with a pointer to each argument as for cuLaunchKernel. Built by crates/devices/src/cuda/tests/emulated.rs and by gpu.cpp.

#include "shim.h"
#include <sys/mman.h>
#include <unistd.h>

#include "../kernels/model.cu"
#include "../kernels/rows.cu"
#include "../kernels/attention.cu"
#include "../kernels/decode.cu"
#include "../kernels/sampling.cu"

namespace {

using namespace emulation;

struct Call {
    void (*kernel)(void **);
    void **arguments;
};

template <class... A, size_t... I> void unpack(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}
template <class... A> void unpack_all(void (*kernel)(A...), void **arguments) {
    unpack(kernel, arguments, std::index_sequence_for<A...>{});
}

template <class... A> constexpr u32 count(void (*)(A...)) { return sizeof...(A); }

struct Entry {
    const char *name;
    void (*run)(void **);
    u32 parameters;
};

#define ENTRY(name) {#name, [](void **arguments) { unpack_all(name, arguments); }, count(name)}
const Entry ENTRIES[] = {ENTRY(embed),         ENTRY(rms_norm),     ENTRY(rope),   ENTRY(store_kv), ENTRY(swiglu),
                         ENTRY(attend_prompt), ENTRY(attend_token), ENTRY(sample)};

void fail(const char *kernel, const char *what) {
    fprintf(stderr, "%s: %s\n", kernel, what);
    abort();
}

void enter() {
    Block &own = *block();
    own.run(own.arguments);
    fiber().state = Fiber::DONE;
    _longjmp(own.scheduler, 1);
}

/// The stacks of all threads of the largest possible block. Pages that are not touched take no memory.
std::unique_ptr<unsigned char[]> &stacks() {
    static thread_local std::unique_ptr<unsigned char[]> stacks(new unsigned char[1024 * STACK_BYTES]);
    return stacks;
}

/// Runs one thread until it waits or ends.
void resume(Block &own, Fiber &fiber) {
    own.current = &fiber;
    if (_setjmp(own.scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks().get() + (&fiber - own.fibers.data()) * STACK_BYTES;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    setcontext(&fiber.context);
}

bool all_in(std::vector<Fiber>::iterator begin, std::vector<Fiber>::iterator end, decltype(Fiber::READY) state) {
    return std::all_of(begin, end, [state](const Fiber &fiber) { return fiber.state == state; });
}

/// Runs a warp until all its threads wait at a barrier of the block or have ended. The other warps do not run meanwhile.
void run_warp(const char *kernel, Block &own, size_t warp, bool reversed) {
    const auto begin = own.fibers.begin() + warp * LANES, end = begin + LANES;
    for (;;) {
        for (int lane = 0; lane < LANES; lane++) {
            Fiber &fiber = begin[reversed ? LANES - 1 - lane : lane];
            if (fiber.state == Fiber::READY) resume(own, fiber);
        }
        if (all_in(begin, end, Fiber::AT_BLOCK) || all_in(begin, end, Fiber::DONE)) return;
        if (!all_in(begin, end, Fiber::AT_WARP)) fail(kernel, "some lanes of a warp wait at an operation that other lanes never reach");
        for (auto lane = begin; lane != end; lane++) {
            if (strcmp(lane->operation, begin->operation) != 0) fail(kernel, "the lanes of a warp are at different operations");
            lane->state = Fiber::READY;
        }
    }
}

void run_block(const char *kernel, Block &own, bool reversed) {
    memset(own.shared.data(), 0xff, own.shared.size());
    for (size_t i = 0; i < own.fibers.size(); i++) {
        Fiber &fiber = own.fibers[i];
        fiber.state = Fiber::READY, fiber.begun = false, fiber.exchanges = 0;
        fiber.index = {static_cast<u32>(i), 0, 0};
        fiber.copies.assign(1, {});
    }
    const size_t warps = own.fibers.size() / LANES;
    while (!all_in(own.fibers.begin(), own.fibers.end(), Fiber::DONE)) {
        for (size_t i = 0; i < warps; i++) {
            const size_t warp = reversed ? warps - 1 - i : i;
            if (own.fibers[warp * LANES].state == Fiber::READY) run_warp(kernel, own, warp, reversed);
        }
        if (all_in(own.fibers.begin(), own.fibers.end(), Fiber::AT_BLOCK)) {
            for (auto &fiber : own.fibers) fiber.state = Fiber::READY;
        } else if (!all_in(own.fibers.begin(), own.fibers.end(), Fiber::DONE)) {
            // A warp may end before the other warps only if none of them waits at a barrier.
            const bool waits = std::any_of(own.fibers.begin(), own.fibers.end(), [](const Fiber &f) { return f.state == Fiber::AT_BLOCK; });
            if (waits) fail(kernel, "some threads wait at a barrier for threads that have ended");
        }
    }
}

} // namespace

/// Runs a kernel to its end. Returns false if there is no kernel of this name. `order`: 1 runs lanes, warps and blocks from last to first,
/// 2 performs asynchronous copies immediately, 3 does both.
extern "C" bool launch(const char *name, const u32 grid[3], u32 threads, u32 shared_bytes, void **arguments, u32 order) {
    for (const Entry &entry : ENTRIES) {
        if (strcmp(entry.name, name) != 0) continue;
        if (threads % LANES) fail(name, "the block is not made of whole warps");
        Call call = {entry.run, arguments};
        Block own{};
        own.fibers.resize(threads);
        own.shared.resize(shared_bytes + 128);
        for (auto &shown : own.shown) shown.resize(threads);
        own.grid = {grid[0], grid[1], grid[2]};
        own.run = [](void *call) { static_cast<Call *>(call)->kernel(static_cast<Call *>(call)->arguments); };
        own.arguments = &call;
        block() = &own;
        const bool reversed = order & 1;
        own.copies_immediate = order & 2;
        const size_t blocks = static_cast<size_t>(grid[0]) * grid[1] * grid[2];
        for (size_t n = 0; n < blocks; n++) {
            const size_t i = reversed ? blocks - 1 - n : n;
            own.index = {static_cast<u32>(i % grid[0]), static_cast<u32>(i / grid[0] % grid[1]), static_cast<u32>(i / grid[0] / grid[1])};
            run_block(name, own, reversed);
        }
        block() = nullptr;
        return true;
    }
    return false;
}

namespace {

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
size_t pages_of(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

} // namespace

/// Allocates device memory that is filled with NaNs and followed by an inaccessible page, so that any access beyond its end is a fault.
extern "C" unsigned char *allocate(size_t bytes) {
    bytes = (bytes + 15) / 16 * 16;
    void *pages = mmap(nullptr, pages_of(bytes) + page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return nullptr;
    auto *end = static_cast<unsigned char *>(pages) + pages_of(bytes);
    mprotect(end, page_bytes(), PROT_NONE);
    memset(end - bytes, 0xff, bytes);
    return end - bytes;
}

extern "C" void release(unsigned char *memory, size_t bytes) {
    bytes = (bytes + 15) / 16 * 16;
    munmap(memory + bytes - pages_of(bytes), pages_of(bytes) + page_bytes());
}

/// Returns the number of a kernel's parameters; 0 if there is no kernel of this name.
extern "C" u32 parameters(const char *name) {
    for (const Entry &entry : ENTRIES) {
        if (strcmp(entry.name, name) == 0) return entry.parameters;
    }
    return 0;
}

/// The constants that crates/devices/src/cuda/shape.rs repeats.
extern "C" void constants(u32 into[5]) {
    const u32 all[5] = {PROMPT_ROWS, PROMPT_BYTES, TOKEN_ROWS, TOKEN_BYTES, HEADS_A_BLOCK};
    memcpy(into, all, sizeof all);
}
