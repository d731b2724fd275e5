// The device operations that the kernels need beyond plain CUDA C++: 16-bit floats, warp shuffles, tensor cores, asynchronous copies.
//
// emulation/shim.h defines the same names for the host, as the PTX ISA manual describes each instruction. All other files compile with
// either of the two. No CUDA header is included, so a machine needs NVRTC's library and nothing else.
//
// Compile-time option: HALF_IS_FLOAT16 (1: 16-bit floats are IEEE half precision, 0: bfloat16).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/// The bits of a 16-bit float (weight, activation, key or value), which is converted to 32 bits for computing.
typedef u16 half_t;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
/// A kernel of which a multiprocessor may run a single block, so that each thread can have more registers.
#define KERNEL_ALONE(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
/// Dynamic shared memory, whose size is a launch parameter.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define INFINITY_F __int_as_float(0x7f800000)

constexpr u32 ALL_LANES = 0xffffffffu;

DEVICE float widen(half_t bits) {
#if HALF_IS_FLOAT16
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
    return number;
#else
    return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}

/// Rounds to the nearest 16-bit float, ties to even.
DEVICE half_t narrow(float number) {
    half_t bits;
#if HALF_IS_FLOAT16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(number));
#endif
    return bits;
}

/// Rounds two numbers and packs them, the first at the lower address.
DEVICE u32 narrow_pair(float first, float second) {
    u32 bits;
#if HALF_IS_FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
#endif
    return bits;
}

/// Returns 2^x within 2 ulp; 0 for -infinity.
DEVICE float exp2_fast(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

DEVICE void block_sync() { __syncthreads(); }
/// Orders this thread's accesses to global memory, and those of its block before an earlier `block_sync`, for the whole GPU.
DEVICE void device_fence() { __threadfence(); }
/// Adds 1 to a number in global memory, and returns the number before.
DEVICE u32 count_up(u32 *counter) { return atomicAdd(counter, 1u); }
DEVICE void warp_sync() { __syncwarp(); }
template <class T> DEVICE T shuffle_xor(T value, int lanes) { return __shfl_xor_sync(ALL_LANES, value, lanes); }
template <class T> DEVICE T shuffle_up(T value, int lanes) { return __shfl_up_sync(ALL_LANES, value, lanes); }
template <class T> DEVICE T shuffle(T value, int lane) { return __shfl_sync(ALL_LANES, value, lane); }
/// Returns one bit per lane: 1 where `yes` is true. The lowest bit is that of lane 0.
DEVICE u32 ballot(bool yes) { return __ballot_sync(ALL_LANES, yes); }

/// Adds to a 64-bit sum in shared memory, whose halves are at two addresses. The sum does not depend on the order of the additions.
DEVICE void add_shared(u32 *low, u32 *high, u64 value) {
    const u32 part = static_cast<u32>(value), before = atomicAdd(low, part);
    const u32 upper = static_cast<u32>(value >> 32) + (before + part < before);
    if (upper) atomicAdd(high, upper);
}

/// d += a × b on tensor cores: 16 × 16 by 16 × 8, in the fragment layouts of PTX's mma.m16n8k16.
DEVICE void multiply_add(float d[4], const u32 a[4], u32 b0, u32 b1) {
#if HALF_IS_FLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 shared_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

/// Loads four 8 × 8 matrices from shared memory into fragments; lane l passes the address of row l % 8 (16 bytes, aligned) of matrix l / 8.
DEVICE void load_matrices(u32 to[4], const half_t *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// Loads four matrices as `load_matrices` does, and transposes each of them.
DEVICE void load_matrices_transposed(u32 to[4], const half_t *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// Starts copying 16 bytes to shared memory; if not `present`, nothing is read and zeros are written.
DEVICE void copy_async(half_t *shared, const half_t *global, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(present ? 16 : 0)
                 : "memory");
}

/// Combines the copies that this thread has started since the last call into one group.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until all but the last `LEFT` of this thread's groups are complete and visible to this thread.
template <int LEFT> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory"); }
