// Files of a bundle: regular ones, each opened once, so that what was checked is what is used. The library alone is
// opened once more, by the dynamic linker, which takes a path.
#pragma once
#include <sys/types.h>
#include <time.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace hybridc {

class File {
 public:
  // Throws HC304 where it is missing, cannot be read, or is no regular file.
  explicit File(const std::string& path);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int handle() const { return handle_; }
  size_t size_bytes() const { return size_bytes_; }

  // All of it. Throws HC303 where it is larger than `most_bytes`.
  std::string Read(size_t most_bytes) const;

  // Throws HC304 where its bytes have another SHA-256.
  void CheckHash(const std::string& expected) const;

  // Throws HC304 where anybody wrote to it, or cut it, since it was opened.
  void CheckUnchanged() const;

 private:
  template <typename Action>
  void ForEachPart(Action action) const;

  std::string path_;
  int handle_;
  size_t size_bytes_;
  timespec modified_;
};

// Throws HC304.
void CheckHash(const std::string& path, const std::string& content, const std::string& expected);

// What `sha256sum` writes and reads: the hash of each file, by its name. Throws HC303.
std::map<std::string, std::string> ParseHashes(const std::string& path, const std::string& content);

}  // namespace hybridc
