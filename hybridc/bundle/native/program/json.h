// Values of a JSON document that anybody may have written: checked as they are read.
#pragma once
#include <tvm/ffi/any.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hybridc {

class Json {
 public:
  // The value of a document; `file` is for messages. Throws HC303.
  static Json Parse(const std::string& file, const std::string& content);

  // A member of an object.
  Json operator[](const char* name) const;

  // Elements of an array.
  std::vector<Json> Each() const;

  // Whether an object has this member.
  bool Has(const char* name) const;

  bool IsNull() const;
  std::string Text() const;

  // A whole number from `least` to `most`.
  int64_t Whole(int64_t least, int64_t most) const;

  double Number() const;

  // True or false.
  bool Flag() const;

  // A number of bytes or elements, and an offset: at most what an address space of x86-64 has.
  int64_t Size() const { return Whole(0, int64_t{1} << 48); }

  // What `read` makes of each element.
  template <typename Read>
  auto Each(Read read) const {
    std::vector<decltype(read(std::declval<const Json&>()))> result;
    for (const Json& element : Each()) result.push_back(read(element));
    return result;
  }

  // Throws HC303, for a value that is not what it should be.
  [[noreturn]] void Refuse(const std::string& what) const;

 private:
  Json(std::string file, std::string place, tvm::ffi::Any value);

  std::string file_, place_;
  tvm::ffi::Any value_;
};

}  // namespace hybridc
