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

// kInvalidArgument unless `pieces` are in order, do not overlap and fit into `capacity` bytes;
// `*size` is where the last one ends.
Status CheckPieces(const std::vector<Piece>& pieces, uint64_t capacity, uint64_t* size);

struct Packed {
  uint64_t size = 0;      // bytes from the bucket's start to the end of its last piece
  uint64_t checksum = 0;  // of those bytes, gaps included; 0 when not asked for
};

// Copies `pieces` to `bucket`, which holds `capacity` bytes, and zeroes the gaps between them.
// Pieces must pass CheckPieces; else nothing is written. Large pieces bypass the cache: their next
// reader is another process.
Status Pack(const std::vector<Piece>& pieces, void* bucket, uint64_t capacity, bool with_checksum,
            Packed* packed);

// The reverse: copies from a bucket of `size` bytes to each piece's `data`. Pieces must pass
// CheckPieces; else nothing is written.
Status Unpack(const void* bucket, uint64_t size, const std::vector<Piece>& pieces);

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_PACKER_H_
