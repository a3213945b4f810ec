/* What every extension of the project begins with (ADR 0057): Python, and the switch between C and Python. */
#ifndef TRIVIUM_NATIVE_H
#define TRIVIUM_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

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

#endif
