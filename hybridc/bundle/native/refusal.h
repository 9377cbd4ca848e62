// An error that a user can meet, as docs/errors.md lists them: a code, what happened, where, and what to do.
#pragma once
#include <exception>
#include <string>

namespace hybridc {

class Refusal : public std::exception {
 public:
  // `code` is such as "HC304".
  Refusal(const char* code, const std::string& what, const std::string& where = "", const std::string& remedy = "")
      : number_(std::stoi(code + 2)), text_(std::string("error[") + code + "]: " + what) {
    if (!where.empty()) text_ += "\n  --> " + where;
    if (!remedy.empty()) text_ += "\n  = help: " + remedy;
  }

  int number() const { return number_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  int number_;
  std::string text_;
};

inline std::string Quoted(const std::string& name) { return "'" + name + "'"; }

}  // namespace hybridc
