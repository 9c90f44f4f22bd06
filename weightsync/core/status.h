// What every call of the core returns; the bindings turn it into an exception.
#ifndef WEIGHTSYNC_CORE_STATUS_H_
#define WEIGHTSYNC_CORE_STATUS_H_

#include <string>
#include <utility>

namespace swe_rl::weightsync {

enum class StatusCode {
  kOk,
  kInvalidArgument,   // the caller's mistake
  kDeadlineExceeded,  // the other side did not act in time
  kUnavailable,       // the other side is gone, or the segment is
  kFenced,            // the segment belongs to another epoch
  kDataLoss,          // what arrived is not what was sent
};

// A code and, unless ok, a message for people.
struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }
};

inline Status Error(StatusCode code, std::string message) { return {code, std::move(message)}; }

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_STATUS_H_
