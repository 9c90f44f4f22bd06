// What a sender knows of each of its receivers, whatever carries the bytes.
#ifndef WEIGHTSYNC_CORE_RECEIVER_STATE_H_
#define WEIGHTSYNC_CORE_RECEIVER_STATE_H_

#include <cstdint>

namespace swe_rl::weightsync {

inline constexpr uint32_t kMaxReceivers = 64;
inline constexpr uint32_t kMaxBuffers = 8;

enum class ReceiverState : uint32_t {
  kAbsent,    // not attached yet
  kAttached,  // reading
  kFailed,    // gave up, or was given up; its error says why
  kVerified,  // received everything and found it complete
};

// A bucket in place; valid until Release.
struct Bucket {
  uint64_t sequence;
  const char* data;
  uint64_t size;
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_RECEIVER_STATE_H_
