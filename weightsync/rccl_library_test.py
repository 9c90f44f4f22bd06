"""Our declarations against NCCL's own header, and its real library without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from weightsync import _core, errors
from weightsync.nccl_wheel import nccl_folder

VERSION = 22105
"""2.21.5, as nccl.lock has it."""

ABI = """
#include <cstddef>
#include <type_traits>
#include <nccl.h>
#include "weightsync/core/rccl_api.h"

namespace ours = swe_rl::weightsync;

static_assert(sizeof(ncclUniqueId) == sizeof(ours::RcclUniqueId));
static_assert(NCCL_UNIQUE_ID_BYTES == ours::kUniqueIdBytes);
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));
static_assert(ncclSuccess == ours::kRcclSuccess && ncclInProgress == ours::kRcclInProgress);
static_assert(ncclUint8 == ours::kRcclUint8);
static_assert(offsetof(ncclConfig_t, size) == offsetof(ours::RcclConfig, size));
static_assert(offsetof(ncclConfig_t, magic) == offsetof(ours::RcclConfig, magic));
static_assert(offsetof(ncclConfig_t, version) == offsetof(ours::RcclConfig, version));
static_assert(offsetof(ncclConfig_t, blocking) == offsetof(ours::RcclConfig, blocking));
static_assert(sizeof(ours::RcclConfig) < sizeof(ncclConfig_t));

template <typename Theirs, typename Ours>
constexpr bool kSame = std::is_same_v<Theirs, Ours>;
// Enumerations stand for int and handles for pointers, as they are passed.
static_assert(kSame<decltype(&ncclGetVersion), ncclResult_t (*)(int*)>);
static_assert(kSame<decltype(&ncclGetUniqueId), ncclResult_t (*)(ncclUniqueId*)>);
static_assert(kSame<decltype(&ncclCommInitRankConfig),
                    ncclResult_t (*)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*)>);
static_assert(kSame<decltype(&ncclCommGetAsyncError), ncclResult_t (*)(ncclComm_t, ncclResult_t*)>);
static_assert(kSame<decltype(&ncclCommDestroy), ncclResult_t (*)(ncclComm_t)>);
static_assert(kSame<decltype(&ncclCommAbort), ncclResult_t (*)(ncclComm_t)>);
static_assert(kSame<decltype(&ncclBroadcast),
                    ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
                                     cudaStream_t)>);
static_assert(kSame<decltype(&ncclAllGather),
                    ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t, ncclComm_t,
                                     cudaStream_t)>);
static_assert(kSame<decltype(&ncclGetErrorString), const char* (*)(ncclResult_t)>);

const ncclConfig_t kDefault = NCCL_CONFIG_INITIALIZER;
bool SameMagic() { return kDefault.magic == ours::RcclConfig().magic; }
int main() { return SameMagic() ? 0 : 1; }
"""

CUDA = "typedef struct CUstream_st* cudaStream_t;\n"
"""All that nccl.h wants of cuda_runtime.h."""


def test_declarations_are_those_of_the_vendors_header(tmp_path: Path) -> None:
    (tmp_path / "abi.cc").write_text(ABI)
    for name in ("cuda_runtime.h", "cuda_fp16.h"):
        (tmp_path / name).write_text("#pragma once\n" + CUDA if "runtime" in name else "")
    include = [f"-I{folder}" for folder in (nccl_folder() / "include", tmp_path, Path.cwd())]
    program = tmp_path / "abi"
    command = ["g++", "-std=c++20", *include, str(tmp_path / "abi.cc"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([program], timeout=30, check=False).returncode == 0


def test_the_real_library_opens_and_makes_ids() -> None:
    api = _core.RcclApi(library=str(nccl_folder() / "lib" / "libnccl.so.2"), runtime="none")
    assert api.version == VERSION
    first, second = api.unique_id(), api.unique_id()
    assert len(first) == len(second) == 128
    assert first != second


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.PeerLostError, match="libno_such_nccl"):
        _core.RcclApi(library="libno_such_nccl.so", runtime="none")


def test_a_group_without_a_device_runtime_is_refused() -> None:
    api = _core.RcclApi(library=str(nccl_folder() / "lib" / "libnccl.so.2"), runtime="none")
    with pytest.raises(errors.RingArgumentError, match="wants a runtime"):
        _core.RcclGroup(
            api,
            unique_id=api.unique_id(),
            rank=0,
            world=1,
            device=0,
            bucket_bytes=1024,
            num_buffers=2,
            with_checksums=False,
            timeout_s=1.0,
        )
