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
    Announce();
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
      ++seen;
      if (is_closing_) return;
      RunTasks(number);
      --running_;
    }
  }

  void Announce() {
    ++launch_;
    launch_.notify_all();
  }

  // The tasks of one thread: one of each `count_` that follow each other, every time another one. In which order
  // follows from the digits of where they begin, as in the sequence of Thue and Morse: what tasks have to do may
  // recur at equal distances, and no such tasks are all those of one thread. A task that fails leaves its error
  // with its thread, and returns -1.
  int RunTasks(int number) {
    int code = 0;
    for (int first = 0; first < group_.num_task && code == 0; first += count_) {
      const int task = first + (number + DigitSum(first / count_)) % count_;
      if (task < group_.num_task) code = task_(task, &group_, data_);
    }
    if (code != 0 && number != 0) {
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
    Announce();
    const int code = RunTasks(0);
    while (running_ != 0) sched_yield();
    TVMFFIObjectHandle error = error_.exchange(nullptr);
    if (error == nullptr) return code;
    if (code == 0) TVMFFIErrorSetRaised(error);
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
  std::atomic<uint32_t> launch_ = 0;  // counts them
  std::atomic<int> running_ = 0;      // workers that have not ended their tasks
  std::atomic<bool> is_closing_ = false;
  std::atomic<TVMFFIObjectHandle> error_ = nullptr;  // of one of the workers
  ParallelTask task_ = nullptr;
  void* data_ = nullptr;
  ParallelGroup group_{};
};

}  // namespace hybridc
