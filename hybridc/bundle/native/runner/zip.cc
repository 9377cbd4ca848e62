#include "runner/zip.h"

#include <array>
#include <cstdint>

#include "refusal.h"

namespace hybridc {
namespace {

constexpr uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kEnd = 0x06054b50;  // how records begin
constexpr uint32_t kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr uint64_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocator64Bytes = 20;
constexpr uint64_t kLongestComment = 0xffff;
constexpr uint64_t kFull16 = 0xffff, kFull32 = 0xffffffff;  // the number stands in a record of ZIP64
constexpr uint16_t kExtra64 = 1;
constexpr uint16_t kVersion64 = 45;                                    // that knows ZIP64
constexpr uint16_t kEncrypted = 1 << 0, kUtf8 = 1 << 11;               // flags
constexpr uint16_t kMadeByUnix = 3 << 8, kFirstDay = 1 << 5 | 1 << 0;  // 1 January 1980
constexpr uint32_t kPlainFile = 0100644u << 16;

uint32_t Crc32(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < made.size(); ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
      made[i] = value;
    }
    return made;
  }();
  uint32_t crc = 0xffffffff;
  for (char c : bytes) crc = table[(crc ^ static_cast<unsigned char>(c)) & 0xff] ^ crc >> 8;
  return ~crc;
}

// Whether a name is UTF-8 that can be printed.
bool IsText(std::string_view name) {
  size_t left = 0;  // bytes of a character
  for (char each : name) {
    const unsigned char c = static_cast<unsigned char>(each);
    if (left > 0) {
      if (c >> 6 != 2) return false;
      --left;
    } else if (c >= 0x80) {
      if (c < 0xc2 || c > 0xf4) return false;
      left = c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
    } else if (c < ' ') {
      return false;
    }
  }
  return left == 0;
}

// Records of an archive that anybody may have written: every place is checked before it is read.
class Reader {
 public:
  Reader(const std::string& path, std::string_view bytes) : path_(path), bytes_(bytes) {}

  uint64_t size() const { return bytes_.size(); }

  std::string_view Part(uint64_t at, uint64_t size) const {
    if (at > bytes_.size() || size > bytes_.size() - at) Refuse("it is cut off, or no .npz file");
    return bytes_.substr(at, size);
  }

  // A number in little-endian order.
  uint64_t Number(uint64_t at, uint64_t size) const {
    uint64_t number = 0;
    const std::string_view part = Part(at, size);
    for (uint64_t i = 0; i < size; ++i) number |= uint64_t{static_cast<unsigned char>(part[i])} << 8 * i;
    return number;
  }

  void Expect(uint64_t at, uint32_t signature) const {
    if (Number(at, 4) != signature) Refuse("it is damaged, or no .npz file");
  }

  [[noreturn]] void Refuse(const std::string& what) const {
    throw Refusal("HC530", what, path_, "write it by numpy.savez");
  }

 private:
  const std::string& path_;
  std::string_view bytes_;
};

struct Directory {
  uint64_t count, size_bytes, offset;
};

// The last record of an archive, behind which there may be a comment.
uint64_t FindEnd(const Reader& reader) {
  for (uint64_t behind = kEndBytes; behind <= reader.size() && behind <= kEndBytes + kLongestComment; ++behind) {
    const uint64_t at = reader.size() - behind;
    if (reader.Number(at, 4) == kEnd && reader.Number(at + 20, 2) == behind - kEndBytes) return at;
  }
  reader.Refuse("it is cut off, or no .npz file");
}

Directory ReadDirectory(const Reader& reader) {
  const uint64_t end = FindEnd(reader);
  const Directory found{reader.Number(end + 10, 2), reader.Number(end + 12, 4), reader.Number(end + 16, 4)};
  if (found.count != kFull16 && found.size_bytes != kFull32 && found.offset != kFull32) return found;
  if (end < kLocator64Bytes) reader.Refuse("it is damaged, or no .npz file");
  reader.Expect(end - kLocator64Bytes, kLocator64);
  const uint64_t end64 = reader.Number(end - kLocator64Bytes + 8, 8);
  reader.Part(end64, kEnd64Bytes);
  reader.Expect(end64, kEnd64);
  return {reader.Number(end64 + 32, 8), reader.Number(end64 + 40, 8), reader.Number(end64 + 48, 8)};
}

// Where an entry's data begin and how many bytes they are.
struct Extent {
  uint64_t stored_bytes, size_bytes, local;
};

// Numbers of a central record, of which those that are full stand in its extra field.
Extent ReadExtent(const Reader& reader, uint64_t at, uint64_t extra, uint64_t extra_bytes) {
  Extent extent{reader.Number(at + 20, 4), reader.Number(at + 24, 4), reader.Number(at + 42, 4)};
  const uint64_t end = extra + extra_bytes;
  while (extra + 4 <= end) {
    const uint64_t id = reader.Number(extra, 2), field_end = extra + 4 + reader.Number(extra + 2, 2);
    uint64_t number = extra + 4;
    for (uint64_t* each : {&extent.size_bytes, &extent.stored_bytes, &extent.local}) {
      if (id != kExtra64 || *each != kFull32 || number + 8 > field_end) continue;
      *each = reader.Number(number, 8);
      number += 8;
    }
    extra = field_end;
  }
  return extent;
}

// The entry whose central record is at `at`, which becomes where the next one is.
ZipEntry ReadEntry(const Reader& reader, uint64_t* at) {
  const uint64_t record = *at;
  reader.Part(record, kCentralBytes);
  reader.Expect(record, kCentral);
  const uint64_t name_bytes = reader.Number(record + 28, 2), extra_bytes = reader.Number(record + 30, 2);
  const std::string name(reader.Part(record + kCentralBytes, name_bytes));
  if (!IsText(name)) reader.Refuse("it is damaged: the name of an array is no UTF-8");
  const Extent extent = ReadExtent(reader, record, record + kCentralBytes + name_bytes, extra_bytes);
  *at = record + kCentralBytes + name_bytes + extra_bytes + reader.Number(record + 32, 2);
  if ((reader.Number(record + 8, 2) & kEncrypted) != 0) reader.Refuse("its arrays are encrypted");
  if (reader.Number(record + 10, 2) != 0) reader.Refuse("its arrays are compressed, which this runner does not read");
  if (extent.stored_bytes != extent.size_bytes) reader.Refuse("it is damaged: " + Quoted(name) + " has two sizes");
  reader.Part(extent.local, kLocalBytes);
  reader.Expect(extent.local, kLocal);
  const uint64_t local_name_bytes = reader.Number(extent.local + 26, 2);
  const uint64_t begin = extent.local + kLocalBytes + local_name_bytes + reader.Number(extent.local + 28, 2);
  if (reader.Part(extent.local + kLocalBytes, local_name_bytes) != name) {
    reader.Refuse("it is damaged: " + Quoted(name) + " has two names");
  }
  const std::string_view content = reader.Part(begin, extent.size_bytes);
  if (Crc32(content) != reader.Number(record + 16, 4)) {
    reader.Refuse("it is damaged: " + Quoted(name) + " has another checksum");
  }
  return {name, content};
}

void Put(std::string* record, uint64_t number, int size) {
  for (int i = 0; i < size; ++i) *record += static_cast<char>(number >> 8 * i & 0xff);
}

// What local and central records share: version, flags, method, time, day, checksum, sizes, lengths of name and extra.
void PutCommon(std::string* record, const std::string& name, uint32_t crc, uint64_t extra_bytes) {
  Put(record, kVersion64, 2);
  Put(record, kUtf8, 2);
  Put(record, 0, 2);
  Put(record, 0, 2);
  Put(record, kFirstDay, 2);
  Put(record, crc, 4);
  Put(record, kFull32, 4);
  Put(record, kFull32, 4);
  Put(record, name.size(), 2);
  Put(record, extra_bytes, 2);
}

void PutExtra64(std::string* record, std::initializer_list<uint64_t> numbers) {
  Put(record, kExtra64, 2);
  Put(record, 8 * numbers.size(), 2);
  for (uint64_t number : numbers) Put(record, number, 8);
}

std::string LocalRecord(const std::string& name, uint32_t crc, uint64_t size_bytes) {
  std::string record;
  Put(&record, kLocal, 4);
  PutCommon(&record, name, crc, 20);
  record += name;
  PutExtra64(&record, {size_bytes, size_bytes});
  return record;
}

std::string CentralRecord(const std::string& name, uint32_t crc, uint64_t size_bytes, uint64_t offset) {
  std::string record;
  Put(&record, kCentral, 4);
  Put(&record, kMadeByUnix | kVersion64, 2);
  PutCommon(&record, name, crc, 28);
  Put(&record, 0, 2);  // length of a comment
  Put(&record, 0, 2);  // number of a disk
  Put(&record, 0, 2);
  Put(&record, kPlainFile, 4);
  Put(&record, kFull32, 4);
  record += name;
  PutExtra64(&record, {size_bytes, size_bytes, offset});
  return record;
}

std::string EndRecords(uint64_t count, uint64_t directory_bytes, uint64_t offset) {
  std::string records;
  Put(&records, kEnd64, 4);
  Put(&records, kEnd64Bytes - 12, 8);  // what is left of it
  Put(&records, kMadeByUnix | kVersion64, 2);
  Put(&records, kVersion64, 2);
  Put(&records, 0, 8);  // numbers of disks
  for (uint64_t number : {count, count, directory_bytes, offset}) Put(&records, number, 8);
  Put(&records, kLocator64, 4);
  Put(&records, 0, 4);
  Put(&records, offset + directory_bytes, 8);
  Put(&records, 1, 4);  // disks
  Put(&records, kEnd, 4);
  Put(&records, 0, 4);
  Put(&records, kFull16, 2);
  Put(&records, kFull16, 2);
  Put(&records, kFull32, 4);
  Put(&records, kFull32, 4);
  Put(&records, 0, 2);
  return records;
}

}  // namespace

std::vector<ZipEntry> ParseZip(const std::string& path, std::string_view content) {
  const Reader reader(path, content);
  const Directory directory = ReadDirectory(reader);
  reader.Part(directory.offset, directory.size_bytes);
  std::vector<ZipEntry> entries;
  uint64_t at = directory.offset, total_bytes = 0;
  for (uint64_t i = 0; i < directory.count; ++i) {
    entries.push_back(ReadEntry(reader, &at));
    total_bytes += entries.back().content.size();
    if (total_bytes > content.size()) reader.Refuse("it is damaged: its arrays overlap");
  }
  return entries;
}

// All numbers that may be large stand in records of ZIP64: one form for every size.
std::vector<std::string> EncodeZip(std::vector<std::pair<std::string, std::string>> contents) {
  std::vector<std::string> parts;
  std::string directory;
  uint64_t offset = 0;
  for (auto& [name, content] : contents) {
    const uint32_t crc = Crc32(content);
    const uint64_t size_bytes = content.size();
    directory += CentralRecord(name, crc, size_bytes, offset);
    parts.push_back(LocalRecord(name, crc, size_bytes));
    offset += parts.back().size() + size_bytes;
    parts.push_back(std::move(content));
  }
  const std::string end = EndRecords(contents.size(), directory.size(), offset);
  parts.push_back(directory + end);
  return parts;
}

}  // namespace hybridc
