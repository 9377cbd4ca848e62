#include "launch.h"

#include <csetjmp>
#include <csignal>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "device.h"
#include "fibers.h"
#include "memory.h"

namespace emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSharedAlignment = 128;
constexpr size_t kMaximumSharedBytes = 256 << 10;
constexpr size_t kSignalStackBytes = 64 << 10;
constexpr unsigned long kCountedBlocks = 16;  // of a launch at most
constexpr int kFaultSignals[] = {SIGSEGV, SIGBUS, SIGFPE};

size_t align_shared(size_t bytes) {
  return (bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
}

struct Failure {
  std::string text;
  int signal = 0;  // 0: found by the block runner
  void* address = nullptr;
};

// What the workers of one launch share.
struct Job {
  Launch* launch;
  void** arguments;
  int thread_order;
  std::atomic<unsigned long> next_block{0};
  std::atomic<bool> has_failed{false};
  std::mutex result_mutex;
  Failure failure;
  LaunchCounts counts{};

  void fail(Failure cause) {
    std::lock_guard<std::mutex> lock(result_mutex);
    if (!has_failed.exchange(true)) failure = std::move(cause);
  }

  void add(const AccessCounts& found) {
    std::lock_guard<std::mutex> lock(result_mutex);
    ++counts.counted_blocks;
    counts.accesses.add(found);
  }

  // One block of each of the grid's kCountedBlocks parts is, by Knuth's multiplicative hash: those at equal
  // distances might all lie in one column of an image.
  bool is_counted(unsigned long number) const {
    if (launch->counted == nullptr) return false;
    const unsigned long blocks = launch->grid.count(), part = number * kCountedBlocks / blocks;
    const auto first_of = [&](unsigned long p) { return (p * blocks + kCountedBlocks - 1) / kCountedBlocks; };
    const unsigned long first = first_of(part), size = first_of(part + 1) - first;
    return number - first == static_cast<uint32_t>(part * 2654435761u) % size;
  }
};

struct Worker {
  BlockRunner runner;
  AccessLog log;
  char* shared_end;  // shared memory ends at a guard page
  sigjmp_buf fault_point;
  volatile sig_atomic_t is_in_kernel = 0;
  int fault_signal = 0;
  void* fault_address = nullptr;

  Worker();
  void run_blocks(Job& job);
  std::string run_block(Job& job, unsigned long number);
};

thread_local Worker* this_worker = nullptr;

// ---- faults ----

struct sigaction previous_actions[NSIG];

void chain_to_previous(int signal, siginfo_t* info, void* context) {
  const struct sigaction& previous = previous_actions[signal];
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
  // The faulting instruction runs again when we return, and then ends the process as it should.
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  Worker* worker = this_worker;
  if (worker == nullptr || !worker->is_in_kernel) return chain_to_previous(signal, info, context);
  worker->is_in_kernel = 0;
  worker->fault_signal = signal;
  worker->fault_address = info->si_addr;
  siglongjmp(worker->fault_point, 1);
}

// Called before each launch: Python's faulthandler or tvm_ffi may have put a handler over ours meanwhile.
void install_fault_handlers() {
  for (int signal : kFaultSignals) {
    struct sigaction present;
    sigaction(signal, nullptr, &present);
    if ((present.sa_flags & SA_SIGINFO) && present.sa_sigaction == on_fault) continue;
    previous_actions[signal] = present;
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    // NODEFER: the handler leaves by a jump, which would otherwise keep the signal blocked.
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(signal, &ours, nullptr);
  }
}

// ---- workers ----

Worker::Worker() {
  const size_t total = kMaximumSharedBytes + 2 * kPage;
  auto* mapping = static_cast<char*>(
      mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (mapping == MAP_FAILED || mprotect(mapping + kPage, kMaximumSharedBytes, PROT_READ | PROT_WRITE) != 0)
    std::abort();
  shared_end = mapping + kPage + kMaximumSharedBytes;
}

// Plain loops always run threads forward: without a barrier and shared memory they cannot tell.
std::string Worker::run_block(Job& job, unsigned long number) {
  const Launch& launch = *job.launch;
  const bool is_counted = job.is_counted(number);
  const KernelEntry& kernel = is_counted ? *launch.counted : *launch.kernel;
  const Extent& grid = launch.grid;
  const Extent index{static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                     static_cast<unsigned>(number / grid.x / grid.y)};
  const size_t shared_bytes = align_shared(kernel.static_shared_bytes) + align_shared(launch.dynamic_shared_bytes);
  auto* shared = reinterpret_cast<unsigned char*>(shared_end - shared_bytes);
  std::memset(shared, 0xFF, shared_bytes);  // NaN: shared memory starts undefined in every block
  kernel.enter_block(&grid, &launch.block, &index, shared, shared + align_shared(kernel.static_shared_bytes));
  if (is_counted) {
    log.begin(shared, shared_bytes);
    const std::string error = runner.run(kernel, job.arguments, launch.block, kWarps, number, &log);
    job.add(log.counts());
    return error;
  }
  if (kernel.needs_fibers) return runner.run(kernel, job.arguments, launch.block, job.thread_order, number);
  kernel.run_block(job.arguments);
  return "";
}

void Worker::run_blocks(Job& job) {
  const unsigned long count = job.launch->grid.count();
  if (sigsetjmp(fault_point, 0) != 0) {
    job.fail({"", fault_signal, fault_address});
    return;
  }
  is_in_kernel = 1;
  for (;;) {
    const unsigned long number = job.next_block++;
    if (number >= count || job.has_failed) break;
    // Blocks may come in any order; the other orders of threads show that for blocks too.
    std::string error = run_block(job, job.thread_order == kForward ? number : count - 1 - number);
    if (!error.empty()) job.fail({std::move(error)});
  }
  is_in_kernel = 0;
}

class WorkerPool {
 public:
  // Waits until every worker has left the job. Called under the device lock.
  void run(Job& job, int worker_count) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (thread_count_ < worker_count) start_thread(thread_count_++);
    job_ = &job;
    wanted_ = running_ = worker_count;
    ++generation_;
    work_is_ready_.notify_all();
    all_are_done_.wait(lock, [&] { return running_ == 0; });
  }

 private:
  void start_thread(int number) {
    // A handler of Python or TVM must not run on a worker's small stack: block all but faults there.
    sigset_t blocked, previous;
    sigfillset(&blocked);
    for (int signal : kFaultSignals) sigdelset(&blocked, signal);
    pthread_sigmask(SIG_SETMASK, &blocked, &previous);
    std::thread([this, number, seen = generation_] { serve(number, seen); }).detach();
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }

  void serve(int number, uint64_t seen) {
    // TVM pins the main thread to one core, and a new thread inherits that.
    cpu_set_t every;
    std::memset(&every, 0xFF, sizeof every);
    pthread_setaffinity_np(pthread_self(), sizeof every, &every);
    // Faults are handled on a stack of their own, as the faulting fiber's may be full.
    stack_t signal_stack = {};
    signal_stack.ss_sp = std::malloc(kSignalStackBytes);
    signal_stack.ss_size = kSignalStackBytes;
    sigaltstack(&signal_stack, nullptr);
    this_worker = new Worker;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_is_ready_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (number >= wanted_) continue;
      Job& job = *job_;
      lock.unlock();
      this_worker->run_blocks(job);
      lock.lock();
      if (--running_ == 0) all_are_done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_is_ready_, all_are_done_;
  Job* job_ = nullptr;
  int thread_count_ = 0, wanted_ = 0, running_ = 0;
  uint64_t generation_ = 0;
};

std::string describe(const Failure& failure) {
  if (failure.signal == 0) return failure.text;
  if (failure.signal == SIGFPE) return "integer division by zero";
  return "out-of-bounds access at " + describe_address(failure.address);
}

// Any argument of a pointer's size may be one; numbers hardly look like addresses in the arena.
std::vector<void**> pointers_among(const KernelEntry& kernel, const std::vector<void*>& arguments) {
  std::vector<void**> pointers;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (kernel.argument_bytes[i] == sizeof(void*)) pointers.push_back(static_cast<void**>(arguments[i]));
  return pointers;
}

}  // namespace

std::vector<LaunchCounts>& counted_launches() {
  static auto& value = *new std::vector<LaunchCounts>;
  return value;
}

void run_launch(Launch& launch) {
  static auto& pool = *new WorkerPool;
  install_fault_handlers();
  std::vector<uint64_t> words = launch.argument_words;  // the launch may be made again
  std::vector<void*> arguments;
  for (size_t offset : launch.argument_offsets) arguments.push_back(&words[offset]);
  const std::string prefix = std::string("kernel ") + launch.kernel->name + ": ";
  GuardedTensors guarded;
  if (configuration().guard_tensors) {
    const std::string error = guarded.replace(launch.kernel->name, pointers_among(*launch.kernel, arguments));
    if (!error.empty()) return fail_device(cudaErrorIllegalAddress, prefix + error);
  }
  Job job;
  job.launch = &launch;
  job.arguments = arguments.data();
  job.thread_order = configuration().thread_order;
  const auto worker_count = std::min<unsigned long>(configuration().worker_count, launch.grid.count());
  pool.run(job, static_cast<int>(worker_count));

  if (job.has_failed) {
    const bool is_address = job.failure.signal == SIGSEGV || job.failure.signal == SIGBUS;
    fail_device(is_address ? cudaErrorIllegalAddress : cudaErrorLaunchFailure,
                prefix + describe(job.failure));
    return;
  }
  const std::string overrun = find_overrun();
  if (!overrun.empty())
    return fail_device(cudaErrorIllegalAddress, prefix + "out-of-bounds access at " + overrun);
  guarded.write_back();
  if (launch.counted == nullptr) return;
  job.counts.kernel = launch.kernel->name;
  job.counts.blocks = launch.grid.count();
  counted_launches().push_back(job.counts);
}

}  // namespace emulator
