// A row of expectations, checked in one call. `stepgraph.engine.backends.native.row` does the same checks in Python. Here the facts
// about tensors are read from the tensors themselves. One tuple of tuples holds all expectations and is kept alive;
// every pointer below is borrowed from it.

#include <Python.h>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <memory>
#include <vector>

namespace {

struct Slot {  // an attribute, or the item at a key
  PyObject* where;
  PyObject* key;
  PyObject* value;
};

struct Length {
  PyObject* container;
  Py_ssize_t length;
};

struct Class {
  PyObject* object;
  PyObject* type;
};

struct Layout {
  PyObject* tensor;
  PyTypeObject* type;
  const void* address;
  uint64_t keys;  // these show conjugation and negation
  at::ScalarType dtype;
  c10::DimVector shape;
  c10::DimVector stride;
};

struct Gradient {
  PyObject* parameter;
  const c10::TensorImpl* grad;  // null if there is none
  bool flag;
};

struct Row {
  std::vector<Slot> attributes;
  std::vector<Slot> items;
  std::vector<Length> lengths;
  std::vector<Class> classes;
  std::vector<Layout> layouts;
  std::vector<Gradient> gradients;
  std::vector<PyObject*> questions;
};

struct Wrong : std::exception {};  // a Python error is set

PyObject* checked(PyObject* object) {
  if (object == nullptr) {
    throw Wrong();
  }
  return object;
}

Py_ssize_t size_of(PyObject* tuple) {
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "a row is made of tuples");
    throw Wrong();
  }
  return PyTuple_GET_SIZE(tuple);
}

PyObject* part(PyObject* tuple, Py_ssize_t index) {
  size_of(tuple);
  return checked(PyTuple_GetItem(tuple, index));
}

const at::Tensor& tensor_of(PyObject* object) {
  if (!THPVariable_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "not a tensor");
    throw Wrong();
  }
  return THPVariable_Unpack(object);
}

c10::DimVector numbers_of(PyObject* tuple) {
  c10::DimVector numbers;
  for (Py_ssize_t i = 0; i < size_of(tuple); ++i) {
    numbers.push_back(PyLong_AsLongLong(part(tuple, i)));
  }
  if (PyErr_Occurred()) {
    throw Wrong();
  }
  return numbers;
}

Slot slot_of(PyObject* given) {
  return {part(given, 0), part(given, 1), part(given, 2)};
}

Length length_of(PyObject* given) {
  Length made{part(given, 0), PyLong_AsSsize_t(part(given, 1))};
  if (PyErr_Occurred()) {
    throw Wrong();
  }
  return made;
}

Class class_of(PyObject* given) {
  return {part(given, 0), part(given, 1)};
}

Layout layout_of(PyObject* given) {
  PyObject* tensor = part(given, 0);
  PyObject* dtype = part(given, 2);
  tensor_of(tensor);
  if (!THPDtype_Check(dtype)) {
    PyErr_SetString(PyExc_TypeError, "not a dtype");
    throw Wrong();
  }
  Layout made{
      tensor,
      Py_TYPE(tensor),
      PyLong_AsVoidPtr(part(given, 1)),
      PyLong_AsUnsignedLongLong(part(given, 5)),
      reinterpret_cast<THPDtype*>(dtype)->scalar_type,
      numbers_of(part(given, 3)),
      numbers_of(part(given, 4))};
  if (PyErr_Occurred()) {
    throw Wrong();
  }
  return made;
}

Gradient gradient_of(PyObject* given) {
  PyObject* parameter = part(given, 0);
  PyObject* grad = part(given, 1);
  tensor_of(parameter);
  return {parameter, grad == Py_None ? nullptr : tensor_of(grad).unsafeGetTensorImpl(), part(given, 2) == Py_True};
}

PyObject* question_of(PyObject* given) {
  return given;
}

template <typename Kind>
std::vector<Kind> all_of(PyObject* given, Kind (*make)(PyObject*)) {
  std::vector<Kind> made;
  for (Py_ssize_t i = 0; i < size_of(given); ++i) {
    made.push_back(make(part(given, i)));
  }
  return made;
}

bool is_the_same(PyObject* found, PyObject* value) {  // takes over the reference to `found`
  Py_DECREF(checked(found));
  return found == value;
}

bool lies_there(const Slot& slot) {
  if (!PyDict_Check(slot.where)) {
    return is_the_same(PyObject_GetItem(slot.where, slot.key), slot.value);
  }
  PyObject* found = PyDict_GetItemWithError(slot.where, slot.key);
  if (found == nullptr && PyErr_Occurred()) {
    throw Wrong();
  }
  return found == slot.value;
}

bool is_laid_out(const Layout& layout) {
  if (Py_TYPE(layout.tensor) != layout.type) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(layout.tensor);
  return tensor.key_set().raw_repr() == layout.keys && tensor.scalar_type() == layout.dtype &&
      tensor.sizes() == c10::IntArrayRef(layout.shape) &&
      tensor.strides() == c10::IntArrayRef(layout.stride) && tensor.mutable_data_ptr() == layout.address;
}

bool has_its_gradient(const Gradient& expected) {
  const at::Tensor& parameter = THPVariable_Unpack(expected.parameter);
  if (parameter.requires_grad() != expected.flag) {
    return false;
  }
  const at::Tensor& grad = parameter.unsafeGetTensorImpl()->grad();
  return (grad.defined() ? grad.unsafeGetTensorImpl() : nullptr) == expected.grad;
}

bool is_answered_yes(PyObject* question) {
  PyObject* answer = checked(PyObject_CallNoArgs(question));
  const int truth = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  if (truth < 0) {
    throw Wrong();
  }
  return truth == 1;
}

template <typename Kind, typename Test>
bool all(const std::vector<Kind>& expected, Test test) {
  for (const Kind& one : expected) {
    if (!test(one)) {
      return false;
    }
  }
  return true;
}

bool holds(const Row& row) {
  return all(row.layouts, is_laid_out) && all(row.gradients, has_its_gradient) &&
      all(row.attributes,
          [](const Slot& s) { return is_the_same(PyObject_GetAttr(s.where, s.key), s.value); }) &&
      all(row.items, lies_there) &&
      all(row.lengths,
          [](const Length& l) { return PyObject_Length(l.container) == l.length && !PyErr_Occurred(); }) &&
      all(row.classes,
          [](const Class& c) { return reinterpret_cast<PyObject*>(Py_TYPE(c.object)) == c.type; }) &&
      all(row.questions, is_answered_yes);
}

// -- the type that Python sees

struct RowObject {
  PyObject_HEAD
  PyObject* kept;
  Row* row;
};

bool may_be_denied() {  // removed, or no longer readable: the same errors as in Python
  return PyErr_ExceptionMatches(PyExc_LookupError) || PyErr_ExceptionMatches(PyExc_AttributeError) ||
      PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
      PyErr_ExceptionMatches(PyExc_RuntimeError);
}

PyObject* row_call(PyObject* self, PyObject*, PyObject*) {
  const Row* row = reinterpret_cast<RowObject*>(self)->row;
  bool answer = false;
  try {
    answer = row != nullptr && holds(*row);
  } catch (const std::exception&) {  // Python's errors are handled below; an error of torch fails the check
    answer = false;
  }
  if (PyErr_Occurred()) {
    if (!may_be_denied()) {
      return nullptr;
    }
    PyErr_Clear();
    answer = false;
  }
  return PyBool_FromLong(answer);
}

PyObject* row_new(PyTypeObject* type, PyObject* args, PyObject*) {
  try {
    auto row = std::make_unique<Row>(Row{
        all_of(part(args, 0), slot_of),
        all_of(part(args, 1), slot_of),
        all_of(part(args, 2), length_of),
        all_of(part(args, 3), class_of),
        all_of(part(args, 4), layout_of),
        all_of(part(args, 5), gradient_of),
        all_of(part(args, 6), question_of)});
    auto* self = reinterpret_cast<RowObject*>(checked(type->tp_alloc(type, 0)));
    self->row = row.release();
    self->kept = Py_NewRef(args);
    return reinterpret_cast<PyObject*>(self);
  } catch (const Wrong&) {
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

int row_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<RowObject*>(self)->kept);
  return 0;
}

int row_clear(PyObject* self) {
  auto* object = reinterpret_cast<RowObject*>(self);
  delete object->row;
  object->row = nullptr;
  Py_CLEAR(object->kept);
  return 0;
}

void row_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  row_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot row_slots[] = {
    {Py_tp_doc, const_cast<char*>("A row of expectations; call it to check all of them.")},
    {Py_tp_new, reinterpret_cast<void*>(row_new)},
    {Py_tp_call, reinterpret_cast<void*>(row_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(row_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(row_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(row_dealloc)},
    {0, nullptr}};

PyType_Spec row_spec = {
    "stepgraph_row.Row", sizeof(RowObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, row_slots};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "stepgraph_row", nullptr, -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_stepgraph_row() {
  PyObject* module = PyModule_Create(&module_definition);
  PyObject* type = module == nullptr ? nullptr : PyType_FromSpec(&row_spec);
  if (type == nullptr || PyModule_AddObjectRef(module, "Row", type) < 0) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  Py_DECREF(type);
  return module;
}
