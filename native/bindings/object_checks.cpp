// Checks of Python objects that are made at every token: a native loop over what would be dozens of small steps in
// Python. They keep nothing.
#include <nanobind/nanobind.h>

#include "bindings/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zipmoe {
namespace {

PyObject* item(nb::handle tuple, Py_ssize_t position) { return PyTuple_GET_ITEM(tuple.ptr(), position); }

void require_tuple(nb::handle object, Py_ssize_t size) {
  if (!PyTuple_Check(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != size ||
      !(PyDict_Check(item(object, 0)) || PyType_Check(item(object, 0)))) {
    throw nb::type_error("expected tuples that begin with a dict or a class");
  }
}

// The dict itself, or that of a class, without its bases.
nb::object dict_of(PyObject* holder) {
  if (PyDict_Check(holder)) return nb::borrow(holder);
#if PY_VERSION_HEX >= 0x030C0000
  return nb::steal(PyType_GetDict(reinterpret_cast<PyTypeObject*>(holder)));
#else
  return nb::borrow(reinterpret_cast<PyTypeObject*>(holder)->tp_dict);
#endif
}

// What is there under a key; None where nothing is.
PyObject* look_up(PyObject* dict, PyObject* key) {
  PyObject* const found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return found == nullptr ? Py_None : found;
}

bool holds(const nb::tuple& entries) {
  for (const nb::handle entry : entries) {
    require_tuple(entry, 3);
    if (look_up(dict_of(item(entry, 0)).ptr(), item(entry, 1)) != item(entry, 2)) return false;
  }
  return true;
}

bool all_empty(const nb::tuple& dicts) {
  for (const nb::handle dict : dicts) {
    if (!PyDict_Check(dict.ptr())) throw nb::type_error("expected dicts");
    if (PyDict_Size(dict.ptr()) != 0) return false;
  }
  return true;
}

}  // namespace

void bind_object_checks(nb::module_& module) {
  module.def(
      "holds", &holds, "entries"_a,
      "Whether dict.get(key) is value for all entries (dict, key, value): the same objects, not equal ones. A class "
      "stands for its own dict.");
  module.def("all_empty", &all_empty, "dicts"_a, "Whether none of the dicts has an entry.");
}

}  // namespace zipmoe
