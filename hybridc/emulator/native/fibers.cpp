#include "fibers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "device.h"

// Saves the callee-saved registers of x86-64 (System V) on the running stack and continues on another.
extern "C" void hybridc_emulator_switch(void** save_stack_pointer, void* new_stack_pointer);
asm(R"(.text
.globl hybridc_emulator_switch
.hidden hybridc_emulator_switch
hybridc_emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

namespace emulator {
namespace {

constexpr unsigned kWarpSize = 32;
constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 128 << 10;
constexpr int kSavedRegisters = 6;

thread_local BlockRunner* running = nullptr;

// The lowest page is left unmapped, so that a stack that overflows faults.
char* new_stack() {
  void* mapping = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) std::abort();
  mprotect(mapping, kPage, PROT_NONE);
  return static_cast<char*>(mapping);
}

// The first resume pops six registers and returns into `entry`. Stacks start at different offsets within
// a page, or the hot top of every one would fall into the same cache sets.
void* initial_stack_pointer(char* stack, unsigned thread, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(stack + kStackBytes - (thread % 32) * 128);
  *--top = nullptr;  // keeps the alignment that a call would leave
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  return top;
}

}  // namespace

BlockRunner::BlockRunner() = default;

BlockRunner& BlockRunner::current() {
  if (running == nullptr) std::abort();  // the translator gave fibers to every kernel that has a barrier
  return *running;
}

void BlockRunner::fiber_main() {
  BlockRunner& self = current();
  self.kernel_->run_thread(self.arguments_);
  self.suspend(State::kFinished);
}

void BlockRunner::prepare(const Extent& block) {
  const unsigned count = static_cast<unsigned>(block.count());
  fibers_.resize(count);
  warps_.assign((count + kWarpSize - 1) / kWarpSize, Warp{0, 0});
  while (stacks_.size() < count) stacks_.push_back(new_stack());
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = fibers_[i];
    fiber.state = State::kReady;
    fiber.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    fiber.stack_pointer = initial_stack_pointer(stacks_[i], i, fiber_main);
    warps_[i / kWarpSize].present |= 1u << (i % kWarpSize);
  }
  at_barrier_ = finished_ = 0;
  error_.clear();
}

void BlockRunner::arrange(int thread_order, unsigned long seed) {
  order_.resize(fibers_.size());
  std::iota(order_.begin(), order_.end(), 0u);
  if (thread_order == kReverse) std::reverse(order_.begin(), order_.end());
  if (thread_order != kShuffled) return;
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (size_t i = order_.size() - 1; i > 0; --i) {
    state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX generator
    std::swap(order_[i], order_[(state >> 33) % (i + 1)]);
  }
}

std::string BlockRunner::run(const KernelEntry& kernel, void** arguments, const Extent& block,
                             int thread_order, unsigned long seed, AccessLog* log) {
  kernel_ = &kernel;
  log_ = log;
  arguments_ = arguments;
  running = this;
  prepare(block);
  arrange(thread_order, seed);
  // Threads of a group run as far as they can without the others.
  const size_t group = thread_order == kWarps ? kWarpSize : order_.size();
  while (finished_ < fibers_.size() && error_.empty()) {
    bool has_progressed = false;
    for (size_t first = 0; first < order_.size(); first += group)
      while (run_group(first, std::min(first + group, order_.size()))) has_progressed = true;
    if (!has_progressed && error_.empty()) error_ = describe_stall();
  }
  if (log_ != nullptr) log_->settle();
  running = nullptr;
  return error_;
}

bool BlockRunner::run_group(size_t first, size_t end) {
  bool has_progressed = false;
  for (size_t i = first; i < end && error_.empty(); ++i) {
    if (fibers_[order_[i]].state != State::kReady) continue;
    resume(order_[i]);
    has_progressed = true;
  }
  return has_progressed && error_.empty();
}

void BlockRunner::resume(unsigned thread) {
  current_ = thread;
  Fiber& fiber = fibers_[thread];
  kernel_->enter_thread(&fiber.index);
  hybridc_emulator_switch(&scheduler_stack_, fiber.stack_pointer);
  if (fiber.state == State::kAtBarrier && ++at_barrier_ == fibers_.size()) release_block();
  if (fiber.state == State::kInWarp) release_warp(thread / kWarpSize);
  if (fiber.state == State::kFinished) {
    ++finished_;
    warps_[thread / kWarpSize].present &= ~(1u << (thread % kWarpSize));
  }
}

void BlockRunner::suspend(State state) {
  Fiber& fiber = fibers_[current_];
  fiber.state = state;
  hybridc_emulator_switch(&fiber.stack_pointer, scheduler_stack_);
}

void BlockRunner::release_block() {
  for (const Fiber& fiber : fibers_)
    if (fiber.site != fibers_[0].site) {
      error_ = "divergent barrier: threads of one block wait at different barriers";
      return;
    }
  if (log_ != nullptr) log_->settle();
  for (Fiber& fiber : fibers_) fiber.state = State::kReady;
  at_barrier_ = 0;
}

void BlockRunner::release_warp(unsigned warp_index) {
  Warp& warp = warps_[warp_index];
  const Fiber& last = fibers_[current_];
  warp.waiting |= 1u << (current_ % kWarpSize);
  const unsigned first = warp_index * kWarpSize;
  const size_t lanes = std::min<size_t>(kWarpSize, fibers_.size() - first);
  // Lanes that the block does not have need not come; lanes that finished never will.
  const uint32_t existing = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
  const uint32_t members = last.mask & existing;
  if ((warp.waiting & members) != members) return;

  uint64_t values[kWarpSize];
  for (size_t lane = 0; lane < lanes; ++lane) {
    if (!(members >> lane & 1)) continue;
    const Fiber& fiber = fibers_[first + lane];
    if (fiber.site != last.site || fiber.mask != last.mask) {
      error_ = "divergent warp: lanes of one warp wait at different warp operations";
      return;
    }
    values[lane] = fiber.value;
  }
  for (size_t lane = 0; lane < lanes; ++lane) {
    if (!(members >> lane & 1)) continue;
    Fiber& fiber = fibers_[first + lane];
    const bool is_defined = fiber.source_lane < lanes && (members >> fiber.source_lane & 1);
    fiber.value = is_defined ? values[fiber.source_lane] : ~uint64_t{0};  // undefined in CUDA: NaN shows it
    fiber.state = State::kReady;
  }
  warp.waiting &= ~members;
}

std::string BlockRunner::describe_stall() const {
  const size_t count = fibers_.size();
  if (at_barrier_ > 0)
    return "divergent barrier: " + std::to_string(at_barrier_) + " of " + std::to_string(count) +
           " threads of a block wait at a barrier that the others never reach";
  return "divergent warp: lanes wait at a warp operation that others of its mask never reach";
}

const BlockServices& BlockRunner::services() {
  static const BlockServices value{
      [](unsigned site) {
        BlockRunner& self = current();
        self.fibers_[self.current_].site = site;
        self.suspend(State::kAtBarrier);
      },
      [](uint32_t mask, unsigned site, uint64_t value, unsigned source_lane) {
        BlockRunner& self = current();
        Fiber& fiber = self.fibers_[self.current_];
        fiber.mask = mask, fiber.site = site, fiber.value = value, fiber.source_lane = source_lane;
        self.suspend(State::kInWarp);
        return fiber.value;
      },
      [] { return current().current_ % kWarpSize; },
      [] { return current().warps_[current().current_ / kWarpSize].present; },
      [](const void* address, unsigned bytes, int is_write, const void* site) {
        if (running == nullptr || running->log_ == nullptr) return;  // what goes before a block, and behind it
        running->log_->note(running->current_, address, bytes, is_write != 0, site);
      },
  };
  return value;
}

}  // namespace emulator
