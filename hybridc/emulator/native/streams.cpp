#include "streams.h"

#include <algorithm>
#include <utility>

namespace emulator {
namespace {

std::vector<StreamHandle>& streams() {
  static auto& value = *new std::vector<StreamHandle>;
  return value;
}

const StreamHandle& default_stream() {
  static auto& value = *new StreamHandle(std::make_shared<Stream>());
  return value;
}

bool is_pending(const StreamPoint& point) { return point.stream && point.stream->finished < point.end; }

StreamPoint end_of(const StreamHandle& stream) { return {stream, stream->enqueued}; }

// The legacy default stream waits for the blocking streams, and they wait for it.
std::vector<StreamPoint> implicit_dependencies(const StreamHandle& stream) {
  std::vector<StreamPoint> points;
  if (stream != default_stream()) {
    if (stream->is_blocking) points.push_back(end_of(default_stream()));
  } else {
    for (const StreamHandle& other : streams())
      if (other->is_blocking) points.push_back(end_of(other));
  }
  points.erase(std::remove_if(points.begin(), points.end(), [](auto& point) { return !is_pending(point); }),
               points.end());
  return points;
}

void append(const StreamHandle& stream, Operation operation) {
  if (stream->is_capturing) {
    stream->captured.push_back(std::move(operation));
    return;
  }
  stream->pending.push_back(std::move(operation));
  ++stream->enqueued;
  if (!configuration().lazy_streams) run_stream(stream);
}

}  // namespace

StreamHandle create_stream(bool is_blocking) {
  auto stream = std::make_shared<Stream>();
  stream->is_blocking = is_blocking;
  streams().push_back(stream);
  ++statistics().streams;
  return stream;
}

void destroy_stream(Stream* stream) {
  auto& all = streams();
  auto found = std::find_if(all.begin(), all.end(), [&](auto& other) { return other.get() == stream; });
  if (found == all.end()) return;
  run_stream(*found);
  all.erase(found);
  --statistics().streams;
}

StreamHandle find_stream(const void* handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
    return default_stream();
  for (const StreamHandle& stream : streams())
    if (stream.get() == handle) return stream;
  return nullptr;
}

void enqueue(const StreamHandle& stream, std::function<void()> work) {
  append(stream, {std::move(work), implicit_dependencies(stream)});
}

void wait_for_event(const StreamHandle& stream, const Event& event) {
  // The wait is for the record made before this call, not for a later one.
  if (is_pending(event.recorded)) append(stream, {[] {}, {event.recorded}});
}

void record_event(const StreamHandle& stream, Event& event) {
  if (stream->is_capturing) return;
  // With lazy streams the work before it runs later, and so does the record.
  auto time = std::make_shared<TimePoint>();
  append(stream, {[time] { *time = std::chrono::steady_clock::now(); }, implicit_dependencies(stream)});
  event.recorded = end_of(stream);
  event.time = std::move(time);
}

bool is_complete(const Event& event) { return !is_pending(event.recorded); }

void run_until(const StreamPoint& point) {
  while (is_pending(point)) {
    Stream& stream = *point.stream;
    Operation operation = std::move(stream.pending.front());
    stream.pending.pop_front();
    for (const StreamPoint& dependency : operation.after) run_until(dependency);
    if (device_failure() == cudaSuccess) operation.work();  // a poisoned device runs nothing more
    ++stream.finished;
  }
}

void run_stream(const StreamHandle& stream) { run_until(end_of(stream)); }

void run_all_streams() {
  // Newest first: programs create their streams in the order in which they first need them.
  const std::vector<StreamHandle> all(streams().rbegin(), streams().rend());
  for (const StreamHandle& stream : all) run_stream(stream);
  run_stream(default_stream());
}

}  // namespace emulator
