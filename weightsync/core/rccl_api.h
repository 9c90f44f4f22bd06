// The few entry points of RCCL or NCCL, and of HIP or CUDA, that a broadcast needs.
//
// Declared here and looked up at run time, so that nothing of a GPU is needed to build or to
// start: both pairs of libraries have the same C ABI for these. rccl_abi_test compares the
// declarations with NCCL's own header.
#ifndef WEIGHTSYNC_CORE_RCCL_API_H_
#define WEIGHTSYNC_CORE_RCCL_API_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "weightsync/core/status.h"

namespace swe_rl::weightsync {

inline constexpr size_t kUniqueIdBytes = 128;

// ncclUniqueId; passed by value.
struct RcclUniqueId {
  char internal[kUniqueIdBytes];
};

// ncclConfig_t as of version 2.14: later libraries take a shorter one by its size and version.
struct RcclConfig {
  size_t size = sizeof(RcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

using RcclComm = void*;   // ncclComm_t
using GpuStream = void*;  // hipStream_t, cudaStream_t
using GpuEvent = void*;   // hipEvent_t, cudaEvent_t

inline constexpr int kRcclSuccess = 0;
inline constexpr int kRcclInProgress = 7;
inline constexpr int kRcclUint8 = 1;
inline constexpr int kGpuSuccess = 0;
inline constexpr int kGpuNotReady = 600;   // hipErrorNotReady, cudaErrorNotReady
inline constexpr int kGpuCopyDefault = 4;  // direction by the pointers

struct RcclApi {
  // Opens `library`; empty: librccl, else libnccl, by their usual names. `runtime` likewise:
  // libamdhip64, else libcudart. "none" opens no runtime: versions and ids only.
  // kUnavailable names what could not be opened or found.
  static Status Load(const std::string& library, const std::string& runtime,
                     std::unique_ptr<RcclApi>* api);

  Status Check(int code, const std::string& what) const;     // of RCCL
  Status CheckGpu(int code, const std::string& what) const;  // of the runtime

  int (*GetVersion)(int*);
  int (*GetUniqueId)(RcclUniqueId*);
  int (*CommInitRankConfig)(RcclComm*, int world, RcclUniqueId, int rank, RcclConfig*);
  int (*CommGetAsyncError)(RcclComm, int*);
  int (*CommDestroy)(RcclComm);
  int (*CommAbort)(RcclComm);
  int (*Broadcast)(const void*, void*, size_t count, int dtype, int root, RcclComm, GpuStream);
  int (*AllGather)(const void*, void*, size_t count, int dtype, RcclComm, GpuStream);
  const char* (*GetErrorString)(int);

  bool has_runtime = false;
  int (*SetDevice)(int);
  int (*Malloc)(void**, size_t);
  int (*Free)(void*);
  int (*HostMalloc)(void**, size_t, unsigned int flags);
  int (*HostFree)(void*);
  int (*MemcpyAsync)(void*, const void*, size_t, int kind, GpuStream);
  int (*StreamCreateWithFlags)(GpuStream*, unsigned int flags);
  int (*StreamDestroy)(GpuStream);
  int (*StreamWaitEvent)(GpuStream, GpuEvent, unsigned int flags);
  int (*EventCreate)(GpuEvent*);
  int (*EventDestroy)(GpuEvent);
  int (*EventRecord)(GpuEvent, GpuStream);
  int (*EventQuery)(GpuEvent);
};

}  // namespace swe_rl::weightsync

#endif  // WEIGHTSYNC_CORE_RCCL_API_H_
