// How buckets and times are named in errors, the same over every transport.
#ifndef WEIGHTSYNC_CORE_MESSAGES_H_
#define WEIGHTSYNC_CORE_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace swe_rl::weightsync {

inline std::string Named(uint64_t sequence, const std::string& label) {
  return "bucket " + std::to_string(sequence) + " (" + label + ")";
}

// At most `size` bytes of UTF-8 text, whole characters only.
inline std::string Shortened(const std::string& text, size_t size) {
  if (text.size() <= size) return text;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return text.substr(0, size);
}

// With one digit: "2.5 s".
inline std::string Seconds(double seconds) {
  const std::string text = std::to_string(seconds);
  return text.substr(0, text.find('.') + 2) + " s";
}

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_MESSAGES_H_
