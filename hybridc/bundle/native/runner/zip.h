// Zip archives whose entries are stored as they are (PKWARE's APPNOTE.TXT 6.3, with ZIP64), as numpy.savez writes them.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hybridc {

struct ZipEntry {
  std::string name;
  std::string_view content;  // part of the archive's bytes
};

// The entries of an archive that has these bytes; `path` is for messages. Nothing is copied. Throws HC530 for what is
// no archive, is cut off or changed, and for entries that are compressed or encrypted.
std::vector<ZipEntry> ParseZip(const std::string& path, std::string_view content);

// The bytes of an archive of these names and contents, in parts. The same contents give the same bytes.
std::vector<std::string> EncodeZip(std::vector<std::pair<std::string, std::string>> contents);

}  // namespace hybridc
