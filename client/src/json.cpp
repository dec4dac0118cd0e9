#include "json.hpp"

#include <cmath>
#include <cstdio>
#include <locale>
#include <sstream>
#include <string_view>

namespace attention_autotuner::json {
namespace {

constexpr int kMaxDepth = 64;

char const* describe(Value::Kind kind) {
  constexpr char const* kNames[] = {"null", "a boolean", "a number", "a string", "an array", "an object"};
  return kNames[static_cast<int>(kind)];
}

// Digits, whatever the program's locale says of decimal points.
double to_double(std::string const& digits) {
  std::istringstream stream(digits);
  stream.imbue(std::locale::classic());
  double value = 0;
  stream >> value;
  return stream.fail() ? HUGE_VAL : value;
}

void append_utf8(std::string& out, uint32_t code) {
  int const more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr uint32_t kLead[] = {0, 0xC0, 0xE0, 0xF0};
  out.push_back(static_cast<char>(kLead[more] | code >> 6 * more));
  for (int i = more - 1; i >= 0; --i) out.push_back(static_cast<char>(0x80 | (code >> 6 * i & 0x3F)));
}

}  // namespace

void Value::require(Kind kind) const {
  if (kind_ != kind) throw ParseError(std::string("expected ") + describe(kind) + ", found " + describe(kind_));
}

bool Value::boolean() const { return require(Kind::kBoolean), boolean_; }
double Value::number() const { return require(Kind::kNumber), number_; }
std::string const& Value::string() const { return require(Kind::kString), string_; }
std::vector<Value> const& Value::array() const { return require(Kind::kArray), array_; }
Value::Members const& Value::members() const { return require(Kind::kObject), members_; }

int64_t Value::integer() const {
  require(Kind::kNumber);
  if (!integral_) throw ParseError("expected an integer of 64 bits, found another number");
  return integer_;
}

Value const* Value::find(std::string const& name) const {
  for (auto const& [key, value] : members()) {
    if (key == name) return &value;
  }
  return nullptr;
}

Value const& Value::at(std::string const& name) const {
  Value const* value = find(name);
  if (value == nullptr) throw ParseError("\"" + name + "\" is missing");
  return *value;
}

class Reader {
 public:
  explicit Reader(std::string const& text) : text_(text) {}

  Value document() {
    Value value = read(0);
    space();
    if (at_ != text_.size()) fail("something follows the value");
    return value;
  }

 private:
  [[noreturn]] void fail(std::string const& reason) const {
    throw ParseError("byte " + std::to_string(at_) + ": " + reason);
  }

  // The next character, '\0' at the end (a NUL in the text is no legal character anywhere).
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void space() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string::npos) ++at_;
  }

  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  void word(char const* letters) {
    for (char const* c = letters; *c != '\0'; ++c) {
      if (!take(*c)) fail(std::string("expected ") + letters);
    }
  }

  Value read(int depth) {
    if (depth > kMaxDepth) fail("nested too deeply");
    space();
    Value value;
    switch (peek()) {
      case '{':
        value.kind_ = Value::Kind::kObject;
        list('}', [&] { member(value, depth); });
        break;
      case '[':
        value.kind_ = Value::Kind::kArray;
        list(']', [&] { value.array_.push_back(read(depth + 1)); });
        break;
      case '"':
        value.kind_ = Value::Kind::kString;
        value.string_ = text();
        break;
      case 't':
      case 'f':
        value.kind_ = Value::Kind::kBoolean;
        value.boolean_ = peek() == 't';
        word(value.boolean_ ? "true" : "false");
        break;
      case 'n':
        word("null");
        break;
      default:
        value.kind_ = Value::Kind::kNumber;
        number(value);
    }
    return value;
  }

  // What stands between a pair of brackets, one item after the other.
  template <typename Item>
  void list(char close, Item item) {
    ++at_;
    space();
    if (take(close)) return;
    do {
      space();
      item();
      space();
    } while (take(','));
    if (!take(close)) fail(std::string("expected ',' or '") + close + "'");
  }

  void member(Value& value, int depth) {
    if (peek() != '"') fail("expected a name in quotes");
    std::string name = text();
    if (value.find(name) != nullptr) fail("\"" + name + "\" is there twice");
    space();
    if (!take(':')) fail("expected ':'");
    Value read_value = read(depth + 1);
    value.members_.emplace_back(std::move(name), std::move(read_value));
  }

  void digits(std::string& out) {
    if (peek() < '0' || peek() > '9') fail("expected a value");
    while (peek() >= '0' && peek() <= '9') out.push_back(text_[at_++]);
  }

  void number(Value& value) {
    std::string digits_read;
    if (take('-')) digits_read = "-";
    bool const zero = peek() == '0';
    size_t const first = digits_read.size();
    digits(digits_read);
    if (zero && digits_read.size() > first + 1) fail("a number begins with 0");
    bool integral = true;
    if (take('.')) {
      integral = false;
      digits_read.push_back('.');
      digits(digits_read);
    }
    if (peek() == 'e' || peek() == 'E') {
      integral = false;
      digits_read.push_back(text_[at_++]);
      if (peek() == '+' || peek() == '-') digits_read.push_back(text_[at_++]);
      digits(digits_read);
    }
    value.number_ = to_double(digits_read);
    if (!std::isfinite(value.number_)) fail("a number is out of range");
    if (integral && digits_read.size() <= 18) {  // more digits than any size of a problem has
      value.integral_ = true;
      value.integer_ = std::stoll(digits_read);
    }
  }

  std::string text() {
    ++at_;
    std::string out;
    while (!take('"')) {
      if (at_ >= text_.size()) fail("a string does not end");
      auto const c = static_cast<unsigned char>(text_[at_]);
      if (c < 0x20) fail("a control character in a string");
      if (c == '\\') {
        escape(out);
      } else if (c < 0x80) {
        out.push_back(text_[at_++]);
      } else {
        sequence(out, c);
      }
    }
    return out;
  }

  // One character of several bytes, no longer than needed, no surrogate, within Unicode.
  void sequence(std::string& out, unsigned char lead) {
    int const more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || at_ + more >= text_.size()) fail("invalid UTF-8");
    uint32_t code = lead & (0x3F >> more);
    for (int i = 1; i <= more; ++i) {
      auto const next = static_cast<unsigned char>(text_[at_ + i]);
      if ((next & 0xC0) != 0x80) fail("invalid UTF-8");
      code = code << 6 | (next & 0x3F);
    }
    bool const surrogate = code >= 0xD800 && code < 0xE000;
    if (surrogate || code > 0x10FFFF || (more == 2 && code < 0x800) || (more == 3 && code < 0x10000)) {
      fail("invalid UTF-8");
    }
    out.append(text_, at_, more + 1);
    at_ += more + 1;
  }

  uint32_t hex4() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      size_t const digit = std::string_view("0123456789abcdef0123456789ABCDEF").find(peek());
      if (at_ >= text_.size() || digit == std::string::npos) fail("expected four hexadecimal digits");
      code = code << 4 | static_cast<uint32_t>(digit & 15);
      ++at_;
    }
    return code;
  }

  void escape(std::string& out) {
    ++at_;
    char const kind = peek();
    if (kind == 'u') {
      ++at_;
      uint32_t code = hex4();
      if (code >= 0xD800 && code < 0xDC00) {
        if (!take('\\') || !take('u')) fail("half of a surrogate pair");
        uint32_t const low = hex4();
        if (low < 0xDC00 || low >= 0xE000) fail("half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      } else if (code >= 0xDC00 && code < 0xE000) {
        fail("half of a surrogate pair");
      }
      return append_utf8(out, code);
    }
    size_t const which = std::string_view("\"\\/bfnrt").find(kind);
    if (kind == '\0' || which == std::string::npos) fail("an unknown escape");
    out.push_back("\"\\/\b\f\n\r\t"[which]);
    ++at_;
  }

  std::string const& text_;
  size_t at_ = 0;
};

Value parse(std::string const& text) { return Reader(text).document(); }

std::string quoted(std::string const& text) {
  std::string out = "\"";
  for (char const c : text) {
    char code[8];
    if (c == '"' || c == '\\') {
      out += std::string("\\") + c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace attention_autotuner::json
