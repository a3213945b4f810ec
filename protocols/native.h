/* What every extension of the project begins with (ADR 0057): Python, and the switch between C and Python. */
#ifndef TRIVIUM_NATIVE_H
#define TRIVIUM_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* First in every module's Py_mod_exec: -1, with an ImportError, when TRIVIUM_NATIVE (0) asks for the Python code.
   The package that imports the extension then takes its Python code, as where no extension was built. */
static inline int
refuse_when_switched_off(PyObject *Py_UNUSED(module))
{
    const char *value = getenv("TRIVIUM_NATIVE");
    if (value == NULL || *value == '\0' || strcmp(value, "1") == 0) {
        return 0;
    }
    PyErr_Format(PyExc_ImportError, "TRIVIUM_NATIVE=%s", value);
    return -1;
}

/* Take what a Python module has under a name; -1, with its error, when there is no such thing. */
static inline int
look_up(const char *module_name, const char *name, PyObject **found)
{
    PyObject *module = PyImport_ImportModule(module_name);
    *found = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return *found ? 0 : -1;
}

/* Where objects of a class of ours (a msgspec.Struct) keep a field; -1, with an ImportError, when it is none. */
static inline Py_ssize_t
find_field(PyObject *type, const char *name)
{
    PyObject *found = PyObject_GetAttrString(type, name);
    Py_ssize_t place = -1;
    if (found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type)) {
        const PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        place = member->type == T_OBJECT_EX ? member->offset : -1;
    }
    if (found != NULL && place < 0) {
        PyErr_Format(PyExc_ImportError, "%s is no field", name);
    }
    Py_XDECREF(found);
    return place;
}

/* A field of an object whose type was looked at: borrowed, and there as long as the object, which is frozen. */
static inline PyObject *
field(PyObject *of, Py_ssize_t place)
{
    return *(PyObject **)((char *)of + place);
}

#endif
