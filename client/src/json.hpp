// A strict reader of JSON (RFC 8259) for the index of a bundle, and what the programs here write strings by: private to
// them, so that others who link this library inherit no dependency.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace attention_autotuner::json {

// What is wrong with a text, or with what is asked of a value; says where.
class ParseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A value of any kind. Asking for another kind than it has throws a ParseError that names both.
class Value {
 public:
  enum class Kind { kNull, kBoolean, kNumber, kString, kArray, kObject };
  using Members = std::vector<std::pair<std::string, Value>>;  // in the order of the text

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::kNull; }
  bool boolean() const;
  double number() const;
  int64_t integer() const;  // a number without fraction or exponent that fits
  std::string const& string() const;
  std::vector<Value> const& array() const;
  Members const& members() const;

  // A member of an object; at() throws where it is missing, find() then gives null.
  Value const& at(std::string const& name) const;
  Value const* find(std::string const& name) const;

 private:
  friend class Reader;
  void require(Kind kind) const;

  Kind kind_ = Kind::kNull;
  bool boolean_ = false;
  bool integral_ = false;
  int64_t integer_ = 0;
  double number_ = 0;
  std::string string_;
  std::vector<Value> array_;
  Members members_;
};

// The value of a whole text. Names that an object repeats, control characters in strings, invalid UTF-8, numbers beyond
// a double, nesting deeper than 64 and anything after the value are errors.
Value parse(std::string const& text);

// A string in JSON: between quotes, with what JSON escapes.
std::string quoted(std::string const& text);

}  // namespace attention_autotuner::json
