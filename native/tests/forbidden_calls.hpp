// Runs a test in a child process, in which system calls are refused, as containers do.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>

#include "tests/engine_test_support.hpp"

namespace zipmoe {

inline void forbid_call(uint32_t call, int error_number) {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error_number)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{.len = sizeof rules / sizeof rules[0], .filter = rules};
  CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

// The child's failed checks fail the test.
inline void run_in_child(const std::function<void()>& test) {
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    test();
    ::_exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

inline void run_with_forbidden_call(uint32_t call, int error_number, const std::function<void()>& test) {
  run_in_child([&] {
    forbid_call(call, error_number);
    test();
  });
}

}  // namespace zipmoe
