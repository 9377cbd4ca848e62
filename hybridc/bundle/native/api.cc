// hybridc.h in terms of Session: exceptions become numbers and a text.
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <system_error>

#include "hybridc.h"
#include "refusal.h"
#include "session.h"

struct hybridc_session {
  std::unique_ptr<hybridc::Session> session;
};

namespace {

using hybridc::Port;
using hybridc::Refusal;

thread_local std::string last_error;

int Note(const Refusal& refusal) {
  last_error = refusal.what();
  return refusal.number();
}

// Runs `action`; 0, or the number of the error that it throws.
template <typename Action>
int Told(Action action) noexcept {
  try {
    try {
      action();
      return 0;
    } catch (const Refusal& refusal) {
      return Note(refusal);
    } catch (const std::bad_alloc&) {
      return Note(
          Refusal("HC412", "the host's memory is used up", "", "close other programs, or raise the limit (ulimit -v)"));
    } catch (const std::system_error& error) {
      return Note(Refusal("HC412", std::string("the host's memory or threads are used up: ") + error.what(), "",
                          "close other programs, or raise the limit (ulimit -u)"));
    } catch (const std::exception& error) {
      return Note(Refusal("HC900", error.what(), "", "this is a bug in hybridc; please report it"));
    }
  } catch (...) {  // no memory for the text
    return 412;
  }
}

void Describe(const Port& port, hybridc_port* told) {
  *told = {port.name.c_str(), port.dtype.c_str(), port.shape.data(), port.shape.size(),
           static_cast<size_t>(port.size_bytes), port.cuts.empty() ? 0 : 1};
}

}  // namespace

const char* hybridc_last_error(void) { return last_error.c_str(); }

int hybridc_open(const char* folder, const hybridc_options* options, hybridc_session** session) {
  *session = nullptr;
  return Told([&] {
    hybridc_options wanted = {};
    if (options != nullptr) {
      if (options->struct_bytes < sizeof wanted) {
        throw Refusal("HC500", "struct_bytes of the options is " + std::to_string(options->struct_bytes), "",
                      "set it to sizeof(hybridc_options)");
      }
      wanted = *options;
    }
    auto opened = std::make_unique<hybridc_session>();
    opened->session = hybridc::Session::Open(folder == nullptr ? "" : folder, wanted);
    *session = opened.release();
  });
}

void hybridc_close(hybridc_session* session) { delete session; }

size_t hybridc_input_count(const hybridc_session* session) { return session->session->program().inputs.size(); }

size_t hybridc_output_count(const hybridc_session* session) { return session->session->program().outputs.size(); }

int hybridc_input(const hybridc_session* session, size_t index, hybridc_port* port) {
  return Told([&] {
    const auto& inputs = session->session->program().inputs;
    if (index >= inputs.size()) {
      throw Refusal("HC551", "there is no input " + std::to_string(index), "",
                    "there are " + std::to_string(inputs.size()));
    }
    Describe(inputs[index], port);
  });
}

int hybridc_output(const hybridc_session* session, size_t index, hybridc_port* port) {
  return Told([&] {
    const auto& outputs = session->session->program().outputs;
    if (index >= outputs.size()) {
      throw Refusal("HC555", "there is no output " + std::to_string(index), "",
                    "there are " + std::to_string(outputs.size()));
    }
    Describe(outputs[index], port);
  });
}

int hybridc_get_model(const hybridc_session* session, hybridc_model* model) {
  return Told([&] {
    const hybridc::Program& program = session->session->program();
    *model = {program.source.name.c_str(), program.source.sha256.c_str(), program.source.opset,
              program.target.c_str(),      program.hybridc.c_str(),       program.tvm.c_str(),
              program.tvm_ffi.c_str()};
  });
}

int32_t hybridc_thread_count(const hybridc_session* session) { return session->session->threads(); }

double hybridc_predicted_us(const hybridc_session* session) { return session->session->plan().predicted_us; }

int hybridc_run(hybridc_session* session, const hybridc_input_array* inputs, size_t input_count,
                hybridc_output_array* outputs, size_t output_count) {
  return Told([&] { session->session->Run({inputs, input_count}, {outputs, output_count}); });
}

size_t hybridc_step_count(const hybridc_session* session) { return session->session->plan().steps.size(); }

int hybridc_measure(hybridc_session* session, const hybridc_input_array* inputs, size_t input_count,
                    hybridc_step* steps) {
  return Told([&] { session->session->Measure({inputs, input_count}, steps); });
}

int hybridc_get_memory(const hybridc_session* session, hybridc_memory* memory) {
  return Told([&] { *memory = session->session->Memory(); });
}
