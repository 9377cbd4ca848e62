#include "runner/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "refusal.h"
#include "runner/zip.h"

namespace hybridc {
namespace {

constexpr char kArraySuffix[] = ".npy";

std::string Slurp(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(stream), {}};
  if (!stream.is_open() || stream.bad()) {
    throw Refusal("HC530", std::string("the file cannot be read: ") + std::strerror(errno), path,
                  "give a file of numpy.save or numpy.savez");
  }
  return content;
}

void WriteParts(const std::string& path, const std::vector<std::string>& parts) {
  std::ofstream stream(path, std::ios::binary);
  for (const std::string& part : parts) stream.write(part.data(), static_cast<std::streamsize>(part.size()));
  stream.close();
  if (stream) return;
  const std::string reason = std::strerror(errno);
  std::remove(path.c_str());
  throw Refusal("HC531", "the file cannot be written: " + reason, path, "choose another place");
}

}  // namespace

bool IsNpz(const std::string& path) { return path.ends_with(".npz"); }

Array ReadNpy(const std::string& path) { return ParseNpy(path, Slurp(path)); }

std::map<std::string, Array> ReadNpz(const std::string& path) {
  const std::string content = Slurp(path);
  std::map<std::string, Array> arrays;
  for (const ZipEntry& entry : ParseZip(path, content)) {
    const std::string where = path + ": " + entry.name;
    if (!entry.name.ends_with(kArraySuffix)) throw Refusal("HC530", "it is no array", where, "write it by numpy.savez");
    const std::string name = entry.name.substr(0, entry.name.size() - std::strlen(kArraySuffix));
    if (!arrays.emplace(name, ParseNpy(where, entry.content)).second) {
      throw Refusal("HC530", "the file has two arrays of this name", where, "write it by numpy.savez");
    }
  }
  return arrays;
}

void WriteNpy(const std::string& path, const std::string& encoded) { WriteParts(path, {encoded}); }

void WriteNpz(const std::string& path, EncodedArrays arrays) {
  for (auto& [name, content] : arrays) name += kArraySuffix;
  WriteParts(path, EncodeZip(std::move(arrays)));
}

}  // namespace hybridc
