// library.so of a bundle, with the runtime's helper in it (hybridc/runtime/native), and TVM's runtime below it.
#pragma once
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "system/files.h"

namespace hybridc {

namespace ffi = tvm::ffi;

class Library {
 public:
  // Loads libtvm_runtime, and with `cuda` its CUDA part, which stand beside this very library; then the file. What is
  // loaded stays loaded. Throws HC402 where there is no NVIDIA driver, HC304 where the file has another hash, HC307
  // where it cannot be loaded.
  Library(const std::string& path, const std::string& hash, bool cuda);

  // Throws HC307 where there is none of that name.
  ffi::Function Function(const std::string& name) const;

  // Calls a function of the helper.
  template <typename Result = void, typename... Arguments>
  Result Help(const char* name, Arguments&&... arguments) const {
    const ffi::Any result = Function(std::string("hybridc_") + name)(std::forward<Arguments>(arguments)...);
    if constexpr (!std::is_void_v<Result>) return result.cast<Result>();
  }

 private:
  std::string path_;
  std::optional<ffi::Module> module_;  // there is no empty one
};

// HC402, for a GPU that cannot be used.
[[noreturn]] void RefuseNoGpu(const std::string& reason);

// Runs `action`; what TVM, CUDA and the helper throw is thrown as a Refusal: HC306 for a plan that the helper refuses,
// HC307 for a kernel that is missing, HC407 for a device that failed, HC412 where memory is used up.
template <typename Action>
auto Guarded(const std::string& folder, Action action, const std::string& where = "") -> decltype(action());

// The Refusal for an error of TVM's; `where` says what the device was asked for.
[[noreturn]] void Rethrow(const ffi::Error& error, const std::string& folder, const std::string& where = "");

template <typename Action>
auto Guarded(const std::string& folder, Action action, const std::string& where) -> decltype(action()) {
  try {
    return action();
  } catch (const ffi::Error& error) {
    Rethrow(error, folder, where);
  }
}

}  // namespace hybridc
