// The last num_buffers buckets, read by several threads while they fill.
//
// Owner: TcpSender, whose buckets lie where the caller's tensors lie, or TcpReceiver, which has
// buffers for them. Their mutex and condition guard everything but the bytes.
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

#include "weightsync/core/checksum.h"
#include "weightsync/core/packer.h"
#include "weightsync/core/socket.h"

namespace swe_rl::weightsync {

// What goes before a bucket's bytes, on every data connection. Their checksum follows them, so that
// they are on their way while they are summed.
struct FrameHeader {
  uint64_t epoch;
  uint64_t sequence;
  uint64_t size;
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
    FrameHeader header = {};
    uint64_t filled = 0;        // bytes that may be read
    bool is_complete = false;   // all of them, and `checksum` is known
    uint64_t checksum = 0;      // as the sender says
    uint64_t own_checksum = 0;  // of what arrived
    // Where the bytes are, if not in a buffer, and what keeps them there.
    std::vector<Piece> pieces;
    std::shared_ptr<void> owner;
    bool is_being_summed = false;
  };

  // For buckets that lie in pieces; `with_checksums`: summed while they are read.
  void UsePieces(uint32_t num_buffers, bool with_checksums);
  // For buckets that arrive. kUnavailable when memory is short.
  Status Allocate(uint32_t num_buffers, uint64_t buffer_bytes);

  uint64_t num_buffers() const { return slots_.size(); }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  char* buffer(uint64_t sequence) const { return buffers_[sequence % buffers_.size()].get(); }
  Slot& slot(uint64_t sequence) { return slots_[sequence % slots_.size()]; }
  bool is_complete(uint64_t sequence) { return begun > sequence && slot(sequence).is_complete; }
  // True when no outlet still reads a bucket that lies where `sequence` is to lie.
  bool is_free_of_outlets(uint64_t sequence) const;
  // Adds a bucket that lies in pieces. With the mutex.
  void Begin(FrameHeader header, std::vector<Piece> pieces, std::shared_ptr<void> owner);

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

  // Sums the next bytes of a bucket that lies in pieces, without the mutex meanwhile.
  void SumMore(Slot* slot, std::unique_lock<std::mutex>* lock);
  // Adds bytes [offset, offset + size) of a bucket to `parts`, or as many as fit; returns how many.
  uint64_t AddParts(uint64_t sequence, uint64_t offset, uint64_t size, std::vector<iovec>* parts);

  bool with_checksums_ = false;
  Checksum sum_;  // of the bucket that is being summed
  std::vector<std::unique_ptr<char, Free>> buffers_;
  std::vector<Slot> slots_;
  uint64_t buffer_bytes_ = 0;
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_BUCKET_WINDOW_H_
