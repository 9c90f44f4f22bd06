// What a command inside the sandbox may not do: capabilities and system calls taken away.
#ifndef SWE_RL_SANDBOX_NATIVE_CONFINE_H_
#define SWE_RL_SANDBOX_NATIVE_CONFINE_H_

namespace swe_rl::sandbox {

// Drops all capabilities but those a container's root needs for its own files and processes,
// forbids gaining more, and filters the system calls that reach past a mount, pid or user
// namespace. Called in the child just before it changes user and executes; init keeps its
// capabilities, so that no command can trace it. False on error (errno set).
bool ConfineCommand();

}  // namespace swe_rl::sandbox

#endif  // SWE_RL_SANDBOX_NATIVE_CONFINE_H_
