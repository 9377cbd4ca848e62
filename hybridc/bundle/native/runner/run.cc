// The runner of a bundle: arrays from .npy and .npz files or at random, outputs to such files. It uses hybridc.h alone.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "hybridc.h"
#include "refusal.h"
#include "runner/arguments.h"
#include "runner/files.h"

namespace hybridc {
namespace {

// A failure that the library has put in words.
struct Failure {
  int number;
};

void Check(int number) {
  if (number != 0) throw Failure{number};
}

int ExitCode(int number) {
  switch (number / 100) {
    case 1:
    case 3:
      return 3;
    case 2:
      return 4;
    case 4:
      return 5;
    case 5:
      return 2;
    default:
      return 1;
  }
}

struct Closer {
  void operator()(hybridc_session* session) const { hybridc_close(session); }
};
using Session = std::unique_ptr<hybridc_session, Closer>;

std::string OwnFolder() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) throw Refusal("HC500", "the folder of the bundle is missing", "", "write run FOLDER");
  const std::string text(path, static_cast<size_t>(length));
  return text.substr(0, std::max<size_t>(text.rfind('/'), 1));
}

Session Open(const Arguments& arguments) {
  hybridc_options options = {};
  options.struct_bytes = sizeof options;
  options.threads = arguments.threads;
  options.trust_weights = arguments.trusts_weights;
  options.gpu_memory_bytes = arguments.gpu_memory_bytes;
  options.host_memory_bytes = arguments.host_memory_bytes;
  hybridc_session* session = nullptr;
  Check(hybridc_open((arguments.folder.empty() ? OwnFolder() : arguments.folder).c_str(), &options, &session));
  return Session(session);
}

using Describe = int (*)(const hybridc_session*, size_t, hybridc_port*);

std::vector<hybridc_port> Ports(const Session& session, size_t count, Describe describe) {
  std::vector<hybridc_port> ports(count);
  for (size_t i = 0; i < count; ++i) Check(describe(session.get(), i, &ports[i]));
  return ports;
}

std::vector<hybridc_port> Inputs(const Session& session) {
  return Ports(session, hybridc_input_count(session.get()), hybridc_input);
}

std::vector<hybridc_port> Outputs(const Session& session) {
  return Ports(session, hybridc_output_count(session.get()), hybridc_output);
}

template <typename Number, typename Draw>
std::vector<char> Drawn(size_t size_bytes, Draw draw) {
  std::vector<char> data(size_bytes);
  for (size_t at = 0; at + sizeof(Number) <= size_bytes; at += sizeof(Number)) {
    const Number number = static_cast<Number>(draw());
    std::memcpy(data.data() + at, &number, sizeof number);
  }
  return data;
}

// float32 to its upper half, which is bfloat16; to float16 of a number between 2^-14 and 2^15, or 0.
uint16_t Bfloat16(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

uint16_t Float16(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127;
  if (exponent < -14) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | static_cast<uint32_t>(exponent + 15) << 10 |
                               (bits >> 13 & 0x3ff));
}

// Floats of the normal distribution, 8-bit integers from all there are, wider ones from 0 and 1: they are indices,
// masks or lengths, which these are in range for.
std::vector<char> Draw(const hybridc_port& port, std::mt19937_64* generator) {
  std::normal_distribution<float> normal;
  const auto draw = [&] { return normal(*generator); };
  const auto bit = [&] { return (*generator)() >> 63; };
  const std::string dtype = port.dtype;
  if (dtype == "float32") return Drawn<float>(port.size_bytes, draw);
  if (dtype == "float64") return Drawn<double>(port.size_bytes, draw);
  if (dtype == "float16") return Drawn<uint16_t>(port.size_bytes, [&] { return Float16(draw()); });
  if (dtype == "bfloat16") return Drawn<uint16_t>(port.size_bytes, [&] { return Bfloat16(draw()); });
  if (dtype == "bool") return Drawn<uint8_t>(port.size_bytes, bit);
  if (dtype.ends_with("int64")) return Drawn<int64_t>(port.size_bytes, bit);
  if (dtype.ends_with("int32")) return Drawn<int32_t>(port.size_bytes, bit);
  if (dtype.ends_with("int16")) return Drawn<int16_t>(port.size_bytes, bit);
  if (dtype.ends_with("int8")) return Drawn<uint8_t>(port.size_bytes, [&] { return (*generator)() >> 56; });
  throw Refusal("HC533", "unsupported input type " + dtype, "", "give --input " + std::string(port.name) + "=FILE.npy");
}

// Arrays of elements that numpy has no type for are void there.
std::string FoundType(const Array& array, const hybridc_port& port) {
  const std::string dtype = port.dtype;
  const bool is_stored_so = (array.dtype == "void16" && dtype == "bfloat16") ||
                            (array.dtype == "void8" && (dtype.starts_with("float8") || dtype.starts_with("float4") ||
                                                        dtype.ends_with("int4") || dtype.ends_with("int2")));
  return is_stored_so ? dtype : array.dtype;
}

// Arrays of files, by the names of inputs.
std::map<std::string, Array> ReadInputs(const Arguments& arguments) {
  std::map<std::string, Array> arrays;
  if (!arguments.archive.empty()) arrays = ReadNpz(arguments.archive);
  for (const auto& [name, file] : arguments.inputs) {
    if (!arrays.emplace(name, ReadNpy(file)).second) {
      throw Refusal("HC533", "--input and --inputs both have " + Quoted(name), "", "give it once");
    }
  }
  return arrays;
}

std::vector<Array> Gather(const std::vector<hybridc_port>& ports, const Arguments& arguments) {
  std::mt19937_64 generator(arguments.seed);
  std::vector<Array> arrays;
  std::map<std::string, Array> given = ReadInputs(arguments);
  for (const hybridc_port& port : ports) {
    if (auto found = given.extract(port.name); !found.empty()) {
      Array& array = arrays.emplace_back(std::move(found.mapped()));
      array.dtype = FoundType(array, port);
    } else if (arguments.is_random) {
      arrays.push_back({port.dtype, {port.shape, port.shape + port.rank}, Draw(port, &generator)});
    } else {
      throw Refusal("HC533", "no value for " + Quoted(port.name), "",
                    "give --input " + std::string(port.name) + "=FILE.npy, or --random");
    }
  }
  if (!given.empty()) {
    std::string names;
    for (const hybridc_port& port : ports) names += (names.empty() ? "" : ", ") + Quoted(port.name);
    throw Refusal("HC533", "the model has no input " + Quoted(given.begin()->first), "", "inputs are " + names);
  }
  return arrays;
}

std::vector<hybridc_input_array> Fed(const std::vector<hybridc_port>& inputs, const std::vector<Array>& arrays) {
  std::vector<hybridc_input_array> fed;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Array& array = arrays[i];
    fed.push_back({inputs[i].name, array.dtype.c_str(), array.shape.data(), array.shape.size(), array.data.data()});
  }
  return fed;
}

struct Result {
  std::vector<char> data;
  std::vector<int64_t> shape;
  size_t size_bytes;
};

std::vector<Result> RunOnce(const Session& session, const std::vector<hybridc_port>& inputs,
                            const std::vector<Array>& arrays, const std::vector<hybridc_port>& outputs) {
  const std::vector<hybridc_input_array> fed = Fed(inputs, arrays);
  std::vector<Result> results;
  std::vector<hybridc_output_array> filled;
  results.reserve(outputs.size());
  for (const hybridc_port& port : outputs) {
    Result& result =
        results.emplace_back(Result{std::vector<char>(port.size_bytes), std::vector<int64_t>(port.rank), 0});
    filled.push_back({port.name, result.data.data(), port.size_bytes, result.shape.data(), 0});
  }
  Check(hybridc_run(session.get(), fed.data(), fed.size(), filled.data(), filled.size()));
  for (size_t i = 0; i < results.size(); ++i) results[i].size_bytes = filled[i].size_bytes;
  return results;
}

// A file name of its own for each output: a model's names may hold slashes, dots or nothing at all.
std::vector<std::string> FileNames(const std::vector<hybridc_port>& ports) {
  constexpr size_t kLongest = 100;
  std::vector<std::string> names;
  for (const hybridc_port& port : ports) {
    std::string stem;
    for (char c : std::string(port.name)) {
      const bool is_safe = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.' || c == '-';
      if (!stem.empty() || (c != '.' && c != '-')) stem += is_safe ? c : '_';
    }
    stem = stem.empty() ? "output" : stem.substr(0, kLongest);
    std::string name = stem + ".npy";
    for (int number = 2; std::find(names.begin(), names.end(), name) != names.end(); ++number) {
      name = stem + "_" + std::to_string(number) + ".npy";
    }
    names.push_back(name);
  }
  return names;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t extent : shape) text += (text.empty() ? "" : "x") + std::to_string(extent);
  return text.empty() ? "scalar" : text;
}

// Files of a folder, or arrays of one file. Returns what is printed of each: where it is.
std::vector<std::string> Write(const std::string& output, const std::vector<hybridc_port>& ports,
                               const std::vector<Result>& results) {
  const std::vector<std::string> names = FileNames(ports);
  std::vector<std::string> places;
  EncodedArrays arrays;
  if (!IsNpz(output) && mkdir(output.c_str(), 0777) != 0 && errno != EEXIST) {
    throw Refusal("HC531", std::string("the folder cannot be made: ") + std::strerror(errno), output,
                  "choose another folder");
  }
  for (size_t i = 0; i < ports.size(); ++i) {
    const Result& result = results[i];
    std::string encoded =
        EncodeNpy(ports[i].dtype, result.shape.data(), result.shape.size(), result.data.data(), result.size_bytes);
    if (IsNpz(output)) {
      arrays.emplace_back(ports[i].name, std::move(encoded));
      places.push_back(output);
    } else {
      WriteNpy(places.emplace_back(output + "/" + names[i]), encoded);
    }
  }
  if (IsNpz(output)) WriteNpz(output, std::move(arrays));
  return places;
}

void Save(const Arguments& arguments, const std::vector<hybridc_port>& outputs, const std::vector<Result>& results) {
  std::vector<std::string> places;
  if (!arguments.output.empty()) places = Write(arguments.output, outputs, results);
  if (arguments.is_json) return;
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::printf("%s: %s %s%s\n", outputs[i].name, outputs[i].dtype, ShapeText(results[i].shape).c_str(),
                places.empty() ? "" : (" -> " + places[i]).c_str());
  }
}

// Names are the model's, and may hold anything.
std::string JsonText(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned char>(c));
    const bool is_plain = static_cast<unsigned char>(c) >= ' ' && c != '"' && c != '\\';
    quoted += is_plain ? std::string(1, c) : std::string(escaped);
  }
  return quoted + "\"";
}

// One thread for each lane, as `hybridc run --trace` writes it.
void WriteTrace(const Session& session, const std::vector<hybridc_port>& inputs, const std::vector<Array>& arrays,
                const std::string& path) {
  const char* const lanes[] = {"GPU", "CPU", "copies to GPU", "copies to CPU"};
  std::vector<hybridc_step> steps(hybridc_step_count(session.get()));
  const std::vector<hybridc_input_array> fed = Fed(inputs, arrays);
  Check(hybridc_measure(session.get(), fed.data(), fed.size(), steps.data()));
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) {
    throw Refusal("HC531", std::string("the file cannot be written: ") + std::strerror(errno), path,
                  "choose another folder");
  }
  std::fprintf(file, "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [");
  for (int lane = 0; lane < 4; ++lane) {
    std::fprintf(file, "%s\n{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": 1, \"tid\": %d, ", lane == 0 ? "" : ",",
                 lane);
    std::fprintf(file, "\"args\": {\"name\": \"%s\"}}", lanes[lane]);
  }
  for (const hybridc_step& step : steps) {
    std::fprintf(file, ",\n{\"ph\": \"X\", \"name\": %s, \"pid\": 1, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f, ",
                 JsonText(step.name).c_str(), step.lane, step.begin_us, step.end_us - step.begin_us);
    std::fprintf(file, "\"args\": {\"planned_us\": %.3f}}", step.planned_us);
  }
  std::fprintf(file, "\n]}\n");
  const bool is_cut = std::ferror(file) != 0;
  if (std::fclose(file) != 0 || is_cut) {
    throw Refusal("HC531", "the file cannot be written", path, "choose another folder");
  }
}

void PrintPorts(const Session& session) {
  for (const auto& [title, ports] : {std::pair{"input", Inputs(session)}, std::pair{"output", Outputs(session)}}) {
    for (const hybridc_port& port : ports) {
      std::printf("%s %s: %s %s\n", title, port.name, port.dtype,
                  ShapeText({port.shape, port.shape + port.rank}).c_str());
    }
  }
}

void PrintSummary(const Session& session, std::vector<double> seconds, bool is_json) {
  hybridc_memory memory;
  Check(hybridc_get_memory(session.get(), &memory));
  const auto number = [](uint64_t bytes) { return static_cast<unsigned long long>(bytes); };
  if (is_json) {
    hybridc_model model;
    Check(hybridc_get_model(session.get(), &model));
    std::printf("{\"target\": %s, \"seconds\": [", JsonText(model.target).c_str());
    for (size_t i = 0; i < seconds.size(); ++i) std::printf("%s%.9f", i == 0 ? "" : ", ", seconds[i]);
    std::printf("], \"memory\": {\"gpu\": {\"planned_bytes\": %llu, \"allocated_bytes\": %llu}, ",
                number(memory.gpu_planned_bytes), number(memory.gpu_allocated_bytes));
    std::printf("\"cpu\": {\"planned_bytes\": %llu, \"allocated_bytes\": %llu, \"staging_bytes\": %llu, ",
                number(memory.host_planned_bytes), number(memory.host_allocated_bytes), number(memory.staging_bytes));
    std::printf("\"mapped_weight_bytes\": %llu}}}\n", number(memory.mapped_weight_bytes));
    return;
  }
  std::sort(seconds.begin(), seconds.end());
  const size_t count = seconds.size();
  const double median = (seconds[(count - 1) / 2] + seconds[count / 2]) / 2;
  std::printf("%zu run%s: %.3f ms%s", count, count == 1 ? "" : "s", median * 1e3,
              count == 1 ? "\n" : " at the median, ");
  if (count > 1) std::printf("%.3f ms at best\n", seconds.front() * 1e3);
  if (memory.gpu_planned_bytes != 0) {
    std::printf("gpu memory: %s planned, %s allocated\n", FormatBytes(memory.gpu_planned_bytes).c_str(),
                FormatBytes(memory.gpu_allocated_bytes).c_str());
  }
  std::printf("cpu memory: %s planned, %s allocated\n", FormatBytes(memory.host_planned_bytes).c_str(),
              FormatBytes(memory.host_allocated_bytes).c_str());
}

void Execute(const Arguments& arguments) {
  if (arguments.is_help) {
    std::fputs(kHelp, stdout);
    return;
  }
  const Session session = Open(arguments);
  if (arguments.lists_ports) return PrintPorts(session);
  const std::vector<hybridc_port> inputs = Inputs(session), outputs = Outputs(session);
  const std::vector<Array> arrays = Gather(inputs, arguments);
  std::vector<Result> results;
  std::vector<double> seconds;
  for (int64_t run = 0; run < arguments.repeat; ++run) {
    const auto start = std::chrono::steady_clock::now();
    results = RunOnce(session, inputs, arrays, outputs);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  if (!arguments.trace.empty()) WriteTrace(session, inputs, arrays, arguments.trace);
  Save(arguments, outputs, results);
  PrintSummary(session, std::move(seconds), arguments.is_json);
}

}  // namespace
}  // namespace hybridc

int main(int count, char** words) {
  try {
    hybridc::Execute(hybridc::ParseArguments(count, words));
    return std::fflush(stdout) == 0 ? 0 : 1;
  } catch (const hybridc::Failure& failure) {
    std::fprintf(stderr, "%s\n", hybridc_last_error());
    return hybridc::ExitCode(failure.number);
  } catch (const hybridc::Refusal& refusal) {
    std::fprintf(stderr, "%s\n", refusal.what());
    return hybridc::ExitCode(refusal.number());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "error[HC412]: the host's memory is used up\n  = help: close other programs\n");
    return hybridc::ExitCode(412);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error[HC900]: %s\n", error.what());
    return 1;
  }
}
