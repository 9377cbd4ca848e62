#include "library.h"

#include <dlfcn.h>
#include <tvm/ffi/c_api.h>

#include <map>
#include <mutex>

#include "refusal.h"

namespace hybridc {
namespace {

struct Loaded {
  std::string hash;
  std::optional<ffi::Module> module;
};

// By path. The dynamic linker never unloads such a library, and takes one of the same path for the same.
Loaded& LoadedAt(const std::string& path) {
  static auto* const loaded = new std::map<std::string, Loaded>();  // never destroyed: lanes may outlive main
  return (*loaded)[path];
}

std::mutex& LoadingMutex() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}

// The folder that a library of this process was loaded from.
std::string FolderOf(const void* symbol) {
  Dl_info info;
  if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return ".";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string LinkerError() {
  const char* error = dlerror();
  return error == nullptr ? "unknown error" : error;
}

std::string PathOf(const void* symbol) {
  Dl_info info;
  return dladdr(symbol, &info) == 0 || info.dli_fname == nullptr ? "" : info.dli_fname;
}

// The libraries of artifacts find TVM's functions in the global scope alone, where TVM's are not if a program has
// loaded this library for itself.
void LoadRuntime(bool cuda) {
  dlopen(PathOf(reinterpret_cast<const void*>(&TVMFFIFunctionCall)).c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  const std::string folder = FolderOf(reinterpret_cast<const void*>(&LoadRuntime));
  const std::string runtime = folder + "/libtvm_runtime.so";
  if (dlopen(runtime.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw Refusal("HC307", "the library cannot be loaded: " + LinkerError(), runtime, "copy the bundle again");
  }
  if (!cuda) return;
  const std::string gpu_part = folder + "/libtvm_runtime_cuda.so";
  if (dlopen(gpu_part.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) RefuseNoGpu(LinkerError());
}

ffi::Module Load(const std::string& path) {
  const std::optional<ffi::Function> loader = ffi::Function::GetGlobal("ffi.Module.load_from_file.so");
  try {
    return (*loader)(path, "so").cast<ffi::Module>();
  } catch (const ffi::Error& error) {
    throw Refusal("HC307", "the library cannot be loaded: " + error.message(), path, "copy the bundle again");
  }
}

std::string OneLine(const std::string& text) {
  std::string line = text.substr(0, text.find("// CUDA Source"));  // which may be thousands of lines
  for (char& c : line) c = c == '\n' ? ' ' : c;
  return line;
}

}  // namespace

Library::Library(const std::string& path, const std::string& hash, bool cuda) : path_(path) {
  const File file(path);
  file.CheckHash(hash);
  const std::lock_guard<std::mutex> lock(LoadingMutex());
  LoadRuntime(cuda);
  Loaded& loaded = LoadedAt(path);
  if (!loaded.module.has_value()) loaded = {hash, Load(path)};
  if (loaded.hash != hash) {
    throw Refusal("HC307", "another library was loaded from here before, and stays loaded", path,
                  "start the program again");
  }
  module_ = loaded.module;
}

ffi::Function Library::Function(const std::string& name) const {
  const ffi::Optional<ffi::Function> found = (*module_)->GetFunction(name);
  if (!found.has_value()) throw Refusal("HC307", "the library has no " + name, path_, "compile the model again");
  return *found;
}

void RefuseNoGpu(const std::string& reason) {
  throw Refusal("HC402", "no usable GPU: " + reason, "", "install the NVIDIA driver");
}

void Rethrow(const ffi::Error& error, const std::string& folder, const std::string& where) {
  const std::string kind = error.kind(), message = OneLine(error.message());
  if (kind == "ValueError" || kind == "TypeError") {
    throw Refusal("HC306", "its plan cannot be run: " + message, folder, "make the bundle again");
  }
  if (kind == "MemoryError") {
    throw Refusal("HC412", "the host's memory or threads are used up: " + message, "", "close other programs");
  }
  if (message.find("cuModuleGetFunction") != std::string::npos &&
      message.find("CUDA_ERROR_NOT_FOUND") != std::string::npos) {
    throw Refusal("HC307", "the GPU's code lacks a kernel: " + message, folder, "compile the model again");
  }
  throw Refusal("HC407", "the device failed: " + message, where,
                "check that the GPU works and has free memory; if so, this is a bug in hybridc");
}

}  // namespace hybridc
