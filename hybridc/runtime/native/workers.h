// Threads that share the parallel loops of CPU kernels with the thread that runs them. They belong to a session,
// where TVM's own pool belongs to whichever thread runs a kernel: that one is kept when the thread has ended, and
// a forked process, which has none of its threads, waits for them for ever, even at its exit.
#pragma once
#include <sched.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/error.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "threads.h"

namespace hybridc {

// As TVM's c_backend_api.h has them, which is not among the headers of tvm_ffi.
struct ParallelGroup {
  void* sync_handle;
  int32_t num_task;
};
using ParallelTask = int (*)(int number, ParallelGroup* group, void* data);
using ParallelLaunch = int (*)(ParallelTask task, void* data, int count);

}  // namespace hybridc

// What kernels launch their loops with, if any of this library has one. TVM's loader sets it to TVM's pool.
extern "C" __attribute__((weak, visibility("default"))) hybridc::ParallelLaunch __TVMBackendParallelLaunch;

namespace hybridc {

class Workers {
 public:
  // `count` threads with that of the caller, who alone uses them. They start with the first `Use`.
  explicit Workers(int count) : count_(count) {}

  ~Workers() { End(); }

  // While it lives, loops of kernels that this thread calls run on these workers.
  class Use {
   public:
    explicit Use(Workers* workers) {
      workers->Start();
      current_ = workers;
    }
    ~Use() { current_ = nullptr; }
  };

  // While it lives, each worker gets so many parts of a loop that this thread launches, from all over it, instead of
  // one: a kernel that leaves out what is padding may have most of its work at the loop's beginning.
  class Divide {
   public:
    explicit Divide(int parts) : before_(parts_) { parts_ = parts; }
    ~Divide() { parts_ = before_; }

   private:
    const int before_;
  };

 private:
  using Threads = std::vector<std::thread>;

  // Tasks of a worker, which another thread runs if it comes first. Each in a cache line of its own.
  struct alignas(64) Share {
    std::atomic<uint32_t> launch = kTaken;  // whose tasks they are
  };
  // No launch has this number.
  static constexpr uint32_t kTaken = 0;

  // How often an idle worker looks for work, and yields its core, before it sleeps: longer than any gap between
  // two kernels, and short enough to leave the core to other programs soon.
  static constexpr int kSpins = 1000;

  void Start() {
    if (&__TVMBackendParallelLaunch == nullptr) return;
    __TVMBackendParallelLaunch = &Launch;
    if (process_ == getpid()) return;
    Forget();
    process_ = getpid();
    try {
      threads_ = std::make_unique<Threads>();
      shares_ = std::vector<Share>(count_);
      for (int number = 1; number < count_; ++number) {
        threads_->emplace_back([this, number, seen = launch_.load()] { Serve(number, seen); });
      }
    } catch (const std::system_error& error) {
      End();
      TVM_FFI_THROW(MemoryError) << "no memory for " << count_ << " threads: " << error.what();
    }
  }

  // Threads of a process that forked this one are not here, and nothing may be done to them.
  void Forget() { static_cast<void>(threads_.release()); }

  void End() {
    if (process_ != getpid()) return Forget();
    is_closing_ = true;
    Announce(Next());
    for (std::thread& thread : *threads_) thread.join();
    threads_.reset();
    is_closing_ = false;
    process_ = 0;
  }

  void Serve(int number, uint32_t seen) {
    LeaveSignals();
    for (;;) {
      for (int spin = 0; spin < kSpins && launch_ == seen; ++spin) sched_yield();
      launch_.wait(seen);
      seen = launch_;
      if (is_closing_) return;
      if (Take(number, seen)) RunShare(number);
    }
  }

  // Whether a share of this launch is left, which is then the caller's. A launch ends when all its shares have been
  // run: what it is about does not change before that.
  bool Take(int number, uint32_t launch) {
    return shares_[number].launch.compare_exchange_strong(launch, kTaken);
  }

  int RunShare(int number) {
    const int code = RunTasks(number);
    --running_;
    return code;
  }

  uint32_t Next() const {
    const uint32_t next = launch_ + 1;
    return next == kTaken ? next + 1 : next;
  }

  void Announce(uint32_t launch) {
    launch_ = launch;
    launch_.notify_all();
  }

  // The tasks of one thread: one of each `count_` that follow each other, every time another one. In which order
  // follows from the digits of where they begin, as in the sequence of Thue and Morse: what tasks have to do may
  // recur at equal distances, and no such tasks are all those of one thread. A task that fails leaves its error
  // with the thread that runs it, and returns -1.
  int RunTasks(int number) {
    int code = 0;
    for (int first = 0; first < group_.num_task && code == 0; first += count_) {
      const int task = first + (number + DigitSum(first / count_)) % count_;
      if (task < group_.num_task) code = task_(task, &group_, data_);
    }
    if (code != 0) {
      TVMFFIObjectHandle error = nullptr;
      TVMFFIErrorMoveFromRaised(&error);
      if (TVMFFIObjectHandle other = error_.exchange(error)) TVMFFIObjectDecRef(other);
    }
    return code;
  }

  int DigitSum(int value) const {
    int sum = 0;
    for (; value > 0; value /= count_) sum += value % count_;
    return sum;
  }

  int Run(ParallelTask task, void* data, int count) {
    task_ = task;
    data_ = data;
    group_ = {nullptr, count == 0 ? count_ * parts_ : count};
    running_ = static_cast<int>(threads_->size());
    const uint32_t launch = Next();
    for (int number = 1; number < count_; ++number) shares_[number].launch = launch;
    Announce(launch);
    const int code = RunTasks(0);
    // workers that have not begun may have no core, for some milliseconds where other programs run
    for (int number = 1; number < count_; ++number) {
      if (Take(number, launch)) RunShare(number);
    }
    while (running_ != 0) sched_yield();
    TVMFFIObjectHandle error = error_.exchange(nullptr);
    if (error == nullptr) return code;
    TVMFFIErrorSetRaised(error);
    TVMFFIObjectDecRef(error);
    return -1;
  }

  static int Launch(ParallelTask task, void* data, int count) {
    Workers* workers = current_;
    if (workers != nullptr && workers->count_ > 1) return workers->Run(task, data, count);
    ParallelGroup group{nullptr, count == 0 ? 1 : count};
    int code = 0;
    for (int number = 0; number < group.num_task && code == 0; ++number) code = task(number, &group, data);
    return code;
  }

  static inline thread_local Workers* current_ = nullptr;
  static inline thread_local int parts_ = 1;

  const int count_;
  pid_t process_ = 0;  // where the threads are
  std::unique_ptr<Threads> threads_;
  std::vector<Share> shares_;         // by the number of the worker
  std::atomic<uint32_t> launch_ = 0;  // counts them
  std::atomic<int> running_ = 0;      // shares of workers that have not been run to their end
  std::atomic<bool> is_closing_ = false;
  std::atomic<TVMFFIObjectHandle> error_ = nullptr;  // of one of the threads
  ParallelTask task_ = nullptr;
  void* data_ = nullptr;
  ParallelGroup group_{};
};

}  // namespace hybridc
