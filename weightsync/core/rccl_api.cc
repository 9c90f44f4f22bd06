#include "weightsync/core/rccl_api.h"

#include <dlfcn.h>

#include <initializer_list>

namespace swe_rl::weightsync {
namespace {

// Libraries stay open: unloading one that has started threads is not safe.
Status Open(const std::string& given, std::initializer_list<const char*> usual, void** handle,
            std::string* name) {
  std::string tried;
  const auto open = [&](const std::string& path) {
    *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (*handle != nullptr) {
      *name = path;
      return true;
    }
    tried += std::string(tried.empty() ? "" : "; ") + dlerror();
    return false;
  };
  if (!given.empty()) {
    if (open(given)) return {};
  } else {
    for (const char* path : usual) {
      if (open(path)) return {};
    }
  }
  return Error(StatusCode::kUnavailable, "cannot open the library: " + tried);
}

template <typename Function>
Status Find(void* handle, const std::string& library, const std::string& symbol,
            Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, symbol.c_str()));
  if (*function != nullptr) return {};
  return Error(StatusCode::kUnavailable, library + " has no " + symbol);
}

}  // namespace

Status RcclApi::Load(const std::string& library, const std::string& runtime,
                     std::unique_ptr<RcclApi>* api) {
  auto made = std::make_unique<RcclApi>();
  void* handle = nullptr;
  std::string name;
  Status status =
      Open(library, {"librccl.so.1", "librccl.so", "libnccl.so.2", "libnccl.so"}, &handle, &name);
  if (!status.ok()) return status;
  const auto find = [&](const std::string& symbol, auto* function) {
    if (status.ok()) status = Find(handle, name, symbol, function);
  };
  find("ncclGetVersion", &made->GetVersion);
  find("ncclGetUniqueId", &made->GetUniqueId);
  find("ncclCommInitRankConfig", &made->CommInitRankConfig);
  find("ncclCommGetAsyncError", &made->CommGetAsyncError);
  find("ncclCommDestroy", &made->CommDestroy);
  find("ncclCommAbort", &made->CommAbort);
  find("ncclBroadcast", &made->Broadcast);
  find("ncclAllGather", &made->AllGather);
  find("ncclGetErrorString", &made->GetErrorString);
  if (!status.ok()) return status;
  if (runtime != "none") {
    status = Open(runtime,
                  {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "libcudart.so.13",
                   "libcudart.so.12", "libcudart.so"},
                  &handle, &name);
    if (!status.ok()) return status;
    const bool is_hip = dlsym(handle, "hipMalloc") != nullptr;
    const std::string prefix = is_hip ? "hip" : "cuda";
    find(prefix + "SetDevice", &made->SetDevice);
    find(prefix + "Malloc", &made->Malloc);
    find(prefix + "Free", &made->Free);
    find(is_hip ? "hipHostMalloc" : "cudaHostAlloc", &made->HostMalloc);
    find(is_hip ? "hipHostFree" : "cudaFreeHost", &made->HostFree);
    find(prefix + "MemcpyAsync", &made->MemcpyAsync);
    find(prefix + "StreamCreateWithFlags", &made->StreamCreateWithFlags);
    find(prefix + "StreamDestroy", &made->StreamDestroy);
    find(prefix + "StreamWaitEvent", &made->StreamWaitEvent);
    find(prefix + "EventCreate", &made->EventCreate);
    find(prefix + "EventDestroy", &made->EventDestroy);
    find(prefix + "EventRecord", &made->EventRecord);
    find(prefix + "EventQuery", &made->EventQuery);
    if (!status.ok()) return status;
    made->has_runtime = true;
  }
  *api = std::move(made);
  return {};
}

Status RcclApi::Check(int code, const std::string& what) const {
  if (code == kRcclSuccess || code == kRcclInProgress) return {};
  return Error(StatusCode::kUnavailable, what + ": " + GetErrorString(code));
}

Status RcclApi::CheckGpu(int code, const std::string& what) const {
  if (code == kGpuSuccess) return {};
  return Error(StatusCode::kUnavailable, what + ": error " + std::to_string(code));
}

}  // namespace swe_rl::weightsync
