/* What the extensions of the project have in common (ADR 0088): a module, what it takes from Python modules, fields. */
#ifndef TRIVIUM_NATIVE_H
#define TRIVIUM_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>
#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#define Py_T_OBJECT_EX T_OBJECT_EX
#endif

/* What became of one message or packet. */
typedef enum { FAILED = -1, LEFT = 0, TAKEN = 1 } Verdict; /* a Python error is set; left to Python; done */

/* Take what a Python module has under a name; -1, with its error, when there is no such thing. */
static inline int
look_up(const char *module_name, const char *name, PyObject **found)
{
    PyObject *module = PyImport_ImportModule(module_name);
    *found = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return *found ? 0 : -1;
}

/* What is looked up once, when a module is imported, and kept as long as the process. */
typedef struct {
    const char *module, *name;
    PyObject **found;
} Wanted;

static inline int
look_up_each(const Wanted *wanted, size_t count)
{
    int failed = 0;
    for (size_t index = 0; !failed && index < count; index++) {
        failed = look_up(wanted[index].module, wanted[index].name, wanted[index].found);
    }
    return failed;
}
#define LOOK_UP(table) look_up_each(table, sizeof(table) / sizeof *(table))

/* Where the objects of a class of ours (a msgspec.Struct, or one with slots) keep a field. */
typedef struct {
    PyObject **type;
    const char *name;
    Py_ssize_t *place;
} Place;

/* Find the places of fields; -1, with an ImportError, when one is no field. */
static inline int
find_fields(const Place *places, size_t count)
{
    for (; count; places++, count--) {
        PyObject *found = PyObject_GetAttrString(*places->type, places->name);
        const PyMemberDef *member
            = found && Py_IS_TYPE(found, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)found)->d_member : NULL;
        int is_field = member && member->type == Py_T_OBJECT_EX;
        if (is_field) {
            *places->place = member->offset;
        }
        else if (found) {
            PyErr_Format(PyExc_ImportError, "%s is no field", places->name);
        }
        Py_XDECREF(found);
        if (!is_field) {
            return -1;
        }
    }
    return 0;
}
#define FIND_FIELDS(table) find_fields(table, sizeof(table) / sizeof *(table))

/* A field of an object whose type was looked at: borrowed, and there as long as the object, if that is frozen. */
static inline PyObject *
field(PyObject *of, Py_ssize_t place)
{
    return *(PyObject **)((char *)of + place);
}

/* Set a field of an object that is not frozen, or that nobody else has seen; it steals the reference to the value. */
static inline void
set_field(PyObject *of, Py_ssize_t place, PyObject *value)
{
    PyObject **kept = (PyObject **)((char *)of + place);
    Py_SETREF(*kept, value);
}

/* Check the number of arguments; -1, with a TypeError, when it is wrong. */
static inline int
check_count(const char *name, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments but %zd were given", name, wanted, given);
    return -1;
}

/* Add a type to a module. */
static inline int
add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int failed = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
    Py_XDECREF(type);
    return failed;
}

/* Define the module, whose methods are `functions`; `set_up(module)` takes what it needs; -1 with an exception. */
#define NATIVE_MODULE(name, doc)                                                                                       \
    static PyModuleDef_Slot slots[] = {                                                                                \
        {Py_mod_exec, set_up},                                                                                         \
        {0, NULL},                                                                                                     \
    };                                                                                                                 \
    static struct PyModuleDef definition = {                                                                           \
        PyModuleDef_HEAD_INIT,                                                                                         \
        .m_name = name,                                                                                                \
        .m_doc = PyDoc_STR(doc),                                                                                       \
        .m_methods = functions,                                                                                        \
        .m_slots = slots,                                                                                              \
    };                                                                                                                 \
    PyMODINIT_FUNC                                                                                                     \
    PyInit__native(void)                                                                                               \
    {                                                                                                                  \
        return PyModuleDef_Init(&definition);                                                                          \
    }

#endif
