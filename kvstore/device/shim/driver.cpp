// Runs the kernels of kernels.cu on the CPU; see cuda_on_cpu.hpp. KV_KERNELS is the list of kernels, as KV_KERNEL(name).
//
// One launch at a time: what threads of a GPU find in registers (threadIdx and so on) are variables of the process here.

#include "cuda_on_cpu.hpp"

#include KV_SOURCE

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace kv_on_cpu {
namespace {

constexpr std::size_t kStackBytes = 64 << 10;

enum class State { kReady, kAtBarrier, kAtShuffle, kOver, kFaulty };

struct Fiber {
  ucontext_t context;
  State state = State::kReady;
  dim3 index{};
  int line = 0;
  std::uint32_t mask = 0;
  unsigned int from_lane = 0;
  std::uint64_t value = 0;
  std::string fault;
  void* fake_stack = nullptr;
};

// Bytes for all stacks of a block, in a mapping: pages that no fiber touches cost nothing.
class Stacks {
 public:
  explicit Stacks(std::size_t count) : size_(count * kStackBytes) {
    begin_ = static_cast<char*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0));
    if (begin_ == MAP_FAILED) throw Fault{"there is no memory for " + std::to_string(count) + " threads"};
  }
  ~Stacks() { munmap(begin_, size_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* of(std::size_t index) const { return begin_ + index * kStackBytes; }

 private:
  std::size_t size_;
  char* begin_;
};

struct Kernel {
  const char* name;
  void (*call)(void* const* arguments);
  std::vector<unsigned int> sizes;
};

template <typename... Parameters>
using Function = void (*)(Parameters...);

template <typename... Parameters, std::size_t... I>
void apply(Function<Parameters...> function, void* const* arguments, std::index_sequence<I...>) {
  function(*static_cast<Parameters*>(arguments[I])...);
}

template <auto function>
struct Caller;

template <typename... Parameters, Function<Parameters...> function>
struct Caller<function> {
  static void call(void* const* arguments) {
    apply(function, arguments, std::index_sequence_for<Parameters...>{});
  }
  static std::vector<unsigned int> sizes() { return {static_cast<unsigned int>(sizeof(Parameters))...}; }
};

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = {
#define KV_KERNEL(name) {#name, &Caller<&::name>::call, Caller<&::name>::sizes()},
      KV_KERNELS
#undef KV_KERNEL
  };
  return all;
}

const Kernel* find(const char* name) {
  for (const Kernel& each : kernels()) {
    if (std::strcmp(each.name, name) == 0) return &each;
  }
  return nullptr;
}

// What runs just now.
const Kernel* kernel = nullptr;
void* const* arguments = nullptr;
void* shared_memory = nullptr;
ucontext_t scheduler;
Fiber* running = nullptr;

#ifdef __SANITIZE_ADDRESS__
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_bytes = 0;
#endif

void enter(Fiber& fiber) {
  running = &fiber;
  threadIdx = fiber.index;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.context.uc_stack.ss_sp, kStackBytes);
#endif
  swapcontext(&scheduler, &fiber.context);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
  running = nullptr;
}

void arrived([[maybe_unused]] Fiber& fiber) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

void leave(Fiber& fiber, State state) {
  fiber.state = state;
#ifdef __SANITIZE_ADDRESS__
  const bool is_last = state == State::kOver || state == State::kFaulty;
  __sanitizer_start_switch_fiber(is_last ? nullptr : &fiber.fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  swapcontext(&fiber.context, &scheduler);
  arrived(fiber);
}

void begin() {
  Fiber& fiber = *running;
  arrived(fiber);
  State state = State::kOver;
  try {
    kernel->call(arguments);
  } catch (const Fault& fault) {
    fiber.fault = fault.what;
    state = State::kFaulty;
  }
  leave(fiber, state);
}

std::string place(const dim3& thread) {
  return "thread (" + std::to_string(thread.x) + ", " + std::to_string(thread.y) + ", " + std::to_string(thread.z) +
         ") of block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
         std::to_string(blockIdx.z) + ")";
}

dim3 index_of(unsigned int thread) {
  return {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
}

// Lets a warp's lanes go on whose shuffle all named lanes have reached.
void exchange_in(Fiber* warp, unsigned int lanes) {
  for (unsigned int i = 0; i < lanes; ++i) {
    if (warp[i].state != State::kAtShuffle) continue;
    const std::uint32_t mask = warp[i].mask;
    bool is_complete = true;
    for (unsigned int j = 0; j < kLanes; ++j) {
      if ((mask >> j & 1) == 0) continue;
      is_complete = is_complete && j < lanes && warp[j].state == State::kAtShuffle && warp[j].mask == mask &&
                    warp[j].line == warp[i].line;
    }
    if (!is_complete) continue;
    std::uint64_t values[kLanes] = {};
    for (unsigned int j = 0; j < lanes; ++j) values[j] = warp[j].value;
    for (unsigned int j = 0; j < lanes; ++j) {
      if ((mask >> j & 1) == 0) continue;
      warp[j].value = values[warp[j].from_lane];
      warp[j].state = State::kReady;
    }
  }
}

void open_barrier(std::vector<Fiber>& fibers) {
  for (const Fiber& each : fibers) {
    if (each.state != State::kAtBarrier || each.line != fibers[0].line) return;
  }
  for (Fiber& each : fibers) each.state = State::kReady;
}

[[noreturn]] void tell_divergence(const std::vector<Fiber>& fibers) {
  unsigned int at_barrier = 0, at_shuffle = 0, over = 0;
  const Fiber* waiting = nullptr;
  for (const Fiber& each : fibers) {
    at_barrier += each.state == State::kAtBarrier;
    at_shuffle += each.state == State::kAtShuffle;
    over += each.state == State::kOver;
    if (each.state != State::kOver && waiting == nullptr) waiting = &each;
  }
  throw Fault{"threads wait for each other without end: " + std::to_string(at_barrier) + " at a barrier, " +
              std::to_string(at_shuffle) + " at a shuffle, " + std::to_string(over) + " ended; " +
              place(waiting->index) + " at line " + std::to_string(waiting->line)};
}

void prepare(Fiber& fiber, unsigned int thread, char* stack) {
  fiber = Fiber{};
  fiber.index = index_of(thread);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, begin, 0);
}

// Runs a warp until all its threads wait for other warps or have ended. Returns whether any ran.
bool run_warp(Fiber* warp, unsigned int lanes, bool falling) {
  for (bool any = false;; any = true) {
    bool ran = false;
    for (unsigned int i = 0; i < lanes; ++i) {
      Fiber& fiber = warp[falling ? lanes - 1 - i : i];
      if (fiber.state != State::kReady) continue;
      ran = true;
      enter(fiber);
      if (fiber.state == State::kFaulty) throw Fault{fiber.fault + ", in " + place(fiber.index)};
    }
    if (!ran) return any;
    exchange_in(warp, lanes);
  }
}

void run_block_of_fibers(std::vector<Fiber>& fibers, const Stacks& stacks, bool falling) {
  for (unsigned int i = 0; i < fibers.size(); ++i) prepare(fibers[i], i, stacks.of(i));
  const std::size_t warps = (fibers.size() + kLanes - 1) / kLanes;
  for (bool any = true; any; falling = !falling) {
    any = false;
    for (std::size_t i = 0; i < warps; ++i) {
      const std::size_t first = (falling ? warps - 1 - i : i) * kLanes;
      const std::size_t lanes = std::min<std::size_t>(kLanes, fibers.size() - first);
      any = run_warp(&fibers[first], static_cast<unsigned int>(lanes), falling) || any;
    }
    open_barrier(fibers);
  }
  const auto is_over = [](const Fiber& each) { return each.state == State::kOver; };
  if (!std::all_of(fibers.begin(), fibers.end(), is_over)) tell_divergence(fibers);
}

void run_block_of_loops(unsigned int n_threads) {
  for (unsigned int i = 0; i < n_threads; ++i) {
    threadIdx = index_of(i);
    try {
      kernel->call(arguments);
    } catch (const Fault& fault) {
      throw Fault{fault.what + ", in " + place(threadIdx)};
    }
  }
}

void run_grid(bool has_barriers, std::size_t shared_bytes) {
  const unsigned int n_threads = blockDim.x * blockDim.y * blockDim.z;
  // Of just the size asked for, so that AddressSanitizer sees what goes beyond.
  void* memory = nullptr;
  if (posix_memalign(&memory, 16, shared_bytes) != 0) throw Fault{"there is no memory for the shared bytes"};
  const std::unique_ptr<void, void (*)(void*)> owner(memory, std::free);
  shared_memory = memory;
  std::unique_ptr<Stacks> stacks;
  std::vector<Fiber> fibers;
  if (has_barriers) {
    stacks = std::make_unique<Stacks>(n_threads);
    fibers.resize(n_threads);
  }
  const std::size_t n_blocks = std::size_t{gridDim.x} * gridDim.y * gridDim.z;
  for (std::size_t i = 0; i < n_blocks; ++i) {
    blockIdx = {static_cast<unsigned int>(i % gridDim.x), static_cast<unsigned int>(i / gridDim.x % gridDim.y),
                static_cast<unsigned int>(i / gridDim.x / gridDim.y)};
    std::memset(memory, 0xff, shared_bytes);
    if (has_barriers) {
      run_block_of_fibers(fibers, *stacks, i % 2 == 1);
    } else {
      run_block_of_loops(n_threads);
    }
  }
}

Fiber& waiting_fiber() {
  if (running == nullptr) throw Fault{"a kernel that is said to have no barriers waits for other threads"};
  return *running;
}

}  // namespace

void barrier(int line) {
  Fiber& fiber = waiting_fiber();
  fiber.line = line;
  leave(fiber, State::kAtBarrier);
}

unsigned int lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kLanes;
}

std::uint64_t exchange(std::uint32_t mask, std::uint64_t value, unsigned int from_lane, int line) {
  Fiber& fiber = waiting_fiber();
  if ((mask >> lane() & 1) == 0) throw Fault{"a lane shuffles that the mask of the shuffle does not name"};
  if (from_lane >= kLanes || (mask >> from_lane & 1) == 0) {
    throw Fault{"a shuffle reads a lane that its mask does not name"};
  }
  fiber.mask = mask;
  fiber.value = value;
  fiber.from_lane = from_lane;
  fiber.line = line;
  leave(fiber, State::kAtShuffle);
  return fiber.value;
}

void* shared() { return shared_memory; }

}  // namespace kv_on_cpu

extern "C" {

// The number of parameters of a kernel, whose sizes in bytes are written; -1 for an unknown kernel or too many.
__attribute__((visibility("default"))) int kv_parameters(const char* name, unsigned int* sizes, int capacity) {
  const kv_on_cpu::Kernel* found = kv_on_cpu::find(name);
  if (found == nullptr || found->sizes.size() > static_cast<std::size_t>(capacity)) return -1;
  std::copy(found->sizes.begin(), found->sizes.end(), sizes);
  return static_cast<int>(found->sizes.size());
}

// Runs a kernel to its end. Returns 0, or 1 with a message. The caller has checked the shape and the arguments.
__attribute__((visibility("default"))) int kv_launch(const char* name, const unsigned int* grid,
                                                     const unsigned int* block, void* const* arguments,
                                                     int has_barriers, std::size_t shared_bytes, char* message,
                                                     std::size_t message_bytes) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> guard(one_at_a_time);
  kv_on_cpu::kernel = kv_on_cpu::find(name);
  kv_on_cpu::arguments = arguments;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  try {
    kv_on_cpu::run_grid(has_barriers != 0, shared_bytes);
  } catch (const kv_on_cpu::Fault& fault) {
    std::strncpy(message, fault.what.c_str(), message_bytes - 1);
    message[message_bytes - 1] = '\0';
    return 1;
  }
  return 0;
}
}
