// Copies the tensors of one bucket to their places in it.
#ifndef WEIGHTSYNC_CORE_PACKER_H_
#define WEIGHTSYNC_CORE_PACKER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "weightsync/core/status.h"

namespace swe_rl::weightsync {

// A run of bytes and where it goes, in bytes from the bucket's start.
struct Piece {
  const void* data;
  uint64_t size;
  uint64_t offset;
};

struct Packed {
  uint64_t size = 0;      // bytes from the bucket's start to the end of its last piece
  uint64_t checksum = 0;  // of those bytes, gaps included; 0 when not asked for
};

// Copies `pieces` to `bucket`, which holds `capacity` bytes, and zeroes the gaps between them.
// Pieces must be in order, must not overlap and must fit; else kInvalidArgument and nothing is
// written. Large pieces bypass the cache: their next reader is another process.
Status Pack(const std::vector<Piece>& pieces, void* bucket, uint64_t capacity, bool with_checksum,
            Packed* packed);

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_PACKER_H_
