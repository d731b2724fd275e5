// Runs a kernel by its name, as cuLaunchKernel does: a pointer to each argument. Built by engine/src/cuda/tests/emulated.rs.

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

struct Entry {
    const char *name;
    void (*run)(void **);
};

#define ENTRY(name) {#name, [](void **arguments) { unpack_all(name, arguments); }}
const Entry ENTRIES[] = {ENTRY(embed),         ENTRY(rms_norm),     ENTRY(turns),   ENTRY(store_kv), ENTRY(swiglu),
                         ENTRY(attend_prompt), ENTRY(attend_token), ENTRY(combine), ENTRY(sample)};

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

/// Of all threads of a block, the largest there may be. Pages that are not touched take no memory.
std::unique_ptr<unsigned char[]> &stacks() {
    static thread_local std::unique_ptr<unsigned char[]> stacks(new unsigned char[1024 * STACK_BYTES]);
    return stacks;
}

/// Lets one thread run until it waits or ends.
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

/// Lets go on who waits for others that have come. False when nobody can.
bool release(const char *kernel, std::vector<Fiber> &fibers) {
    bool released = false;
    for (size_t first = 0; first < fibers.size(); first += LANES) {
        const auto begin = fibers.begin() + first, end = begin + LANES;
        if (!std::all_of(begin, end, [](const Fiber &lane) { return lane.state == Fiber::AT_WARP; })) continue;
        for (auto lane = begin; lane != end; lane++) {
            if (strcmp(lane->operation, begin->operation) != 0) fail(kernel, "the lanes of a warp are at different operations");
            lane->state = Fiber::READY;
        }
        released = true;
    }
    if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber &fiber) { return fiber.state == Fiber::AT_BLOCK; })) {
        for (auto &fiber : fibers) fiber.state = Fiber::READY;
        released = true;
    }
    return released;
}

/// 0: threads and blocks run first to last, 1: last to first, others: in an order drawn from this seed.
void put_in_order(std::vector<size_t> &places, u64 order) {
    if (order == 1) std::reverse(places.begin(), places.end());
    if (order < 2) return;
    u64 state = order;
    for (size_t i = places.size(); i > 1; i--) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(places[i - 1], places[(state >> 33) % i]);
    }
}

std::vector<size_t> places(size_t count, u64 order) {
    std::vector<size_t> places(count);
    for (size_t i = 0; i < count; i++) places[i] = i;
    put_in_order(places, order);
    return places;
}

void run_block(const char *kernel, Block &own, u64 order) {
    memset(own.shared.data(), 0xff, own.shared.size());
    for (size_t i = 0; i < own.fibers.size(); i++) {
        Fiber &fiber = own.fibers[i];
        fiber.state = Fiber::READY, fiber.begun = false, fiber.exchanges = 0;
        fiber.index = {static_cast<u32>(i), 0, 0};
        fiber.copies.assign(1, {});
    }
    const auto threads = places(own.fibers.size(), order);
    for (;;) {
        for (size_t thread : threads) {
            while (own.fibers[thread].state == Fiber::READY) resume(own, own.fibers[thread]);
        }
        if (std::all_of(own.fibers.begin(), own.fibers.end(), [](const Fiber &fiber) { return fiber.state == Fiber::DONE; })) return;
        if (!release(kernel, own.fibers)) fail(kernel, "some threads wait for others that never come");
    }
}

} // namespace

/// Runs a kernel to its end. False when there is none of this name.
extern "C" bool launch(const char *name, const u32 grid[3], u32 threads, u32 shared_bytes, void **arguments, u64 order) {
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
        for (size_t i : places(static_cast<size_t>(grid[0]) * grid[1] * grid[2], order)) {
            own.index = {static_cast<u32>(i % grid[0]), static_cast<u32>(i / grid[0] % grid[1]), static_cast<u32>(i / grid[0] / grid[1])};
            run_block(name, own, order);
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

/// Memory of the device: all NaNs, and a page behind it that nobody may touch, so that who reads or writes beyond its end is noticed.
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

/// What engine/src/cuda/shape.rs and device.rs repeat.
extern "C" void constants(u32 into[4]) {
    const u32 all[4] = {PROMPT_ROWS, PROMPT_BYTES, TOKEN_ROWS, TOKEN_BYTES};
    memcpy(into, all, sizeof all);
}
