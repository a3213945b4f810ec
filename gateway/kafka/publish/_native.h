/* What the parts of this extension have in common. */
#ifndef TRIVIUM_PUBLISH_NATIVE_H
#define TRIVIUM_PUBLISH_NATIVE_H

#include "protocols/native.h"

#include <stdbool.h>

/* `mapping.record.Record`, and where its fields are. */
typedef struct {
    PyObject *type;
    Py_ssize_t topic, key, value, headers, timestamp, partition;
} RecordFields;

extern RecordFields of_record;

/* Whether it is a `Record`; a TypeError when not. */
static inline bool
is_record(PyObject *record)
{
    if ((PyObject *)Py_TYPE(record) == of_record.type) {
        return true;
    }
    PyErr_Format(PyExc_TypeError, "a Record, not %.100s", Py_TYPE(record)->tp_name);
    return false;
}

/* -1, with a TypeError, when a function was given too many arguments or too few. */
static inline int
check_count(const char *name, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments but %zd were given", name, wanted, given);
    return -1;
}

/* _native_partitions.c: murmur2.py in C */
PyObject *partition_of(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *by_partition(PyObject *module, PyObject *arguments);

#endif
