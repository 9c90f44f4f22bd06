// Builds a sandbox's view of the world from inside its fresh namespaces.
#ifndef SWE_RL_SANDBOX_NATIVE_CONTAINER_H_
#define SWE_RL_SANDBOX_NATIVE_CONTAINER_H_

#include <string>
#include <vector>

namespace swe_rl::sandbox {

struct ContainerSpec {
  std::string stage;                // empty directory of the host to mount scratch space on
  std::vector<std::string> lowers;  // image layers, topmost first
  std::string usr;                  // read-only tree bound at /usr; empty: /usr is in `lowers`
  std::vector<std::string> binds;   // `source:target`, read-only directories of the host
  std::vector<std::string> cgroup_procs;  // files that place a process in its cgroups
  std::string hostname;
  long long disk_bytes = 0;
};

// Descriptors that outlive the construction, for the broker and for init.
struct ContainerFds {
  int root = -1;   // directory: the sandbox's /
  int upper = -1;  // directory: the overlay's upper layer
  int proc = -1;   // writable view of /proc, which commands see read-only
};

// Must run as pid 1 of new pid, mount, net, ipc and uts namespaces. Joins the cgroups, mounts
// a private tmpfs for the overlay's upper layer (so it vanishes with the namespace), pivots
// into the overlay and brings `lo` up. False with `*error` set on failure.
bool EnterContainer(const ContainerSpec& spec, ContainerFds* fds, std::string* error);

// Mounts a read-only overlay of `lowers` (topmost first, at least two) at `target`, created
// when missing. False with `*error` set on failure.
bool MountSharedTree(const std::vector<std::string>& lowers, const std::string& target,
                     std::string* error);

// `what: strerror(errno)`.
std::string ErrnoMessage(const std::string& what);

}  // namespace swe_rl::sandbox

#endif  // SWE_RL_SANDBOX_NATIVE_CONTAINER_H_
