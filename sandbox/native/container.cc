#include "sandbox/native/container.h"

#include <fcntl.h>
#include <linux/mount.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace swe_rl::sandbox {
namespace {

bool Fail(const std::string& what, std::string* error) {
  *error = ErrnoMessage(what);
  return false;
}

bool MakeDirectories(const std::string& path) {
  for (size_t at = 1; at != std::string::npos;) {
    at = path.find('/', at);
    const std::string prefix = path.substr(0, at);
    if (mkdir(prefix.c_str(), 0755) != 0 && errno != EEXIST) return false;
    if (at != std::string::npos) ++at;
  }
  return true;
}

// Overlay options separate paths by `:` and `,`; a backslash keeps them literal.
std::string Escape(const std::string& path) {
  std::string escaped;
  for (char c : path) {
    if (c == ':' || c == ',' || c == '\\') escaped.push_back('\\');
    escaped.push_back(c);
  }
  return escaped;
}

std::string LowerOption(const std::vector<std::string>& lowers) {
  std::string option = "lowerdir=";
  for (size_t i = 0; i < lowers.size(); ++i) {
    if (i > 0) option.push_back(':');
    option.append(Escape(lowers[i]));
  }
  return option;
}

bool JoinCgroups(const std::vector<std::string>& procs_files, std::string* error) {
  for (const std::string& path : procs_files) {
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return Fail("open " + path, error);
    const bool joined = write(fd, "0", 1) == 1;
    if (!joined) Fail("join cgroup " + path, error);
    close(fd);
    if (!joined) return false;
  }
  return true;
}

bool BindReadOnly(const std::string& source, const std::string& target, std::string* error) {
  if (!MakeDirectories(target)) return Fail("mkdir " + target, error);
  if (mount(source.c_str(), target.c_str(), nullptr, MS_BIND, nullptr) != 0) {
    return Fail("bind " + source + " at " + target, error);
  }
  if (mount(nullptr, target.c_str(), nullptr,
            MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, nullptr) != 0) {
    return Fail("make read-only " + target, error);
  }
  return true;
}

bool BringLoopbackUp(std::string* error) {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Fail("socket", error);
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  const bool up = ioctl(fd, SIOCSIFFLAGS, &request) == 0;
  if (!up) Fail("bring lo up", error);
  close(fd);
  return up;
}

bool MountOverlay(const ContainerSpec& spec, const std::string& root, ContainerFds* fds,
                  std::string* error) {
  const std::string size = "mode=0755,size=" + std::to_string(spec.disk_bytes);
  if (mount("scratch", spec.stage.c_str(), "tmpfs", MS_NOSUID, size.c_str()) != 0) {
    return Fail("mount tmpfs at " + spec.stage, error);
  }
  const std::string upper = spec.stage + "/upper";
  const std::string work = spec.stage + "/work";
  for (const std::string& path : {upper, work, root}) {
    if (mkdir(path.c_str(), 0755) != 0) return Fail("mkdir " + path, error);
  }
  // Whole files and directories in the upper layer: it is read as the set of changes.
  const std::string options = LowerOption(spec.lowers) + ",upperdir=" + Escape(upper) +
                              ",workdir=" + Escape(work) +
                              ",redirect_dir=off,metacopy=off,index=off,xino=off";
  if (mount("overlay", root.c_str(), "overlay", MS_NOSUID, options.c_str()) != 0) {
    return Fail("mount overlay (" + options + ")", error);
  }
  fds->upper = open(upper.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return fds->upper >= 0 || Fail("open " + upper, error);
}

bool MountKernelTrees(const std::string& root, ContainerFds* fds, std::string* error) {
  const unsigned long hardened = MS_NOSUID | MS_NODEV | MS_NOEXEC;
  const std::string proc = root + "/proc";
  if (mount("proc", proc.c_str(), "proc", hardened, nullptr) != 0) {
    return Fail("mount " + proc, error);
  }
  // Root here is root of the host to /proc/sys: commands see /proc read-only. Init keeps a
  // detached writable view, which it needs to set a command's OOM score.
  fds->proc = static_cast<int>(
      syscall(SYS_open_tree, AT_FDCWD, proc.c_str(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC));
  if (fds->proc < 0) return Fail("open_tree " + proc, error);
  if (mount(nullptr, proc.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY | hardened, nullptr) !=
      0) {
    return Fail("make read-only " + proc, error);
  }
  const std::string pts = root + "/dev/pts";
  if (mount("devpts", pts.c_str(), "devpts", MS_NOSUID | MS_NOEXEC,
            "newinstance,ptmxmode=0666,mode=0620") != 0) {
    return Fail("mount " + pts, error);
  }
  return true;
}

}  // namespace

std::string ErrnoMessage(const std::string& what) { return what + ": " + std::strerror(errno); }

bool EnterContainer(const ContainerSpec& spec, ContainerFds* fds, std::string* error) {
  if (!JoinCgroups(spec.cgroup_procs, error)) return false;
  const std::string root = spec.stage + "/root";
  if (!MountOverlay(spec, root, fds, error)) return false;
  if (!spec.usr.empty() && !BindReadOnly(spec.usr, root + "/usr", error)) return false;
  for (const std::string& bind : spec.binds) {
    const size_t colon = bind.find(':');
    if (!BindReadOnly(bind.substr(0, colon), root + bind.substr(colon + 1), error)) return false;
  }
  if (!MountKernelTrees(root, fds, error)) return false;
  if (chdir(root.c_str()) != 0) return Fail("chdir " + root, error);
  if (syscall(SYS_pivot_root, ".", ".") != 0) return Fail("pivot_root", error);
  if (umount2(".", MNT_DETACH) != 0) return Fail("detach the host's root", error);
  if (chdir("/") != 0) return Fail("chdir /", error);
  if (!BringLoopbackUp(error)) return false;
  if (sethostname(spec.hostname.data(), spec.hostname.size()) != 0) {
    return Fail("sethostname", error);
  }
  fds->root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return fds->root >= 0 || Fail("open /", error);
}

bool MountSharedTree(const std::vector<std::string>& lowers, const std::string& target,
                     std::string* error) {
  if (mkdir(target.c_str(), 0755) != 0) return Fail("mkdir " + target, error);
  const std::string options = LowerOption(lowers);
  if (mount("overlay", target.c_str(), "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV,
            options.c_str()) != 0) {
    return Fail("mount overlay (" + options + ")", error);
  }
  return true;
}

}  // namespace swe_rl::sandbox
