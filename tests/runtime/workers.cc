// Loops that a session's thread and its workers share; of workers some may have no core.
#include "workers.h"

#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

hybridc::ParallelLaunch __TVMBackendParallelLaunch = nullptr;

namespace {

std::mutex mutex;
std::condition_variable changed;
bool has_cores = true;
int waiting = 0;
const std::thread::id caller = std::this_thread::get_id();

void GiveCores(bool given) {
  std::lock_guard lock(mutex);
  has_cores = given;
  changed.notify_all();
}

void UntilWaiting(int count) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return waiting == count; });
}

struct Tasks {
  std::vector<std::atomic<int>> runs;
  std::atomic<int> by_caller = 0;
};

int Count(int number, hybridc::ParallelGroup*, void* data) {
  auto* tasks = static_cast<Tasks*>(data);
  ++tasks->runs[number];
  if (std::this_thread::get_id() == caller) ++tasks->by_caller;
  return 0;
}

int Fail(int number, hybridc::ParallelGroup*, void* data) {
  Count(number, nullptr, data);
  TVMFFIErrorSetRaisedFromCStr("ValueError", "a task has failed");
  return -1;
}

void Check(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// Each task once, all of them before the loop ends; by how many of them the caller was.
int Launched(int count) {
  Tasks tasks{std::vector<std::atomic<int>>(count)};
  Check(__TVMBackendParallelLaunch(&Count, &tasks, count) == 0, "the loop failed");
  for (int i = 0; i < count; ++i) Check(tasks.runs[i] == 1, "task " + std::to_string(i) + " did not run once");
  return tasks.by_caller;
}

}  // namespace

// What an idle worker calls while it looks for work: where it gets no core, it does not return.
extern "C" int sched_yield() noexcept {
  std::unique_lock lock(mutex);
  if (std::this_thread::get_id() == caller || has_cores) return 0;
  ++waiting;
  changed.notify_all();
  changed.wait(lock, [] { return has_cores; });
  --waiting;
  return 0;
}

int main() {
  constexpr int kThreads = 5;
  hybridc::Workers workers(kThreads);
  GiveCores(false);
  {
    const hybridc::Workers::Use use(&workers);
    UntilWaiting(kThreads - 1);
    for (int count : {1, 4, 5, 23}) Check(Launched(count) == count, "a worker without a core ran a task");
    Tasks tasks{std::vector<std::atomic<int>>(kThreads)};
    Check(__TVMBackendParallelLaunch(&Fail, &tasks, kThreads) == -1, "the error of a task was lost");
    TVMFFIObjectHandle error = nullptr;
    TVMFFIErrorMoveFromRaised(&error);
    Check(error != nullptr, "the loop left no error");
    TVMFFIObjectDecRef(error);
    GiveCores(true);
    for (int i = 0; i < 20000; ++i) Launched(1 + i % 17);
  }
  return 0;
}
