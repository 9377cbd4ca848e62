#include "session.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "feeds.h"
#include "gpu.h"
#include "refusal.h"
#include "system/host.h"

namespace hybridc {
namespace {

constexpr char kHashes[] = "SHA256SUMS", kProgram[] = "program.json", kLibrary[] = "library.so",
               kWeights[] = "weights.bin";
constexpr int32_t kMostThreads = 4096;  // as hybridc/options.py has it
constexpr size_t kLargestHashesBytes = 1 << 20;

std::string HashOf(const std::map<std::string, std::string>& hashes, const std::string& folder,
                   const std::string& name) {
  const auto found = hashes.find(name);
  if (found == hashes.end()) {
    throw Refusal("HC303", "there is no hash of " + name, folder + "/" + kHashes, "copy the bundle again");
  }
  return found->second;
}

std::map<std::string, std::string> ReadHashes(const std::string& folder) {
  const std::string path = folder + "/" + kHashes;
  std::optional<File> file;
  try {
    file.emplace(path);
  } catch (const Refusal&) {
    throw Refusal("HC301", std::string("this is no bundle: it has no ") + kHashes + " that can be read", folder,
                  "make one: hybridc bundle OUT.hyb -o FOLDER");
  }
  return ParseHashes(path, file->Read(kLargestHashesBytes));
}

void CheckProcessor(const Program& program, const std::string& folder) {
  const std::vector<std::string> missing = MissingCpuFlags(program.cpu_flags);
  std::string names;
  for (const std::string& name : missing) names += (names.empty() ? "" : ", ") + name;
  if (!names.empty()) {
    throw Refusal("HC401", "this processor lacks " + names + ", which target " + program.target + " needs", folder,
                  "compile the model for --target avx2");
  }
  const auto& flags = program.cpu_flags;
  if (std::find(flags.begin(), flags.end(), "amx_tile") != flags.end()) EnableTiles();
}

std::string Listed(const std::vector<Port>& ports) {
  std::string text;
  for (const Port& port : ports) text += (text.empty() ? "" : ", ") + Quoted(port.name);
  return text.empty() ? "none" : text;
}

// The number of the port of a name; as many as there are ports where there is none.
size_t Find(const std::vector<Port>& ports, const char* name) {
  if (name == nullptr) return ports.size();
  const auto has_name = [name](const Port& port) { return port.name == name; };
  return static_cast<size_t>(std::find_if(ports.begin(), ports.end(), has_name) - ports.begin());
}

// Copies the first `kept` elements of each axis, and returns how many bytes these are.
char* CopyFirst(const char* source, char* target, const int64_t* shape, const int64_t* kept, size_t rank,
                int64_t element_bytes) {
  if (rank == 0) {
    std::memcpy(target, source, static_cast<size_t>(element_bytes));
    return target + element_bytes;
  }
  int64_t inner_bytes = element_bytes;
  for (size_t axis = 1; axis < rank; ++axis) inner_bytes *= shape[axis];
  if (std::equal(shape + 1, shape + rank, kept + 1)) {
    std::memcpy(target, source, static_cast<size_t>(kept[0] * inner_bytes));
    return target + kept[0] * inner_bytes;
  }
  for (int64_t i = 0; i < kept[0]; ++i) {
    target = CopyFirst(source + i * inner_bytes, target, shape + 1, kept + 1, rank - 1, element_bytes);
  }
  return target;
}

// What a run may hold of the host's memory; 0: no limit of its own.
int64_t HostLimit(uint64_t wanted_bytes, int64_t compiled_bytes) {
  if (wanted_bytes == 0) return compiled_bytes;
  return static_cast<int64_t>(std::min<uint64_t>(wanted_bytes, std::numeric_limits<int64_t>::max()));
}

}  // namespace

std::unique_ptr<Session> Session::Open(const std::string& folder, const hybridc_options& options) {
  if (options.threads < 0 || options.threads > kMostThreads) {
    throw Refusal("HC557", "a run cannot have " + std::to_string(options.threads) + " threads", "",
                  "give a number up to " + std::to_string(kMostThreads) + ", or 0 for all cores");
  }
  const std::map<std::string, std::string> hashes = ReadHashes(folder);
  const File program_file(folder + "/" + kProgram);
  const std::string content = program_file.Read(kLargestProgramBytes);
  CheckHash(program_file.path(), content, HashOf(hashes, folder, kProgram));
  auto weights = std::make_unique<File>(folder + "/" + kWeights);
  if (options.trust_weights == 0) weights->CheckHash(HashOf(hashes, folder, kWeights));
  Program program = ReadProgram(program_file.path(), content, static_cast<int64_t>(weights->size_bytes()));
  CheckProcessor(program, folder);
  if (options.gpu_memory_bytes != 0) ChooseWithin(program, options.gpu_memory_bytes, folder);
  const Library library(folder + "/" + kLibrary, HashOf(hashes, folder, kLibrary), program.HasGpuCode());
  return std::unique_ptr<Session>(new Session(folder, std::move(program), std::move(weights), library, options));
}

Session::Session(const std::string& folder, Program program, std::unique_ptr<File> weights, const Library& library,
                 const hybridc_options& options)
    : folder_(folder),
      program_(std::move(program)),
      weights_(std::move(weights)),
      library_(library),
      threads_(options.threads != 0    ? options.threads
               : program_.threads != 0 ? static_cast<int>(program_.threads)
                                       : AvailableThreads()),
      plan_(std::make_unique<LoadedPlan>(program_, ChoosePlan(options), library_, *weights_, folder, threads_,
                                         HostLimit(options.host_memory_bytes, program_.host_memory_bytes))) {}

const Plan& Session::ChoosePlan(const hybridc_options& options) const {
  if (options.gpu_memory_bytes != 0) return ChooseWithin(program_, options.gpu_memory_bytes, folder_);
  if (program_.plans.size() == 1 || !program_.HasGpuCode()) return program_.plans.back();
  return ChooseFitting(program_, FreeGpuBytes(library_));
}

hybridc_memory Session::Memory() const {
  const Plan& plan = plan_->plan();
  return {static_cast<uint64_t>(plan.gpu_bytes),         static_cast<uint64_t>(plan_->gpu_bytes()),
          static_cast<uint64_t>(plan.host_bytes),        static_cast<uint64_t>(plan_->host_bytes()),
          static_cast<uint64_t>(plan_->staging_bytes()), static_cast<uint64_t>(plan_->mapped_bytes())};
}

void Session::Run(std::span<const hybridc_input_array> inputs, std::span<hybridc_output_array> outputs) {
  const Feeds feeds = Checked(inputs);
  std::vector<size_t> numbers;
  for (const hybridc_output_array& output : outputs) {
    numbers.push_back(Find(program_.outputs, output.name));
    if (numbers.back() == program_.outputs.size()) {
      const std::string name = output.name == nullptr ? "without a name" : Quoted(output.name);
      throw Refusal("HC555", "unknown output " + name, "", "outputs are " + Listed(program_.outputs));
    }
    const Port& port = program_.outputs[numbers.back()];
    if (output.capacity_bytes < static_cast<size_t>(port.size_bytes) ||
        (output.data == nullptr && port.size_bytes > 0)) {
      throw Refusal("HC563",
                    "output " + Quoted(port.name) + " may have " + std::to_string(port.size_bytes) +
                        " bytes, but there is room for " +
                        std::to_string(output.data == nullptr ? 0 : output.capacity_bytes),
                    "", "give a buffer of size_bytes of the port");
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  weights_->CheckUnchanged();
  PutInputs(feeds);
  plan_->Run();
  for (size_t i = 0; i < outputs.size(); ++i) Fill(numbers[i], feeds, outputs[i]);
}

void Session::Measure(std::span<const hybridc_input_array> inputs, hybridc_step* times) {
  const Feeds feeds = Checked(inputs);
  const std::lock_guard<std::mutex> lock(mutex_);
  weights_->CheckUnchanged();
  PutInputs(feeds);
  const std::vector<std::pair<double, double>> spans = plan_->Measure();
  for (size_t i = 0; i < spans.size(); ++i) {
    const Step& step = plan().steps[i];
    times[i] = {step.name.c_str(), static_cast<int32_t>(step.lane), step.planned_us, spans[i].first, spans[i].second};
  }
}

Session::Feeds Session::Checked(std::span<const hybridc_input_array> inputs) const {
  Feeds feeds(program_.inputs.size());
  for (const hybridc_input_array& array : inputs) {
    const size_t number = Find(program_.inputs, array.name);
    if (number == feeds.size() || feeds[number] != nullptr) {
      const std::string name = array.name == nullptr ? "without a name" : Quoted(array.name);
      throw Refusal("HC551", number == feeds.size() ? "unknown input " + name : "input " + name + " is fed twice", "",
                    "inputs are " + Listed(program_.inputs));
    }
    feeds[number] = &array;
  }
  for (size_t i = 0; i < feeds.size(); ++i) {
    const Port& port = program_.inputs[i];
    if (feeds[i] == nullptr) {
      throw Refusal("HC552", "input " + Quoted(port.name) + " is missing", "", "feed " + TypeOf(port));
    }
    CheckArray(port, *feeds[i]);
  }
  for (const ValueCheck& check : plan_->plan().checks) {
    if (!check.input.has_value()) continue;
    const size_t number = plan_->plan().inputs[*check.input].port;
    CheckValues(check, program_.inputs[number], feeds[number]->data);
  }
  return feeds;
}

void Session::PutInputs(const Feeds& feeds) {
  for (const PortTensor& tensor : plan_->plan().inputs) {
    for (int64_t row = 0; row < tensor.rows; ++row) {
      const int64_t begin = row * tensor.row_bytes;
      const char* const source = static_cast<const char*>(feeds[tensor.port]->data) + tensor.OffsetOf(begin);
      if (tensor.place.space == Space::kGpu) {
        plan_->PutOnGpu(tensor.place.offset + begin, source, tensor.row_bytes);
      } else if (tensor.place.space == Space::kCpu) {
        std::memcpy(plan_->HostBytes(tensor.place) + begin, source, static_cast<size_t>(tensor.row_bytes));
      }
    }
  }
}

void Session::Fetch(size_t number, const Feeds& feeds, void* data) const {
  for (const PortTensor& tensor : plan_->plan().outputs) {
    if (tensor.port != number) continue;
    for (int64_t row = 0; row < tensor.rows; ++row) {
      const int64_t begin = row * tensor.row_bytes;
      FetchBytes(tensor.place, begin, tensor.row_bytes, feeds, static_cast<char*>(data) + tensor.OffsetOf(begin));
    }
  }
}

void Session::FetchBytes(const Place& place, int64_t begin, int64_t size_bytes, const Feeds& feeds, char* data) const {
  if (place.space == Space::kGpu) return plan_->GetFromGpu(place.offset + begin, data, size_bytes);
  if (place.space != Space::kInputs) {
    std::memmove(data, plan_->HostBytes(place) + begin, static_cast<size_t>(size_bytes));
    return;
  }
  const PortTensor& input = plan_->plan().inputs[static_cast<size_t>(place.offset)];
  const char* const fed = static_cast<const char*>(feeds[input.port]->data);
  for (int64_t end = begin + size_bytes, count; begin < end; begin += count, data += count) {
    count = std::min(end - begin, input.row_bytes - begin % input.row_bytes);
    std::memmove(data, fed + input.OffsetOf(begin), static_cast<size_t>(count));
  }
}

int64_t Session::CountOf(size_t number, const Feeds& feeds) const {
  int64_t count = 0;
  Fetch(program_.outputs.size() + number, feeds, &count);
  return count;
}

void Session::Fill(size_t number, const Feeds& feeds, hybridc_output_array& output) const {
  const Port& port = program_.outputs[number];
  std::vector<int64_t> shape = port.shape;
  for (const Cut& cut : port.cuts) {
    shape[cut.axis] = std::clamp<int64_t>(CountOf(cut.count, feeds), 0, port.shape[cut.axis]);
  }
  output.size_bytes = static_cast<size_t>(port.size_bytes);
  if (shape == port.shape || port.size_bytes == 0) {
    Fetch(number, feeds, output.data);
  } else {
    std::vector<char> whole(static_cast<size_t>(port.size_bytes));
    Fetch(number, feeds, whole.data());
    char* const first = static_cast<char*>(output.data);
    const char* end = CopyFirst(whole.data(), first, port.shape.data(), shape.data(), shape.size(), port.element_bytes);
    output.size_bytes = static_cast<size_t>(end - first);
  }
  if (output.shape != nullptr) std::copy(shape.begin(), shape.end(), output.shape);
}

}  // namespace hybridc
