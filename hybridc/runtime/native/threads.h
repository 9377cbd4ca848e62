// What a thread of a session asks of the system.
#pragma once
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>

namespace hybridc {

// Signals are for the program's own threads, but for faults.
inline void LeaveSignals() {
  sigset_t every;
  sigfillset(&every);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&every, fault);
  pthread_sigmask(SIG_SETMASK, &every, nullptr);
}

// Has a thread that sleeps most of the time get a core as soon as it wakes. Linux lets whatever runs there end its
// slice first, some 3 ms, unless the slice of the thread that wakes is shorter (from Linux 6.12 on; others ignore it).
// Its share of the core stays the same.
inline void AskForShortSlice() {
  struct {  // struct sched_attr of linux/sched/types.h in its first version, which collides with glibc's sched.h
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes = {};
  static_assert(sizeof attributes == 48);  // SCHED_ATTR_SIZE_VER0
  constexpr uint32_t kOther = 0;           // SCHED_OTHER: a thread that has another policy keeps it
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy != kOther) return;
  attributes.runtime = 100'000;  // nanoseconds, the least that Linux takes
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace hybridc
