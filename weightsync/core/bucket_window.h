// The last num_buffers buckets, filled by one thread and read by several while they fill.
//
// Owner: TcpSender or TcpReceiver, whose mutex and condition guard everything but the bytes.
// Invariant: bytes below `filled` of a slot do not change while a reader may be on it; the owner
// sees to that before it begins the bucket that takes the slot over.
#ifndef WEIGHTSYNC_CORE_BUCKET_WINDOW_H_
#define WEIGHTSYNC_CORE_BUCKET_WINDOW_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "weightsync/core/socket.h"

namespace swe_rl::weightsync {

// What goes before a bucket's bytes, on every data connection.
struct FrameHeader {
  uint64_t epoch;
  uint64_t sequence;
  uint64_t size;
  uint64_t checksum;
};

// Where one reader of the window has got to.
struct Outlet {
  uint32_t child;
  Socket* socket;
  uint64_t sequence;
  uint64_t offset;
};

class BucketWindow {
 public:
  struct Slot {
    FrameHeader header;
    uint64_t filled;
    uint64_t checksum;  // of what arrived, once it is complete and if sums are asked for
  };

  // kUnavailable when memory is short.
  Status Allocate(uint32_t num_buffers, uint64_t buffer_bytes);

  uint64_t num_buffers() const { return slots_.size(); }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  char* buffer(uint64_t sequence) const { return buffers_[sequence % buffers_.size()].get(); }
  Slot& slot(uint64_t sequence) { return slots_[sequence % slots_.size()]; }
  bool is_complete(uint64_t sequence) {
    return begun > sequence && slot(sequence).filled == slot(sequence).header.size;
  }
  // True when no outlet still reads a bucket that lies where `sequence` is to lie.
  bool is_free_of_outlets(uint64_t sequence) const;

  // Sends buckets from the outlet's place on until `ended` or the connection breaks. Call without
  // the mutex; `num_bytes` counts the payload.
  void Serve(Outlet* outlet, std::atomic<uint64_t>* num_bytes);
  // Cuts the connections of a child, or of all.
  void CutChild(uint32_t child);
  void CutAll();

  std::mutex mutex;
  std::condition_variable changed;
  uint64_t begun = 0;  // buckets whose header is known
  bool ended = false;  // no more will come, and readers should leave
  std::list<Outlet*> outlets;

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };

  std::vector<std::unique_ptr<char, Free>> buffers_;
  std::vector<Slot> slots_;
  uint64_t buffer_bytes_ = 0;
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_BUCKET_WINDOW_H_
