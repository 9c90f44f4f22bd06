// XXH64, the 64-bit checksum of every bucket (github.com/Cyan4973/xxHash, doc/xxhash_spec.md,
// seed 0). It finds torn, stale and misplaced data; it is no defence against an adversary.
#ifndef WEIGHTSYNC_CORE_CHECKSUM_H_
#define WEIGHTSYNC_CORE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace swe_rl::weightsync {

// Takes bytes piece by piece; the digest depends on their order, not on how they were cut.
class Checksum {
 public:
  void Update(const void* data, size_t size);
  uint64_t Digest() const;

 private:
  void Stripes(const unsigned char* data, size_t count);

  uint64_t lanes_[4] = {0x60EA27EEADC0B5D6, 0xC2B2AE3D27D4EB4F, 0, 0x61C8864E7A143579};
  unsigned char tail_[32];
  size_t tail_size_ = 0;
  uint64_t total_ = 0;
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_CHECKSUM_H_
