// Keeps the head and the tail of a byte stream in bounded memory; counts what it drops.
#ifndef SWE_RL_SANDBOX_NATIVE_CAPPED_BUFFER_H_
#define SWE_RL_SANDBOX_NATIVE_CAPPED_BUFFER_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace swe_rl::sandbox {

class CappedBuffer {
 public:
  // Keeps at most `cap_bytes`: the first half from the head, the rest from the tail.
  explicit CappedBuffer(size_t cap_bytes)
      : head_cap_(cap_bytes / 2), tail_cap_(cap_bytes - cap_bytes / 2) {}

  void Append(std::string_view data);

  // Head followed by tail.
  std::string Kept() const;
  uint64_t dropped_bytes() const { return total_bytes_ - head_.size() - tail_.size(); }

 private:
  size_t head_cap_;
  size_t tail_cap_;
  uint64_t total_bytes_ = 0;
  std::string head_;
  std::string tail_;       // a ring once it has tail_cap_ bytes
  size_t tail_start_ = 0;  // index of the oldest byte of the ring
};

}  // namespace swe_rl::sandbox

#endif  // SWE_RL_SANDBOX_NATIVE_CAPPED_BUFFER_H_
