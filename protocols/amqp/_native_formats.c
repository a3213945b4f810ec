/* Transfers with a message-format that is not 0: see formats.py, which is the same in Python. */
#include "protocols/amqp/_native.h"

#include <stdbool.h>

enum { HEAD = 96, UNREADABLE = -1, TRANSFER = 0x14 };

/* The size of a uint or null at a place, or 0. */
static Py_ssize_t
uint_size(const unsigned char *frame, Py_ssize_t at, Py_ssize_t end)
{
    if (at >= end) {
        return 0;
    }
    switch (frame[at]) {
    case 0x40:
    case 0x43:
        return 1;
    case 0x52:
        return 2;
    case 0x70:
        return 5;
    default:
        return 0;
    }
}

static uint32_t
big_endian(const unsigned char *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

/* The size of a binary or null at a place, or 0. */
static Py_ssize_t
binary_size(const unsigned char *frame, Py_ssize_t at, Py_ssize_t end)
{
    Py_ssize_t there = end - at;
    if (there > 0 && frame[at] == 0x40) {
        return 1;
    }
    if (there >= 2 && frame[at] == 0xA0) {
        return 2 + frame[at + 1];
    }
    return there >= 5 && frame[at] == 0xB0 ? 5 + (Py_ssize_t)big_endian(frame + at + 1) : 0;
}

/* The message-format of a frame, of which the first `end` bytes are there; 0 if it is no readable transfer. */
static uint32_t
format_of(const unsigned char *frame, Py_ssize_t end)
{
    static const unsigned char small[] = {0, 0x53, TRANSFER}, large[] = {0, 0x80, 0, 0, 0, 0, 0, 0, 0, TRANSFER};
    Py_ssize_t at = 4 * (Py_ssize_t)frame[4];
    if (frame[5] || at < 8) {
        return 0;
    }
    if (at + (Py_ssize_t)sizeof small <= end && memcmp(frame + at, small, sizeof small) == 0) {
        at += (Py_ssize_t)sizeof small;
    }
    else if (at + (Py_ssize_t)sizeof large <= end && memcmp(frame + at, large, sizeof large) == 0) {
        at += (Py_ssize_t)sizeof large;
    }
    else {
        return 0;
    }
    if (at >= end || (frame[at] != 0xC0 && frame[at] != 0xD0)) {
        return 0;
    }
    at += frame[at] == 0xC0 ? 3 : 9;
    Py_ssize_t size = uint_size(frame, at, end); /* handle */
    at += size;
    size = size ? uint_size(frame, at, end) : 0; /* delivery-id */
    at += size;
    size = size ? binary_size(frame, at, end) : 0; /* delivery-tag */
    at += size;
    size = size ? uint_size(frame, at, end) : 0; /* message-format */
    if (!size || at + size > end) {
        return 0;
    }
    return size == 5 ? big_endian(frame + at + 1) : size == 2 ? frame[at + 1] : 0;
}

/* Add (begin, end, format) to the list, which is made with the first. */
static int
add_foreign(PyObject **found, Py_ssize_t begin, Py_ssize_t end, uint32_t format)
{
    if (!*found && !(*found = PyList_New(0))) {
        return -1;
    }
    PyObject *entry = Py_BuildValue("(nnI)", begin, end, format);
    int failed = entry ? PyList_Append(*found, entry) : -1;
    Py_XDECREF(entry);
    return failed;
}

/* scan(data, (left, format, head)) -> ((left, format, head), foreign or None) */
PyObject *
scan(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    Py_ssize_t left;
    unsigned int format;
    PyObject *head, *joined = NULL, *found = NULL, *result = NULL;
    if (count != 2 || !PyBytes_CheckExact(arguments[0]) || !PyTuple_CheckExact(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "scan(data: bytes, state: tuple)");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments[1], "nIS", &left, &format, &head)) {
        return NULL;
    }
    if (left == UNREADABLE) {
        return Py_BuildValue("(OO)", arguments[1], Py_None);
    }
    PyObject *buffer = arguments[0];
    Py_ssize_t base = PyBytes_GET_SIZE(head);
    if (base) {
        Py_INCREF(head);
        joined = head;
        PyBytes_Concat(&joined, buffer);
        if (!joined) {
            return NULL;
        }
        buffer = joined;
    }
    const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(buffer);
    Py_ssize_t size = PyBytes_GET_SIZE(buffer), at = 0, begin = 0, cut = -1;
    while (at < size) {
        if (!left) {
            begin = at;
            Py_ssize_t there = size - at, whole = there >= 4 ? (Py_ssize_t)big_endian(bytes + at) : HEAD;
            if (whole < 8) {
                left = UNREADABLE;
                format = 0;
                break;
            }
            Py_ssize_t wanted = whole < HEAD ? whole : HEAD;
            if (there < wanted) {
                cut = at;
                break;
            }
            left = whole;
            format = format_of(bytes + at, wanted);
        }
        Py_ssize_t step = left < size - at ? left : size - at;
        at += step;
        left -= step;
        if (!left && format && add_foreign(&found, begin > base ? begin - base : 0, at - base, format) < 0) {
            goto end;
        }
    }
    result = Py_BuildValue(
        "((nIy#)O)", left, left > 0 ? format : 0, (const char *)bytes + (cut < 0 ? size : cut),
        cut < 0 ? (Py_ssize_t)0 : size - cut, found ? found : Py_None);
end:
    Py_XDECREF(found);
    Py_XDECREF(joined);
    return result;
}
