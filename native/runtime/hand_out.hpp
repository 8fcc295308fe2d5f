// A whole request by one caller: its end, and its experts one by one.
#pragma once

#include <chrono>
#include <functional>

#include "runtime/engine.hpp"

namespace zipmoe {

// Waits are cut into slices, between which the caller may look whether it is to go on.
inline constexpr std::chrono::milliseconds kWaitSlice{50};

// Is called now and then while experts are waited for; what it throws ends the request.
using WaitingObserver = std::function<void()>;

// Ends the open request, if there is one, whatever happens.
class EndOfRequest {
 public:
  explicit EndOfRequest(Engine& engine) : engine_(engine) {}
  ~EndOfRequest() { engine_.end_request(); }
  EndOfRequest(const EndOfRequest&) = delete;
  EndOfRequest& operator=(const EndOfRequest&) = delete;

 private:
  Engine& engine_;
};

// compute(position in the request) for every expert of the open request, as soon as it is resident.
template <typename Compute>
void for_each_expert(Engine& engine, const WaitingObserver& while_waiting, const Compute& compute) {
  for (;;) {
    const RequestStep step = engine.next_expert(kWaitSlice);
    if (step.kind == RequestStep::Kind::finished) return;
    if (step.kind == RequestStep::Kind::waiting) {
      while_waiting();
    } else {
      compute(step.position);
    }
  }
}

}  // namespace zipmoe
