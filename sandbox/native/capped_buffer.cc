#include "sandbox/native/capped_buffer.h"

#include <algorithm>
#include <cstring>

namespace swe_rl::sandbox {

void CappedBuffer::Append(std::string_view data) {
  total_bytes_ += data.size();
  if (head_.size() < head_cap_) {
    const size_t count = std::min(head_cap_ - head_.size(), data.size());
    head_.append(data.substr(0, count));
    data.remove_prefix(count);
  }
  if (data.size() > tail_cap_) data.remove_prefix(data.size() - tail_cap_);
  if (tail_.size() < tail_cap_) {
    const size_t count = std::min(tail_cap_ - tail_.size(), data.size());
    tail_.append(data.substr(0, count));
    data.remove_prefix(count);
  }
  while (!data.empty()) {
    const size_t count = std::min(tail_cap_ - tail_start_, data.size());
    std::memcpy(tail_.data() + tail_start_, data.data(), count);
    tail_start_ = (tail_start_ + count) % tail_cap_;
    data.remove_prefix(count);
  }
}

std::string CappedBuffer::Kept() const {
  std::string kept = head_;
  kept.append(tail_, tail_start_, std::string::npos);
  kept.append(tail_, 0, tail_start_);
  return kept;
}

}  // namespace swe_rl::sandbox
