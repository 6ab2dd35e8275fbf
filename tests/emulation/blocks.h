// Runs the blocks of a launch one after another, in order or in a random one. The threads of a block are fibers on stacks
// of their own; they change over only where they wait for one another, at a barrier or a shuffle. Kernels that wait for
// other blocks would hang.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#ifdef __SSE2__
#include <xmmintrin.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// ---- Switching stacks ----

#if defined(__x86_64__) && defined(__ELF__) && !defined(PORTABLE)
typedef void* Context;  // the stack pointer, with the callee-saved registers above it

// It ends with a jump: of a return, processors foresee that it goes back to the last call.
extern "C" void switch_stacks(void** from, void* to);
asm(R"(
    .text
    .type switch_stacks, @function
switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rdx
    jmp *%rdx
    .size switch_stacks, .-switch_stacks
)");

static void change(Context& from, Context& to) { switch_stacks(&from, to); }

static void prepare(Context& context, unsigned char* stack, size_t size, void (*body)()) {
    void** top = reinterpret_cast<void**>(stack + size);
    *--top = nullptr;  // body does not return
    *--top = reinterpret_cast<void*>(body);
    for (int k = 0; k < 6; ++k) *--top = nullptr;
    context = top;
}
#else  // two system calls a switch
#include <ucontext.h>
typedef ucontext_t Context;

static void change(Context& from, Context& to) { swapcontext(&from, &to); }

static void prepare(Context& context, unsigned char* stack, size_t size, void (*body)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = size;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
}
#endif

namespace emulation {
typedef unsigned long long u64;

constexpr int WARP_SIZE = 32;
constexpr int MOST = 1024;            // threads of a block
constexpr size_t STACK = (256 << 10) + 192;  // untouched pages cost nothing; at powers of two the tops of all stacks
                                             // would share a few lines of the cache

enum State { NEW, READY, ENDED, SHUFFLE, BARRIER };

struct Fiber {
    Context context;
    unsigned char* stack;
    State state;
    int line;         // where it waits
    unsigned source;  // the lane whose value it wants
    u64 in, out;
};

struct Index {
    unsigned x;
};

static Index threadIdx, blockIdx;
static u64 block_number;       // over all launches, from 1
static const void* const* arguments;  // of the launch: where each lies
static bool mask_refused;

static Fiber fibers[MOST];
static Context scheduler;
static unsigned char* stacks;
static unsigned char* spare[MOST];  // those that no thread uses
static int spares;
static int threads;
static void (*enter)();
static unsigned random_state;  // 0: threads and blocks in order
static char message[256];

static void body() {
    enter();
    Fiber& fiber = fibers[threadIdx.x];
    fiber.state = ENDED;
    change(fiber.context, scheduler);
}

// Lets the others run until all partners are here; returns what they have found together.
static u64 wait(State state, u64 value, int line, unsigned source = 0) {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.state = state;
    fiber.in = value;
    fiber.line = line;
    fiber.source = source;
    change(fiber.context, scheduler);
    return fiber.out;
}

static bool together(const Fiber& a, const Fiber& b) { return a.state == b.state && a.line == b.line; }

// Lets go those warps whose lanes all wait at one shuffle; false if there are none.
static bool release_warps(const int* numbers, int count) {
    bool released = false;
    for (int k = 0; k < count; ++k) {
        Fiber* warp = fibers + WARP_SIZE * numbers[k];
        bool all = warp->state == SHUFFLE;
        for (int lane = 0; lane < WARP_SIZE; ++lane) all = all && together(warp[lane], *warp);
        if (!all) continue;
        for (int lane = 0; lane < WARP_SIZE; ++lane) warp[lane].out = warp[warp[lane].source].in;
        for (int lane = 0; lane < WARP_SIZE; ++lane) warp[lane].state = READY;
        released = true;
    }
    return released;
}

// Lets go the block if all its threads wait at one barrier, else false.
static bool release_block() {
    u64 any = 0;
    for (int t = 0; t < threads; ++t) {
        if (fibers[t].state != BARRIER || !together(fibers[t], fibers[0])) return false;
        any |= fibers[t].in;
    }
    for (int t = 0; t < threads; ++t) fibers[t].out = any, fibers[t].state = READY;
    return true;
}

static const char* waits_in_vain() {
    static const char* does[] = {"is new", "is ready", "has ended", "waits at a shuffle", "waits at a barrier"};
    int one = 0;
    while (fibers[one].state == ENDED) ++one;
    int other = fibers[one].state == SHUFFLE ? one / WARP_SIZE * WARP_SIZE : 0;
    while (together(fibers[other], fibers[one])) ++other;
    const Fiber &a = fibers[one], &b = fibers[other];
    snprintf(message, sizeof message, "block %u: thread %d %s in line %d in vain, thread %d %s (last stop: line %d)",
             blockIdx.x, one, does[a.state], a.line, other, does[b.state], b.line);
    return message;
}

static unsigned random_below(unsigned n) {
    random_state = random_state * 1664525u + 1013904223u;
    return unsigned(u64(random_state) * n >> 32);
}

static void shuffle(int* order, int count) {
    for (int k = count - 1; k > 0; --k) std::swap(order[k], order[random_below(k + 1)]);
}

// Lets a thread run to its next stop, if it may. It keeps its stack until it ends.
static void step(int thread) {
    Fiber& fiber = fibers[thread];
    if (fiber.state == NEW) {
        fiber.stack = spare[--spares];
        prepare(fiber.context, fiber.stack, STACK, body);
    } else if (fiber.state != READY) {
        return;
    }
    threadIdx.x = thread;
    change(scheduler, fiber.context);
    if (fiber.state == ENDED) spare[spares++] = fiber.stack;
}

// A few warps go as far as they can before the next ones start, so that few stacks are in use at a time. In order it is one
// warp; in random order the threads of any four go side by side, others the next time.
static const char* run_block() {
    static int warps[MOST / WARP_SIZE], order[MOST];
    const int count = threads / WARP_SIZE, beside = random_state ? 4 : 1;
    ++block_number;
    for (int w = 0; w < count; ++w) warps[w] = w;
    for (int t = 0; t < threads; ++t) fibers[t].state = NEW, fibers[t].line = 0;
    do {
        if (random_state) shuffle(warps, count);
        for (int first = 0; first < count; first += beside) {
            const int some = first + beside < count ? beside : count - first;
            for (int k = 0; k < some * WARP_SIZE; ++k)
                order[k] = warps[first + k / WARP_SIZE] * WARP_SIZE + k % WARP_SIZE;
            do {
                if (random_state) shuffle(order, some * WARP_SIZE);
                for (int k = 0; k < some * WARP_SIZE; ++k) step(order[k]);
                if (mask_refused) return "only shuffles of whole warps are emulated";
            } while (release_warps(warps + first, some));
        }
    } while (release_block());
    return spares == MOST ? nullptr : waits_in_vain();
}

static const char* run(void (*kernel)(), int grid, int block, const void* const* at, unsigned seed) {
    if (block < 1 || block > MOST || block % WARP_SIZE) return "a block must have whole warps, 32 at most";
    if (!stacks) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* memory = mmap(nullptr, STACK * MOST, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (memory == MAP_FAILED) return "no memory for the stacks";
        stacks = static_cast<unsigned char*>(memory);
    }
    for (spares = 0; spares < MOST; ++spares) spare[spares] = stacks + STACK * (MOST - 1 - spares);
    enter = kernel, threads = block, arguments = at, mask_refused = false, random_state = seed;
#ifdef __SSE2__  // CuPy compiles with -ftz=true: denormals count as 0 (here those of double as well)
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);
#endif
    const char* problem = nullptr;
    int* order = static_cast<int*>(malloc(sizeof(int) * (grid + 1)));
    for (int k = 0; k < grid; ++k) order[k] = k;
    if (seed) shuffle(order, grid);
    for (int k = 0; k < grid && !problem; ++k) {
        blockIdx.x = order[k];
        problem = run_block();
    }
    free(order);
#ifdef __SSE2__
    _mm_setcsr(control);
#endif
#ifdef __SANITIZE_ADDRESS__
    if (problem) __asan_unpoison_memory_region(stacks, STACK * MOST);  // left by threads that never ended
#endif
    return problem;
}
}  // namespace emulation
