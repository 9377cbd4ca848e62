// Streams, events and the order in which their work really runs.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "device.h"

namespace emulator {

struct Stream;

// "Everything that had been put on `stream` before its operation number `end`."
struct StreamPoint {
  std::shared_ptr<Stream> stream;
  uint64_t end = 0;
};

struct Operation {
  std::function<void()> work;
  std::vector<StreamPoint> after;
};

struct Stream {
  bool is_blocking = true;  // ordered with the legacy default stream
  bool is_capturing = false;
  std::deque<Operation> pending;
  uint64_t enqueued = 0, finished = 0;
  std::vector<Operation> captured;
};

using TimePoint = std::chrono::steady_clock::time_point;

struct Event {
  StreamPoint recorded;  // no stream: never recorded
  std::shared_ptr<TimePoint> time;  // when the stream reached the record; each record has one of its own
};

using StreamHandle = std::shared_ptr<Stream>;

StreamHandle create_stream(bool is_blocking);
void destroy_stream(Stream* stream);
// nullptr for a handle that names no stream.
StreamHandle find_stream(const void* handle);

// Puts work on a stream: runs it now, or with lazy streams when something waits for it.
void enqueue(const StreamHandle& stream, std::function<void()> work);
void wait_for_event(const StreamHandle& stream, const Event& event);
void record_event(const StreamHandle& stream, Event& event);
bool is_complete(const Event& event);

// Runs what must have happened at that point, and nothing else: whatever else is pending stays undone,
// which is what shows a forgotten wait.
void run_until(const StreamPoint& point);
void run_stream(const StreamHandle& stream);
void run_all_streams();

}  // namespace emulator
