#include "system/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>
#include <vector>

#include "refusal.h"
#include "system/sha256.h"

namespace hybridc {
namespace {

constexpr size_t kPartBytes = 1 << 20;
constexpr char kCopyAgain[] = "copy the bundle again";
constexpr size_t kHashDigits = 64;

Refusal Changed(const std::string& path) {
  return Refusal("HC304", "its content has changed (the SHA-256 hash differs)", path, kCopyAgain);
}

}  // namespace

// No link is followed, and no FIFO waited for.
File::File(const std::string& path)
    : path_(path), handle_(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)) {
  struct stat status;
  if (handle_ < 0 || fstat(handle_, &status) != 0) {
    const std::string reason = std::strerror(errno);
    if (handle_ >= 0) close(handle_);
    throw Refusal("HC304", "cannot be read: " + reason, path, kCopyAgain);
  }
  if (!S_ISREG(status.st_mode)) {
    close(handle_);
    throw Refusal("HC304", "it is no regular file", path, kCopyAgain);
  }
  size_bytes_ = static_cast<size_t>(status.st_size);
  modified_ = status.st_mtim;
}

File::~File() { close(handle_); }

template <typename Action>
void File::ForEachPart(Action action) const {
  std::vector<char> part(kPartBytes);
  for (off_t offset = 0;;) {
    const ssize_t count = pread(handle_, part.data(), part.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Refusal("HC304", std::string("cannot be read: ") + std::strerror(errno), path_, kCopyAgain);
    if (count == 0) return;
    action(part.data(), static_cast<size_t>(count));
    offset += count;
  }
}

std::string File::Read(size_t most_bytes) const {
  std::string content;
  ForEachPart([&](const char* part, size_t size) {
    if (size > most_bytes - content.size())
      throw Refusal("HC303", "it is larger than any such file", path_, kCopyAgain);
    content.append(part, size);
  });
  return content;
}

void File::CheckHash(const std::string& expected) const {
  Sha256 hash;
  ForEachPart([&](const char* part, size_t size) { hash.Add(part, size); });
  if (hash.Digest() != expected) throw Changed(path_);
}

void File::CheckUnchanged() const {
  struct stat now;
  if (fstat(handle_, &now) == 0 && static_cast<size_t>(now.st_size) == size_bytes_ &&
      now.st_mtim.tv_sec == modified_.tv_sec && now.st_mtim.tv_nsec == modified_.tv_nsec) {
    return;
  }
  throw Refusal("HC304", "the file has been changed since it was opened", path_, "open the bundle again");
}

void CheckHash(const std::string& path, const std::string& content, const std::string& expected) {
  Sha256 hash;
  hash.Add(content.data(), content.size());
  if (hash.Digest() != expected) throw Changed(path);
}

std::map<std::string, std::string> ParseHashes(const std::string& path, const std::string& content) {
  std::map<std::string, std::string> hashes;
  std::istringstream lines(content);
  for (std::string line; std::getline(lines, line);) {
    const size_t digits = line.find_first_not_of("0123456789abcdef");
    if (digits != kHashDigits || line.compare(digits, 2, "  ") != 0) {
      throw Refusal("HC303", "a line is not a hash and a name", path, kCopyAgain);
    }
    hashes[line.substr(digits + 2)] = line.substr(0, digits);
  }
  return hashes;
}

}  // namespace hybridc
