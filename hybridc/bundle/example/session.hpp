// hybridc.h in C++17: what is opened is closed, and what fails is thrown. Copy it into programs of your own.
#pragma once
#include <hybridc.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hybridc {

class Error : public std::runtime_error {
 public:
  explicit Error(int number) : std::runtime_error(hybridc_last_error()), number_(number) {}

  // 304 of HC304.
  int number() const noexcept { return number_; }

 private:
  int number_;
};

// Elements in row-major order, of a type as numpy names it.
struct Array {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

// An input or output; of an output whose size follows from data, shape and bytes are the most that it can have.
struct Port {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::size_t size_bytes;

  Array Zeros() const { return {dtype, shape, std::vector<std::byte>(size_bytes)}; }
};

// A bundle that is ready to run. Several threads may use it; it must outlive their calls.
class Session {
 public:
  explicit Session(const std::string& folder, const hybridc_options* options = nullptr) {
    hybridc_session* opened = nullptr;
    Check(hybridc_open(folder.c_str(), options, &opened));
    session_.reset(opened);
  }

  std::vector<Port> Inputs() const { return Ports(hybridc_input_count(session_.get()), hybridc_input); }
  std::vector<Port> Outputs() const { return Ports(hybridc_output_count(session_.get()), hybridc_output); }

  // All outputs, by their names. Throws Error: 551 to 554 for what is fed, 560 for a value that a node does not allow.
  std::map<std::string, Array> Run(const std::map<std::string, Array>& feeds) {
    const std::vector<Port> ports = Outputs();
    std::map<std::string, Array> results;
    std::vector<hybridc_input_array> inputs;
    std::vector<hybridc_output_array> outputs;
    for (const auto& [name, array] : feeds) {
      inputs.push_back({name.c_str(), array.dtype.c_str(), array.shape.data(), array.shape.size(), array.data.data()});
    }
    for (const Port& port : ports) {
      Array& result = results[port.name] = port.Zeros();
      outputs.push_back({port.name.c_str(), result.data.data(), result.data.size(), result.shape.data(), 0});
    }
    Check(hybridc_run(session_.get(), inputs.data(), inputs.size(), outputs.data(), outputs.size()));
    for (const hybridc_output_array& output : outputs) results[output.name].data.resize(output.size_bytes);
    return results;
  }

 private:
  struct Closer {
    void operator()(hybridc_session* session) const { hybridc_close(session); }
  };
  using Describe = int (*)(const hybridc_session*, std::size_t, hybridc_port*);

  static void Check(int number) {
    if (number != 0) throw Error(number);
  }

  std::vector<Port> Ports(std::size_t count, Describe describe) const {
    std::vector<Port> ports;
    for (std::size_t i = 0; i < count; ++i) {
      hybridc_port port;
      Check(describe(session_.get(), i, &port));
      ports.push_back({port.name, port.dtype, {port.shape, port.shape + port.rank}, port.size_bytes});
    }
    return ports;
  }

  std::unique_ptr<hybridc_session, Closer> session_;
};

}  // namespace hybridc
