// A GPU without hardware, behind the programming interfaces of NVIDIA's libraries: libcuda, libnvrtc, libcublasLt and libnccl in one file,
// which links of these names refer to (ci/gpu.sh builds it). So the code in crates/devices/src/cuda/gpu, whole workers and bench/gpu.py run on a
// machine without a GPU. The kernels are the real sources, built with g++ (launch.cpp); only times mean nothing.
//
// Work is executed as late as possible: a stream's queue runs when the host waits for it, so that a missing wait gives wrong results. Device
// memory starts as NaNs. When the last reference to the context is released, everything that was created must have been released.
//
// Settings, in the environment:
//   EMULATED_GPU_SOURCES      folder of launch.cpp
//   EMULATED_GPU_BUILT        folder for the compiled kernels, empty at first
//   EMULATED_GPU_DRIVER       the driver's version [default: 13000]
//   EMULATED_GPU_NO_GRAPHS    number of graphs whose instantiation is refused [default: 0]
//   EMULATED_GPU_NO_IPC       1: memory of other processes cannot be mapped
//   EMULATED_GPU_LOST_AFTER   number of launches after which the device is lost

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

namespace {

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, MAP_FAILED_RESULT = 205, NOT_FOUND = 500,
              NOT_READY = 600, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900 };

constexpr size_t MEMORY_BYTES = size_t(8) << 30;
/// Larger allocations start as zeros, because filling them would take memory of the host.
constexpr size_t FILLED_BYTES = size_t(16) << 20;
constexpr size_t SHARED_PLAIN_BYTES = 48 << 10, SHARED_MAX_BYTES = 227 << 10;

u64 setting(const char *name, u64 otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}

typedef std::function<void()> Work;

struct Graph {
    std::vector<Work> work;
};

struct Stream {
    std::recursive_mutex lock;
    std::deque<Work> queue;
    Graph *capture = nullptr;
};

struct Event {
    std::chrono::steady_clock::time_point at;
    Stream *stream = nullptr;
};

struct Module {
    void *library;
};

struct Function {
    void *library;
    std::string name;
    u32 parameters;
    size_t shared_max = SHARED_PLAIN_BYTES;
};

struct Allocation {
    size_t bytes;
    int file;
};

std::mutex state;
std::map<u64, Allocation> allocations, imports;
/// Streams by address. A thread that drains all streams shares their ownership, because another thread may destroy one meanwhile.
std::map<void *, std::shared_ptr<Stream>> streams;
int contexts = 0;
std::map<std::string, long> live;
std::atomic<u64> launches{0};
std::atomic<bool> lost{false};

void count(const char *what, long change) {
    const std::lock_guard<std::mutex> held(state);
    live[what] += change;
}

/// Ends the process: the caller has broken a rule of the driver that a GPU might not notice.
void broken(const std::string &what) {
    fprintf(stderr, "emulated GPU: %s\n", what.c_str());
    abort();
}

size_t pages_of(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

void drain(Stream *stream) {
    const std::lock_guard<std::recursive_mutex> held(stream->lock);
    if (stream->capture) broken("the host waits for a stream that is being captured");
    while (!stream->queue.empty()) {
        const Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        work();
    }
}

void drain_all() {
    std::map<void *, std::shared_ptr<Stream>> all;
    {
        const std::lock_guard<std::mutex> held(state);
        all = streams;
    }
    for (const auto &entry : all) {
        const std::lock_guard<std::recursive_mutex> held(entry.second->lock);
        if (!entry.second->capture) drain(entry.second.get());
    }
}

Result enqueue(Stream *stream, Work work) {
    if (lost) return LAUNCH_FAILED;
    const std::lock_guard<std::recursive_mutex> held(stream->lock);
    if (stream->capture) {
        stream->capture->work.push_back(std::move(work));
    } else {
        stream->queue.push_back(std::move(work));
    }
    return SUCCESS;
}

Result settled() { return lost ? LAUNCH_FAILED : SUCCESS; }

/// Fails unless the bytes are within one allocation or mapping.
void check(u64 address, size_t bytes, const char *what) {
    const std::lock_guard<std::mutex> held(state);
    for (const auto *all : {&allocations, &imports}) {
        auto after = all->upper_bound(address);
        if (after == all->begin()) continue;
        --after;
        if (address + bytes <= after->first + after->second.bytes) return;
    }
    broken(std::string(what) + " of " + std::to_string(bytes) + " bytes is not within one allocation");
}

} // namespace

// ---- libcuda

#define API extern "C" __attribute__((visibility("default")))

API int cuInit(u32) { return SUCCESS; }
API int cuDriverGetVersion(int *version) { return *version = static_cast<int>(setting("EMULATED_GPU_DRIVER", 13000)), SUCCESS; }
API int cuDeviceGetCount(int *found) { return *found = 1, SUCCESS; }
API int cuDeviceGet(int *device, int number) { return *device = number, number == 0 ? SUCCESS : INVALID_VALUE; }
API int cuDeviceGetName(char *name, int len, int) { return snprintf(name, len, "emulated GPU"), SUCCESS; }
API int cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 16: return *value = 4, SUCCESS;
    case 75: return *value = 9, SUCCESS;
    case 76: return *value = 0, SUCCESS;
    case 97: return *value = SHARED_MAX_BYTES, SUCCESS;
    default: return INVALID_VALUE;
    }
}
API int cuDevicePrimaryCtxRetain(void **context, int) {
    const std::lock_guard<std::mutex> held(state);
    contexts++;
    return *context = &contexts, SUCCESS;
}
API int cuDevicePrimaryCtxRelease_v2(int) {
    const std::lock_guard<std::mutex> held(state);
    if (--contexts > 0) return SUCCESS;
    live["allocations"] = static_cast<long>(allocations.size()), live["mappings"] = static_cast<long>(imports.size());
    std::string left;
    for (const auto &[what, count] : live) {
        if (count) left += " " + std::to_string(count) + " " + what;
    }
    if (!left.empty() && !lost) broken("the context is released, and these are left:" + left);
    return SUCCESS;
}
API int cuCtxSetCurrent(void *) { return SUCCESS; }
API int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }
API int cuGetErrorName(int error, const char **name) {
    thread_local std::string text;
    text = "CUDA_ERROR_" + std::to_string(error);
    return *name = text.c_str(), SUCCESS;
}
API int cuGetErrorString(int error, const char **name) { return cuGetErrorName(error, name); }

API int cuModuleLoadData(void **module, const void *image) {
    void *library = dlopen(static_cast<const char *>(image), RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "emulated GPU: %s\n", dlerror()), INVALID_VALUE;
    count("modules", 1);
    return *module = new Module{library}, SUCCESS;
}
API int cuModuleUnload(void *module) {
    count("modules", -1);
    delete static_cast<Module *>(module);
    return SUCCESS;
}
API int cuModuleGetFunction(void **function, void *module, const char *name) {
    void *library = static_cast<Module *>(module)->library;
    const auto parameters = reinterpret_cast<u32 (*)(const char *)>(dlsym(library, "parameters"));
    if (!parameters || !parameters(name)) return NOT_FOUND;
    // Functions live as long as the process: they have no call that releases them.
    return *function = new Function{library, name, parameters(name)}, SUCCESS;
}
API int cuFuncSetAttribute(void *function, int attribute, int value) {
    if (attribute != 8 || value > static_cast<int>(SHARED_MAX_BYTES)) return INVALID_VALUE;
    static_cast<Function *>(function)->shared_max = value;
    return SUCCESS;
}

API int cuStreamCreate(void **stream, u32) {
    auto made = std::make_shared<Stream>();
    const std::lock_guard<std::mutex> held(state);
    *stream = made.get();
    streams[*stream] = made, live["streams"]++;
    return SUCCESS;
}
API int cuStreamCreateWithPriority(void **stream, u32 flags, int priority) {
    return priority <= 0 && priority >= -5 ? cuStreamCreate(stream, flags) : INVALID_VALUE;
}
API int cuStreamSynchronize(void *stream) { return drain(static_cast<Stream *>(stream)), settled(); }
API int cuStreamQuery(void *stream) {
    // The first query after new work finds it unfinished.
    auto *own = static_cast<Stream *>(stream);
    const std::lock_guard<std::recursive_mutex> held(own->lock);
    const bool busy = !own->queue.empty();
    drain(own);
    return lost ? LAUNCH_FAILED : busy ? NOT_READY : SUCCESS;
}
API int cuStreamDestroy_v2(void *stream) {
    drain(static_cast<Stream *>(stream));
    const std::lock_guard<std::mutex> held(state);
    streams.erase(stream), live["streams"]--;
    return SUCCESS;
}
API int cuStreamIsCapturing(void *stream, int *status) { return *status = static_cast<Stream *>(stream)->capture ? 1 : 0, SUCCESS; }
API int cuStreamBeginCapture_v2(void *stream, int) {
    drain(static_cast<Stream *>(stream));
    static_cast<Stream *>(stream)->capture = new Graph;
    count("graphs", 1);
    return SUCCESS;
}
API int cuStreamEndCapture(void *stream, void **graph) {
    *graph = std::exchange(static_cast<Stream *>(stream)->capture, nullptr);
    return *graph ? SUCCESS : CAPTURE_UNSUPPORTED;
}
API int cuGraphInstantiateWithFlags(void **made, void *graph, u64) {
    static std::atomic<u64> refused{0};
    if (refused++ < setting("EMULATED_GPU_NO_GRAPHS", 0)) return OUT_OF_MEMORY;
    count("executable graphs", 1);
    return *made = new Graph(*static_cast<Graph *>(graph)), SUCCESS;
}
API int cuGraphDestroy(void *graph) { return count("graphs", -1), delete static_cast<Graph *>(graph), SUCCESS; }
API int cuGraphExecDestroy(void *graph) {
    drain_all();
    return count("executable graphs", -1), delete static_cast<Graph *>(graph), SUCCESS;
}
API int cuGraphLaunch(void *graph, void *stream) {
    return enqueue(static_cast<Stream *>(stream), [graph] {
        for (const Work &work : static_cast<Graph *>(graph)->work) work();
    });
}

API int cuEventCreate(void **event, u32) { return count("events", 1), *event = new Event, SUCCESS; }
API int cuEventDestroy_v2(void *event) {
    auto *own = static_cast<Event *>(event);
    if (own->stream) drain(own->stream);
    return count("events", -1), delete own, SUCCESS;
}
API int cuEventRecord(void *event, void *stream) {
    auto *own = static_cast<Event *>(event);
    own->stream = static_cast<Stream *>(stream);
    return enqueue(own->stream, [own] { own->at = std::chrono::steady_clock::now(); });
}
API int cuEventQuery(void *event) {
    auto *own = static_cast<Event *>(event);
    return own->stream ? cuStreamQuery(own->stream) : SUCCESS;
}
API int cuEventSynchronize(void *event) {
    auto *own = static_cast<Event *>(event);
    return own->stream ? cuStreamSynchronize(own->stream) : SUCCESS;
}
API int cuEventElapsedTime_v2(float *ms, void *from, void *to) {
    *ms = std::chrono::duration<float, std::milli>(static_cast<Event *>(to)->at - static_cast<Event *>(from)->at).count();
    return SUCCESS;
}

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    const std::lock_guard<std::mutex> held(state);
    size_t used = 0;
    for (const auto &entry : allocations) used += entry.second.bytes;
    return *total = MEMORY_BYTES, *free_bytes = MEMORY_BYTES - std::min(used, MEMORY_BYTES), SUCCESS;
}
API int cuMemAlloc_v2(u64 *address, size_t bytes) {
    size_t free_bytes, total;
    cuMemGetInfo_v2(&free_bytes, &total);
    if (bytes == 0 || bytes > free_bytes) return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
    const int file = memfd_create("device memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(pages_of(bytes)))) return OUT_OF_MEMORY;
    void *pages = mmap(nullptr, pages_of(bytes) + pages_of(1), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mmap(pages, pages_of(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    if (bytes <= FILLED_BYTES) memset(pages, 0xff, bytes);
    const std::lock_guard<std::mutex> held(state);
    allocations[*address = reinterpret_cast<u64>(pages)] = {bytes, file};
    return SUCCESS;
}
API int cuMemFree_v2(u64 address) {
    drain_all();
    const std::lock_guard<std::mutex> held(state);
    const auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID_VALUE;
    munmap(reinterpret_cast<void *>(address), pages_of(found->second.bytes) + pages_of(1));
    close(found->second.file);
    allocations.erase(found);
    return SUCCESS;
}
API int cuMemHostAlloc(void **memory, size_t bytes, u32) { return count("pinned regions", 1), *memory = malloc(bytes), SUCCESS; }
API int cuMemFreeHost(void *memory) { return drain_all(), count("pinned regions", -1), free(memory), SUCCESS; }
API int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t bytes, void *stream) {
    check(to, bytes, "a copy to the device");
    return enqueue(static_cast<Stream *>(stream), [=] { memcpy(reinterpret_cast<void *>(to), from, bytes); });
}
API int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t bytes, void *stream) {
    check(from, bytes, "a copy from the device");
    return enqueue(static_cast<Stream *>(stream), [=] { memcpy(to, reinterpret_cast<const void *>(from), bytes); });
}
API int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void *stream) {
    check(to, bytes, "the target of a copy"), check(from, bytes, "the source of a copy");
    return enqueue(static_cast<Stream *>(stream), [=] { memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes); });
}
API int cuMemsetD8Async(u64 to, unsigned char value, size_t bytes, void *stream) {
    check(to, bytes, "a fill");
    return enqueue(static_cast<Stream *>(stream), [=] { memset(reinterpret_cast<void *>(to), value, bytes); });
}

API int cuLaunchKernel(void *function, u32 x, u32 y, u32 z, u32 threads, u32 threads_y, u32 threads_z, u32 shared, void *stream, void **arguments,
                       void **) {
    auto *own = static_cast<Function *>(function);
    if (!x || !y || !z || y > 65535 || z > 65535 || threads_y != 1 || threads_z != 1 || threads > 1024 || shared > own->shared_max) return INVALID_VALUE;
    const u64 lost_after = setting("EMULATED_GPU_LOST_AFTER", ~u64(0));
    if (launches++ >= lost_after) lost = true;
    std::vector<u64> words(own->parameters);
    // The host passes every argument as a word of eight bytes.
    for (u32 i = 0; i < own->parameters; i++) memcpy(&words[i], arguments[i], 8);
    const auto launch = reinterpret_cast<bool (*)(const char *, const u32 *, u32, u32, void **, u32)>(dlsym(own->library, "launch"));
    return enqueue(static_cast<Stream *>(stream), [=] {
        const u32 grid[3] = {x, y, z};
        std::vector<u64> own_words = words;
        std::vector<void *> pointers;
        for (u64 &word : own_words) pointers.push_back(&word);
        launch(own->name.c_str(), grid, threads, shared, pointers.data(), 0);
    });
}

/// What an IPC handle holds: the file of the memory in the process that allocated it.
struct IpcHandle {
    u64 process, file, bytes;
    unsigned char rest[40];
};
static_assert(sizeof(IpcHandle) == 64, "CUipcMemHandle has 64 bytes");

API int cuIpcGetMemHandle(IpcHandle *handle, u64 address) {
    const std::lock_guard<std::mutex> held(state);
    const auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID_VALUE;
    *handle = {static_cast<u64>(getpid()), static_cast<u64>(found->second.file), found->second.bytes, {}};
    return SUCCESS;
}
API int cuIpcOpenMemHandle_v2(u64 *address, IpcHandle handle, u32) {
    if (setting("EMULATED_GPU_NO_IPC", 0)) return MAP_FAILED_RESULT;
    if (handle.process == static_cast<u64>(getpid())) return INVALID_CONTEXT;
    const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID_VALUE;
    void *pages = mmap(nullptr, pages_of(handle.bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (pages == MAP_FAILED) return MAP_FAILED_RESULT;
    const std::lock_guard<std::mutex> held(state);
    imports[*address = reinterpret_cast<u64>(pages)] = {handle.bytes, file};
    return SUCCESS;
}
API int cuIpcCloseMemHandle(u64 address) {
    drain_all();
    const std::lock_guard<std::mutex> held(state);
    const auto found = imports.find(address);
    if (found == imports.end()) return INVALID_VALUE;
    munmap(reinterpret_cast<void *>(address), pages_of(found->second.bytes));
    close(found->second.file);
    imports.erase(found);
    return SUCCESS;
}
API int cuMemGetAddressRange_v2(u64 *start, size_t *bytes, u64 address) {
    const std::lock_guard<std::mutex> held(state);
    for (const auto *all : {&allocations, &imports}) {
        const auto found = all->find(address);
        if (found != all->end()) return *start = address, *bytes = found->second.bytes, SUCCESS;
    }
    return INVALID_VALUE;
}

// ---- libnvrtc: compiles the kernels for this machine's processor. The "machine code" is the path of the library.

struct Program {
    std::string log, code;
};

API int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
API int nvrtcCreateProgram(void **program, const char *, const char *, int, const char *const *, const char *const *) {
    return *program = new Program, 0;
}
API int nvrtcDestroyProgram(void **program) { return delete static_cast<Program *>(*program), 0; }
API int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    auto *own = static_cast<Program *>(program);
    const char *sources = getenv("EMULATED_GPU_SOURCES"), *built = getenv("EMULATED_GPU_BUILT");
    if (!sources || !built) return own->log = "EMULATED_GPU_SOURCES and EMULATED_GPU_BUILT are not set", 6;
    std::string definitions;
    for (int i = 0; i < count; i++) {
        const std::string option = options[i];
        if (option.rfind("-D", 0) == 0) definitions += " " + option;
    }
    own->code = std::string(built) + "/kernels-" + std::to_string(std::hash<std::string>{}(definitions)) + ".so";
    // The folder belongs to one run, so its files were built from these sources.
    if (access(own->code.c_str(), R_OK) == 0) return 0;
    const std::string part = own->code + "." + std::to_string(getpid());
    const std::string command = "g++ -std=c++17 -O2 -Wno-unknown-pragmas -U_FORTIFY_SOURCE -shared -fPIC" + definitions + " -o '" + part + "' '" +
                                sources + "/launch.cpp' 2>&1 && mv '" + part + "' '" + own->code + "'";
    FILE *run = popen(command.c_str(), "r");
    char line[1024];
    while (run && fgets(line, sizeof line, run)) own->log += line;
    return run && pclose(run) == 0 ? 0 : 6;
}
API int nvrtcGetProgramLogSize(void *program, size_t *bytes) { return *bytes = static_cast<Program *>(program)->log.size() + 1, 0; }
API int nvrtcGetProgramLog(void *program, char *to) { return strcpy(to, static_cast<Program *>(program)->log.c_str()), 0; }
API int nvrtcGetCUBINSize(void *program, size_t *bytes) { return *bytes = static_cast<Program *>(program)->code.size() + 1, 0; }
API int nvrtcGetCUBIN(void *program, char *to) { return strcpy(to, static_cast<Program *>(program)->code.c_str()), 0; }
API const char *nvrtcGetErrorString(int) { return "the emulated NVRTC failed"; }

// ---- libcublasLt: column-major D = Aᵀ × B + beta × D.

struct Layout {
    int type;
    u64 rows, columns;
    int64_t stride;
};
struct Operation {
    int transposed_a = 0;
};
struct Heuristic {
    u64 algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
static_assert(sizeof(Heuristic) == 96, "cublasLtMatmulHeuristicResult_t has 96 bytes");

namespace {

constexpr int INVALID = 7;
constexpr int FLOAT32 = 0, FLOAT16 = 2, BFLOAT16 = 14;

float widened(u16 bits, int type) {
    u32 wide = static_cast<u32>(bits) << 16;
    float number;
    if (type == FLOAT16) {
        const float magnitude = std::ldexp(static_cast<float>(bits & 0x3ff) + ((bits & 0x7c00) ? 1024.0f : 0.0f), std::max((bits >> 10 & 31) - 25, -24));
        number = (bits & 0x7c00) == 0x7c00 ? ((bits & 0x3ff) ? NAN : INFINITY) : magnitude;
        return bits & 0x8000 ? -number : number;
    }
    memcpy(&number, &wide, 4);
    return number;
}

u16 narrowed(float number, int type) {
    if (type == FLOAT16) {
        const _Float16 half = static_cast<_Float16>(number);
        u16 bits;
        memcpy(&bits, &half, 2);
        return bits;
    }
    u32 bits;
    memcpy(&bits, &number, 4);
    return number != number ? 0x7fff : static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<float> widened(const void *from, const Layout &layout) {
    const auto *bits = static_cast<const u16 *>(from);
    std::vector<float> numbers(layout.rows * layout.columns);
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = widened(bits[i], layout.type);
    return numbers;
}

} // namespace

API size_t cublasLtGetVersion() { return 130000; }
API int cublasLtCreate(void **handle) { return count("cuBLASLt handles", 1), *handle = new int, 0; }
API int cublasLtDestroy(void *handle) { return count("cuBLASLt handles", -1), delete static_cast<int *>(handle), 0; }
API int cublasLtMatrixLayoutCreate(void **layout, int type, u64 rows, u64 columns, int64_t stride) {
    return *layout = new Layout{type, rows, columns, stride}, stride == static_cast<int64_t>(rows) ? 0 : INVALID;
}
API int cublasLtMatrixLayoutDestroy(void *layout) { return delete static_cast<Layout *>(layout), 0; }
API int cublasLtMatmulDescCreate(void **operation, int compute, int scale) { return *operation = new Operation, compute == 68 && scale == FLOAT32 ? 0 : INVALID; }
API int cublasLtMatmulDescSetAttribute(void *operation, int attribute, const void *value, size_t bytes) {
    if (attribute != 3 || bytes != 4) return INVALID;
    return memcpy(&static_cast<Operation *>(operation)->transposed_a, value, 4), 0;
}
API int cublasLtMatmulDescDestroy(void *operation) { return delete static_cast<Operation *>(operation), 0; }
API int cublasLtMatmulPreferenceCreate(void **preference) { return *preference = new int, 0; }
API int cublasLtMatmulPreferenceSetAttribute(void *, int attribute, const void *, size_t bytes) { return attribute == 1 && bytes == 8 ? 0 : INVALID; }
API int cublasLtMatmulPreferenceDestroy(void *preference) { return delete static_cast<int *>(preference), 0; }
API int cublasLtMatmulAlgoGetHeuristic(void *, void *operation, const Layout *a, const Layout *b, const Layout *c, const Layout *d, void *, int wanted,
                                       Heuristic *found, int *number) {
    const bool fits = static_cast<Operation *>(operation)->transposed_a == 1 && a->rows == b->rows && a->columns == c->rows && b->columns == c->columns &&
                      c->rows == d->rows && c->columns == d->columns && c->type == d->type && a->type == b->type;
    if (!fits) return INVALID;
    *number = std::min(wanted, 2);
    for (int i = 0; i < *number; i++) found[i] = {{static_cast<u64>(i) + 1}, 0, 0, 1.0f, {}};
    return 0;
}
API int cublasLtMatmul(void *, void *, const float *alpha, const void *a, const Layout *a_layout, const void *b, const Layout *b_layout, const float *beta,
                       const void *c, const Layout *, void *d, const Layout *d_layout, const u64 *algorithm, void *workspace, size_t workspace_bytes,
                       void *stream) {
    const Layout from_a = *a_layout, from_b = *b_layout, to = *d_layout;
    const float scale = *alpha, kept = *beta;
    const size_t element = to.type == FLOAT32 ? 4 : 2;
    if (*algorithm == 0 || *algorithm > 2 || c != d || (to.type != FLOAT32 && to.type != from_a.type)) return INVALID;
    check(reinterpret_cast<u64>(a), from_a.rows * from_a.columns * 2, "a GEMM's first matrix");
    check(reinterpret_cast<u64>(b), from_b.rows * from_b.columns * 2, "a GEMM's second matrix");
    check(reinterpret_cast<u64>(d), to.rows * to.columns * element, "a GEMM's result");
    check(reinterpret_cast<u64>(workspace), workspace_bytes, "a GEMM's workspace");
    const int enqueued = enqueue(static_cast<Stream *>(stream), [=] {
        const std::vector<float> weights = widened(a, from_a), inputs = widened(b, from_b);
        for (u64 n = 0; n < to.columns; n++) {
            for (u64 m = 0; m < to.rows; m++) {
                float sums[8] = {};
                for (u64 k = 0; k < from_a.rows; k++) sums[k % 8] += weights[m * from_a.rows + k] * inputs[n * from_a.rows + k];
                float sum = 0;
                for (const float part : sums) sum += part;
                const u64 at = n * to.rows + m;
                if (to.type == FLOAT32) {
                    float *place = static_cast<float *>(d) + at;
                    *place = sum * scale + (kept != 0 ? *place * kept : 0.0f);
                } else {
                    static_cast<u16 *>(d)[at] = narrowed(sum * scale, to.type);
                }
            }
        }
    });
    return enqueued == SUCCESS ? 0 : 14;
}

// ---- libnccl: communicators of one rank, which sends to itself.

struct Communicator {
    int ranks;
};
struct UniqueId {
    char bytes[128];
};

namespace {

struct Transfer {
    void *memory;
    size_t bytes;
    Stream *stream;
};
thread_local std::deque<Transfer> sent, received;

} // namespace

API int ncclGetVersion(int *version) { return *version = 22800, 0; }
API int ncclGetUniqueId(UniqueId *id) {
    static std::atomic<u64> next{1};
    const u64 own = next++;
    memset(id, 0, sizeof *id);
    return memcpy(id, &own, sizeof own), 0;
}
API int ncclCommInitRankConfig(void **communicator, int ranks, UniqueId, int rank, void *) {
    if (ranks != 1 || rank != 0) return 5;
    return count("communicators", 1), *communicator = new Communicator{ranks}, 0;
}
API int ncclCommGetAsyncError(void *, int *result) { return *result = 0, 0; }
API int ncclCommFinalize(void *) { return 0; }
API int ncclCommDestroy(void *communicator) { return count("communicators", -1), delete static_cast<Communicator *>(communicator), 0; }
API int ncclCommAbort(void *communicator) { return ncclCommDestroy(communicator); }
API int ncclGroupStart() { return 0; }
API int ncclGroupEnd() {
    if (sent.size() != received.size()) return 5;
    while (!sent.empty()) {
        const Transfer from = sent.front(), to = received.front();
        sent.pop_front(), received.pop_front();
        if (from.bytes != to.bytes) return 5;
        enqueue(to.stream, [=] { memcpy(to.memory, from.memory, to.bytes); });
    }
    return 0;
}
API int ncclSend(void *from, size_t bytes, int, int, void *, void *stream) { return sent.push_back({from, bytes, static_cast<Stream *>(stream)}), 0; }
API int ncclRecv(void *to, size_t bytes, int, int, void *, void *stream) { return received.push_back({to, bytes, static_cast<Stream *>(stream)}), 0; }
API int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *) { return 0; }
API const char *ncclGetErrorString(int) { return "invalid usage of the emulated NCCL"; }
