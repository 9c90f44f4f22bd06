// PID 1 of a sandbox: runs the broker's commands, reaps, kills.
#ifndef SWE_RL_SANDBOX_NATIVE_INIT_H_
#define SWE_RL_SANDBOX_NATIVE_INIT_H_

namespace swe_rl::sandbox {

// Serves requests on `control_fd` until the broker closes it. `proc_fd` is a writable /proc.
// Never returns: when it exits, the kernel kills everything in the pid namespace.
[[noreturn]] void RunInit(int control_fd, int proc_fd);

}  // namespace swe_rl::sandbox

#endif  // SWE_RL_SANDBOX_NATIVE_INIT_H_
