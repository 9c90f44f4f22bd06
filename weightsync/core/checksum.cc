#include "weightsync/core/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace swe_rl::weightsync {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;
constexpr size_t kStripe = 32;

static_assert(std::endian::native == std::endian::little, "reads words in place");

uint64_t Read64(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

uint32_t Read32(const unsigned char* at) {
  uint32_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

uint64_t Round(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

}  // namespace

void Checksum::Stripes(const unsigned char* data, size_t count) {
  uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
  for (size_t i = 0; i < count; ++i, data += kStripe) {
    a = Round(a, Read64(data));
    b = Round(b, Read64(data + 8));
    c = Round(c, Read64(data + 16));
    d = Round(d, Read64(data + 24));
  }
  lanes_[0] = a, lanes_[1] = b, lanes_[2] = c, lanes_[3] = d;
}

void Checksum::Update(const void* data, size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  total_ += size;
  if (tail_size_ > 0) {
    const size_t taken = std::min(size, kStripe - tail_size_);
    std::memcpy(tail_ + tail_size_, at, taken);
    tail_size_ += taken;
    at += taken;
    size -= taken;
    if (tail_size_ < kStripe) return;
    Stripes(tail_, 1);
    tail_size_ = 0;
  }
  Stripes(at, size / kStripe);
  tail_size_ = size % kStripe;
  if (tail_size_ > 0) std::memcpy(tail_, at + size - tail_size_, tail_size_);
}

uint64_t Checksum::Digest() const {
  uint64_t hash;
  if (total_ >= kStripe) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
           std::rotl(lanes_[3], 18);
    for (uint64_t lane : lanes_) hash = (hash ^ Round(0, lane)) * kPrime1 + kPrime4;
  } else {
    hash = kPrime5;
  }
  hash += total_;
  size_t i = 0;
  for (; i + 8 <= tail_size_; i += 8) {
    hash = std::rotl(hash ^ Round(0, Read64(tail_ + i)), 27) * kPrime1 + kPrime4;
  }
  if (i + 4 <= tail_size_) {
    hash = std::rotl(hash ^ (Read32(tail_ + i) * kPrime1), 23) * kPrime2 + kPrime3;
    i += 4;
  }
  for (; i < tail_size_; ++i) hash = std::rotl(hash ^ (tail_[i] * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace swe_rl::weightsync
