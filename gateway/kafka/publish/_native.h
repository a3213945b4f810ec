/* Declarations shared by the C files of this extension. */
#ifndef TRIVIUM_PUBLISH_NATIVE_H
#define TRIVIUM_PUBLISH_NATIVE_H

#include "protocols/native.h"

#include <stdbool.h>

/* `mapping.record.Record` and the offsets of its fields. */
typedef struct {
    PyObject *type;
    Py_ssize_t topic, key, value, headers, timestamp, partition;
} RecordFields;

extern RecordFields of_record;

/* Whether it is a `Record`; sets a TypeError if not. */
static inline bool
is_record(PyObject *record)
{
    if ((PyObject *)Py_TYPE(record) == of_record.type) {
        return true;
    }
    PyErr_Format(PyExc_TypeError, "a Record, not %.100s", Py_TYPE(record)->tp_name);
    return false;
}

/* _native_partitions.c: murmur2.py in C */
PyObject *partition_of(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *by_partition(PyObject *module, PyObject *arguments);

#endif
