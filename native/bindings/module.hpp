#pragma once
#include <nanobind/nanobind.h>

namespace zipmoe {

// Throws what a signal's handler has raised (Ctrl-C), with the GIL or without.
inline void check_signals() {
  const nanobind::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

void bind_codecs(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
void bind_steps(nanobind::module_& module);
void bind_layers(nanobind::module_& module);
void bind_prompts(nanobind::module_& module);
void bind_object_checks(nanobind::module_& module);
void bind_compute(nanobind::module_& module);
void bind_cache(nanobind::module_& module);
void bind_profile(nanobind::module_& module);
void bind_schedule(nanobind::module_& module);

}  // namespace zipmoe
