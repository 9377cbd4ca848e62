#include "program/json.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/string.h>

#include "refusal.h"

namespace hybridc {
namespace {

namespace ffi = tvm::ffi;

constexpr int kDeepest = 32;

// The parser calls itself for what is nested.
bool IsTooDeep(const std::string& content) {
  int depth = 0;
  bool is_text = false;
  for (size_t i = 0; i < content.size(); ++i) {
    const char c = content[i];
    if (is_text && c == '\\') {
      ++i;
    } else if (c == '"') {
      is_text = !is_text;
    } else if (!is_text && (c == '[' || c == '{')) {
      if (++depth > kDeepest) return true;
    } else if (!is_text && (c == ']' || c == '}')) {
      --depth;
    }
  }
  return false;
}

}  // namespace

Json::Json(std::string file, std::string place, ffi::Any value)
    : file_(std::move(file)), place_(std::move(place)), value_(std::move(value)) {}

Json Json::Parse(const std::string& file, const std::string& content) {
  ffi::String error;
  Json document(file, "", nullptr);
  if (IsTooDeep(content)) document.Refuse("it is nested too deeply");
  document.value_ = ffi::json::Parse(content, &error);
  if (!error.empty()) document.Refuse(error);
  return document;
}

Json Json::operator[](const char* name) const {
  const auto object = value_.as<ffi::json::Object>();
  if (!object.has_value()) Refuse("it is no object");
  const std::string place = place_.empty() ? name : place_ + "." + name;
  const auto found = object->find(ffi::String(name));
  if (found == object->end()) Json(file_, place, nullptr).Refuse("it is missing");
  return Json(file_, place, (*found).second);
}

std::vector<Json> Json::Each() const {
  const auto array = value_.as<ffi::json::Array>();
  if (!array.has_value()) Refuse("it is no array");
  std::vector<Json> elements;
  for (const ffi::Any& element : *array) {
    elements.push_back(Json(file_, place_ + "[" + std::to_string(elements.size()) + "]", element));
  }
  return elements;
}

bool Json::Has(const char* name) const {
  const auto object = value_.as<ffi::json::Object>();
  if (!object.has_value()) Refuse("it is no object");
  return object->find(ffi::String(name)) != object->end();
}

bool Json::IsNull() const { return value_ == nullptr; }

std::string Json::Text() const {
  const auto text = value_.as<ffi::String>();
  if (!text.has_value()) Refuse("it is no text");
  return *text;
}

int64_t Json::Whole(int64_t least, int64_t most) const {
  const std::optional<int64_t> number =
      value_.type_index() == ffi::TypeIndex::kTVMFFIInt ? value_.as<int64_t>() : std::nullopt;
  if (!number.has_value()) Refuse("it is no whole number");
  if (*number < least || *number > most) {
    Refuse("it is " + std::to_string(*number) + ", not from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return *number;
}

double Json::Number() const {
  const std::optional<double> number =
      value_.type_index() == ffi::TypeIndex::kTVMFFIInt || value_.type_index() == ffi::TypeIndex::kTVMFFIFloat
          ? value_.as<double>()
          : std::nullopt;
  if (!number.has_value()) Refuse("it is no number");
  return *number;
}

bool Json::Flag() const {
  if (value_.type_index() != ffi::TypeIndex::kTVMFFIBool) Refuse("it is neither true nor false");
  return value_.cast<bool>();
}

void Json::Refuse(const std::string& what) const {
  throw Refusal("HC303", "malformed: " + (place_.empty() ? "" : place_ + ": ") + what, file_, "make the bundle again");
}

}  // namespace hybridc
