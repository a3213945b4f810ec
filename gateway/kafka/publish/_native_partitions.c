/* The partition of a key, and grouping of records by partition: murmur2.py in C. */
#include "gateway/kafka/publish/_native.h"

#include <stdint.h>

static uint32_t
murmur2(const unsigned char *data, Py_ssize_t size)
{
    const uint32_t m = 0x5bd1e995;
    uint32_t hashed = 0x9747b28c ^ (uint32_t)size;
    for (; size >= 4; data += 4, size -= 4) {
        uint32_t k = (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
        k *= m;
        k ^= k >> 24;
        hashed = (hashed * m) ^ (k * m);
    }
    if (size > 0) {
        while (size > 0) {
            size--;
            hashed ^= (uint32_t)data[size] << (8 * size);
        }
        hashed *= m;
    }
    hashed ^= hashed >> 13;
    hashed *= m;
    return hashed ^ (hashed >> 15);
}

PyObject *
partition_of(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    if (check_count("partition_of", given, 2) < 0) {
        return NULL;
    }
    if (!PyBytes_Check(arguments[0])) {
        PyErr_Format(PyExc_TypeError, "a key is bytes, not %.100s", Py_TYPE(arguments[0])->tp_name);
        return NULL;
    }
    long partitions = PyLong_AsLong(arguments[1]);
    if (partitions <= 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "a topic has partitions");
        }
        return NULL;
    }
    const unsigned char *key = (const unsigned char *)PyBytes_AS_STRING(arguments[0]);
    return PyLong_FromLong((long)(murmur2(key, PyBytes_GET_SIZE(arguments[0])) & 0x7fffffff) % partitions);
}

/* Append a record and its token to the lists of its partition. */
static int
add_to_part(PyObject *parts, long number, PyObject *record, PyObject *token)
{
    PyObject *place = PyLong_FromLong(number);
    PyObject *part = place ? PyDict_GetItemWithError(parts, place) : NULL;
    int failed = place && (part || !PyErr_Occurred()) ? 0 : -1;
    if (!failed && part == NULL) {
        PyObject *made = Py_BuildValue("([][])");
        failed = made ? PyDict_SetItem(parts, place, made) : -1;
        part = made; /* the dictionary holds a reference */
        Py_XDECREF(made);
    }
    Py_XDECREF(place);
    if (failed) {
        return -1;
    }
    return PyList_Append(PyTuple_GET_ITEM(part, 0), record) < 0 || PyList_Append(PyTuple_GET_ITEM(part, 1), token) < 0
               ? -1
               : 0;
}

/* Return the partition of a record of `topic` that has no partition and no timestamp of its own; `keyless` if it has no
   key. -1 means that it is another kind of record or its partition is not chosen yet, -2 an error. */
static long
find_partition(PyObject *record, PyObject *topic, long partitions, long keyless)
{
    if (!is_record(record)) {
        return -2;
    }
    PyObject *own = field(record, of_record.topic), *key = field(record, of_record.key);
    int usual = own == topic ? 1 : PyObject_RichCompareBool(own, topic, Py_EQ);
    if (usual <= 0 || field(record, of_record.partition) != Py_None || field(record, of_record.timestamp) != Py_None) {
        return usual < 0 ? -2 : -1;
    }
    if (key == Py_None || !PyBytes_Check(key)) {
        return key == Py_None ? keyless : -1;
    }
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(key);
    return (long)(murmur2(data, PyBytes_GET_SIZE(key)) & 0x7fffffff) % partitions;
}

PyObject *
by_partition(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *records, *tokens;
    Py_ssize_t position;
    long partitions, keyless;
    if (!PyArg_ParseTuple(arguments, "O!O!nll:by_partition", &PyList_Type, &records, &PyList_Type, &tokens, &position,
                          &partitions, &keyless)) {
        return NULL;
    }
    if (position < 0 || position >= PyList_GET_SIZE(records) || partitions <= 0 || keyless < -1) {
        PyErr_SetString(PyExc_ValueError, "a position in the records, and a topic's partitions");
        return NULL;
    }
    PyObject *parts = PyDict_New();
    PyObject *first = PyList_GET_ITEM(records, position);
    PyObject *topic = parts && is_record(first) ? Py_NewRef(field(first, of_record.topic)) : NULL;
    int failed = topic ? 0 : -1;
    while (!failed && position < PyList_GET_SIZE(records) && position < PyList_GET_SIZE(tokens)) {
        PyObject *record = Py_NewRef(PyList_GET_ITEM(records, position));
        PyObject *token = Py_NewRef(PyList_GET_ITEM(tokens, position)); /* comparing topics may change the lists */
        long number = find_partition(record, topic, partitions, keyless);
        if (number >= 0) {
            failed = add_to_part(parts, number, record, token);
            position++;
        }
        Py_DECREF(record);
        Py_DECREF(token);
        if (number < 0) {
            failed = number == -2;
            break;
        }
    }
    PyObject *result = failed ? NULL : Py_BuildValue("nO", position, parts);
    Py_XDECREF(topic);
    Py_XDECREF(parts);
    return result;
}
