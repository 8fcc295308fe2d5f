// An engine that is usable only in the process that opened it.
#pragma once
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "runtime/engine.hpp"

namespace zipmoe {

// The threads of an engine do not exist in a forked child, so there nothing may be waited for: the child's copy is
// abandoned, and every call refused.
class ProcessBoundEngine {
 public:
  ProcessBoundEngine(const RecordTable& table, EngineOptions options)
      : engine_(std::make_unique<Engine>(table, std::move(options))), process_(::getpid()) {}
  ~ProcessBoundEngine() {
    if (::getpid() != process_) static_cast<void>(engine_.release());
  }
  ProcessBoundEngine(const ProcessBoundEngine&) = delete;
  ProcessBoundEngine& operator=(const ProcessBoundEngine&) = delete;

  Engine& get() const {
    if (::getpid() != process_) throw std::logic_error("the engine belongs to the process that opened it");
    return *engine_;
  }

 private:
  std::unique_ptr<Engine> engine_;
  pid_t process_;
};

}  // namespace zipmoe
