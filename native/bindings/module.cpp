// The Python extension zipmoe._native: one bind_* function per part of the core.
#include "bindings/module.hpp"

NB_MODULE(_native, module) {
  module.doc() = "Native core of ZipMoE: codecs, computing on packed weights, direct reads, expert cache, scheduler";
  zipmoe::bind_codecs(module);
  zipmoe::bind_compute(module);
  zipmoe::bind_engine(module);
  zipmoe::bind_steps(module);
  zipmoe::bind_layers(module);
  zipmoe::bind_prompts(module);
  zipmoe::bind_object_checks(module);
  zipmoe::bind_cache(module);
  zipmoe::bind_profile(module);
  zipmoe::bind_schedule(module);
}
