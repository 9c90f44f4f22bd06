#include "sandbox/native/confine.h"

#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace swe_rl::sandbox {
namespace {

// Root over the sandbox's own files and processes. Absent on purpose: MKNOD (host devices),
// NET_RAW, SYS_ADMIN, SYS_PTRACE, DAC_READ_SEARCH (open_by_handle_at).
constexpr uint64_t kKeptCapabilities =
    (1ull << CAP_CHOWN) | (1ull << CAP_DAC_OVERRIDE) | (1ull << CAP_FOWNER) | (1ull << CAP_FSETID) |
    (1ull << CAP_KILL) | (1ull << CAP_SETGID) | (1ull << CAP_SETUID) | (1ull << CAP_SETPCAP) |
    (1ull << CAP_NET_BIND_SERVICE) | (1ull << CAP_SYS_CHROOT) | (1ull << CAP_SETFCAP);

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
#error "unsupported architecture"
#endif

constexpr uint32_t kNewNamespaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET |
                                    CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;

constexpr int kDenied[] = {
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_setns,
    SYS_open_tree,
    SYS_move_mount,
    SYS_fsopen,
    SYS_fsmount,
    SYS_add_key,
    SYS_keyctl,
    SYS_request_key,
    SYS_bpf,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_kexec_load,
    SYS_open_by_handle_at,
    SYS_reboot,
    SYS_swapon,
    SYS_swapoff,
    SYS_io_uring_setup,
    SYS_unshare,
};

constexpr sock_filter Statement(uint16_t code, uint32_t k) { return {code, 0, 0, k}; }
constexpr sock_filter Jump(uint16_t code, uint32_t k, uint8_t yes, uint8_t no) {
  return {code, yes, no, k};
}

std::vector<sock_filter> BuildFilter() {
  const uint32_t load = BPF_LD | BPF_W | BPF_ABS;
  const uint32_t equal = BPF_JMP | BPF_JEQ | BPF_K;
  const auto fail = [](int error) {
    return Statement(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error));
  };
  std::vector<sock_filter> filter;
  filter.push_back(Statement(load, offsetof(seccomp_data, arch)));
  filter.push_back(Jump(equal, kArchitecture, 1, 0));
  filter.push_back(fail(ENOSYS));  // 32-bit calls have other numbers
  filter.push_back(Statement(load, offsetof(seccomp_data, nr)));
#if defined(__x86_64__)
  filter.push_back(Jump(BPF_JMP | BPF_JGE | BPF_K, 0x40000000u, 0, 1));  // x32
  filter.push_back(fail(ENOSYS));
#endif
  for (int number : kDenied) {
    filter.push_back(Jump(equal, static_cast<uint32_t>(number), 0, 1));
    filter.push_back(fail(EPERM));
  }
  // A filter cannot read clone3's struct; ENOSYS makes the C library fall back to clone.
  filter.push_back(Jump(equal, SYS_clone3, 0, 1));
  filter.push_back(fail(ENOSYS));
  filter.push_back(Jump(equal, SYS_clone, 0, 3));
  filter.push_back(Statement(load, offsetof(seccomp_data, args)));  // low word: little endian
  filter.push_back(Jump(BPF_JMP | BPF_JSET | BPF_K, kNewNamespaces, 0, 1));
  filter.push_back(fail(EPERM));
  filter.push_back(Statement(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  return filter;
}

}  // namespace

bool ConfineCommand() {
  for (int capability = 0; capability <= 63; ++capability) {
    if ((kKeptCapabilities >> capability & 1) != 0) continue;
    if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0) {
      if (errno == EINVAL) break;  // past the kernel's last capability
      return false;
    }
  }
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  for (int word = 0; word < 2; ++word) {
    const uint32_t kept = static_cast<uint32_t>(kKeptCapabilities >> (32 * word));
    data[word].effective = data[word].permitted = kept;
  }
  if (syscall(SYS_capset, &header, data) != 0) return false;
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return false;
  static const std::vector<sock_filter> filter = BuildFilter();
  const sock_fprog program{static_cast<unsigned short>(filter.size()),
                           const_cast<sock_filter*>(filter.data())};
  return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
}

}  // namespace swe_rl::sandbox
