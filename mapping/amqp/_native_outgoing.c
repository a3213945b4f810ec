/*
 * Mapping records to AMQP messages, in C: `mapping.amqp.outgoing.from_records`. The Python code is the reference, and
 * unusual records are left to it. A usual record has a value, no failed delivery, and only headers that become
 * properties or application properties (none of `_SPECIAL` there).
 */
#include "mapping/amqp/_native.h"

#define USUAL_HEADERS 4   /* a record with more headers is left to the reference */
#define SHORT_HEADERS 400 /* characters and bytes of headers whose sections are cached: many records share them */
#define COORDINATES 7     /* annotations of a usual message */

/* Objects that are imported once from the Python modules. */
static struct {
    PyObject *received;       /* the type Received */
    PyObject *from_record;    /* the reference for one record */
    PyObject *partition_head; /* function: the annotations before the offset, cached */
    PyObject *few_headers;    /* function: the bare message's sections for some headers */
    PyObject *short_headers;  /* the same, cached */
    PyObject *plain_header, *annotations, *after_offset, *after_sequence, *event_hubs, *key_name; /* constant bytes */
} out;

/* Positions of fields of Received. */
static struct {
    Py_ssize_t topic, key, value, headers, timestamp, partition, offset;
} place;

/* The length of the names and values together; -1 when the headers are not pairs of text and bytes or None. */
static Py_ssize_t
length_of(PyObject *headers)
{
    Py_ssize_t total = 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(headers); index++) {
        PyObject *header = PyTuple_GET_ITEM(headers, index);
        if (!PyTuple_CheckExact(header) || PyTuple_GET_SIZE(header) != 2) {
            return -1;
        }
        PyObject *name = PyTuple_GET_ITEM(header, 0), *content = PyTuple_GET_ITEM(header, 1);
        if (!PyUnicode_CheckExact(name) || !(content == Py_None || PyBytes_CheckExact(content))) {
            return -1;
        }
        total += PyUnicode_GET_LENGTH(name) + (content == Py_None ? 0 : PyBytes_GET_SIZE(content));
    }
    return total;
}

/* Return the bare message's sections, a new reference; NULL without an error when the headers are not usual. */
static PyObject *
bare_of(PyObject *headers)
{
    Py_ssize_t length = length_of(headers);
    PyObject *encode = length <= SHORT_HEADERS ? out.short_headers : out.few_headers;
    PyObject *bare = length < 0 ? NULL : PyObject_CallOneArg(encode, headers);
    if (bare && !PyBytes_CheckExact(bare)) {
        Py_CLEAR(bare);
    }
    return bare;
}

static char *
write_bytes(char *at, PyObject *bytes)
{
    memcpy(at, PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes));
    return at + PyBytes_GET_SIZE(bytes);
}

static char *
write_u32(char *at, uint32_t value)
{
    for (int shift = 24; shift >= 0; shift -= 8) {
        *at++ = (char)(value >> shift);
    }
    return at;
}

static char *
write_u64(char *at, uint64_t value)
{
    return write_u32(write_u32(at, (uint32_t)(value >> 32)), (uint32_t)value);
}

/* Write a binary (`code` 0xA0) or a string (0xA1) with its constructor. */
static char *
write_sized(char *at, uint8_t code, PyObject *bytes)
{
    Py_ssize_t size = PyBytes_GET_SIZE(bytes);
    if (size < 256) {
        *at++ = (char)code;
        *at++ = (char)size;
    }
    else {
        *at++ = (char)(code + 0x10);
        at = write_u32(at, (uint32_t)size);
    }
    return write_bytes(at, bytes);
}

static Py_ssize_t
sized(PyObject *bytes)
{
    return PyBytes_GET_SIZE(bytes) + (PyBytes_GET_SIZE(bytes) < 256 ? 2 : 5);
}

/* Build the message of a usual record. */
static PyObject *
write_message(PyObject *key, PyObject *value, int64_t offset, int64_t timestamp, PyObject *head, PyObject *bare)
{
    char number[24];
    int digits = snprintf(number, sizeof number, "%" PRId64, offset);
    Py_ssize_t items = PyBytes_GET_SIZE(head) + 8 + PyBytes_GET_SIZE(out.after_offset) + 8
        + PyBytes_GET_SIZE(out.after_sequence) + 8 + PyBytes_GET_SIZE(out.event_hubs) + 1 + digits
        + PyBytes_GET_SIZE(out.key_name) + (key == Py_None ? 1 : sized(key));
    Py_ssize_t total = PyBytes_GET_SIZE(out.plain_header) + PyBytes_GET_SIZE(out.annotations) + 8 + items
        + PyBytes_GET_SIZE(bare) + 3 + sized(value);
    PyObject *message = PyBytes_FromStringAndSize(NULL, total);
    if (!message) {
        return NULL;
    }
    char *to = write_bytes(PyBytes_AS_STRING(message), out.plain_header);
    to = write_bytes(to, out.annotations);
    to = write_u32(to, (uint32_t)items + 4);
    to = write_u32(to, 2 * COORDINATES);
    to = write_bytes(to, head);
    to = write_bytes(write_u64(to, (uint64_t)offset), out.after_offset);
    to = write_bytes(write_u64(to, (uint64_t)offset), out.after_sequence);
    to = write_bytes(write_u64(to, (uint64_t)timestamp), out.event_hubs);
    *to++ = (char)digits;
    memcpy(to, number, (size_t)digits);
    to = write_bytes(to + digits, out.key_name);
    if (key == Py_None) {
        *to++ = 0x40;
    }
    else {
        int text = is_utf8((const uint8_t *)PyBytes_AS_STRING(key), (size_t)PyBytes_GET_SIZE(key));
        to = write_sized(to, text ? 0xA1 : 0xA0, key);
    }
    to = write_bytes(to, bare);
    *to++ = 0x00;
    *to++ = 0x53;
    *to++ = DATA;
    write_sized(to, 0xA0, value);
    return message;
}

/* Map one record if it is usual; NULL without an error when it is left to the reference. */
static PyObject *
usual_message(PyObject *record)
{
    if ((PyObject *)Py_TYPE(record) != out.received) {
        return NULL;
    }
    PyObject *key = field(record, place.key), *value = field(record, place.value);
    PyObject *headers = field(record, place.headers);
    if (!PyBytes_CheckExact(value) || !(key == Py_None || PyBytes_CheckExact(key)) || !PyTuple_CheckExact(headers)
        || PyTuple_GET_SIZE(headers) > USUAL_HEADERS) {
        return NULL;
    }
    int64_t offset = PyLong_AsLongLong(field(record, place.offset));
    int64_t timestamp = PyErr_Occurred() ? -1 : PyLong_AsLongLong(field(record, place.timestamp));
    if (PyErr_Occurred()) { /* too large, or no numbers: the reference raises the error */
        PyErr_Clear();
        return NULL;
    }
    PyObject *bare = offset < 0 ? NULL : bare_of(headers), *message = NULL;
    if (bare) {
        PyObject *arguments[] = {field(record, place.topic), field(record, place.partition)};
        PyObject *head = PyObject_Vectorcall(out.partition_head, arguments, 2, NULL);
        message = head && PyBytes_CheckExact(head) ? write_message(key, value, offset, timestamp, head, bare) : NULL;
        Py_XDECREF(head);
        Py_DECREF(bare);
    }
    return message;
}

PyObject *
from_records(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 4) {
        PyErr_SetString(PyExc_TypeError, "from_records(records, now_ms, delivery_count, most_bytes)");
        return NULL;
    }
    long long attempts = PyLong_AsLongLong(arguments[2]);
    Py_ssize_t most = attempts == -1 && PyErr_Occurred() ? -1 : PyLong_AsSsize_t(arguments[3]), size = 0;
    PyObject *records = most == -1 && PyErr_Occurred() ? NULL : PySequence_Fast(arguments[0], "records are a sequence");
    PyObject *messages = records ? PyList_New(0) : NULL;
    for (Py_ssize_t index = 0; messages && index < PySequence_Fast_GET_SIZE(records); index++) {
        PyObject *record = Py_NewRef(PySequence_Fast_GET_ITEM(records, index));
        PyObject *message = attempts ? NULL : usual_message(record);
        if (!message && !PyErr_Occurred()) {
            PyObject *all[] = {record, arguments[1], arguments[2]};
            message = PyObject_Vectorcall(out.from_record, all, 3, NULL);
        }
        Py_DECREF(record);
        if (!message || PyList_Append(messages, message) < 0) {
            Py_XDECREF(message);
            Py_CLEAR(messages);
            break;
        }
        size += PyBytes_CheckExact(message) ? PyBytes_GET_SIZE(message) : 0;
        Py_DECREF(message);
        if (size >= most) {
            break;
        }
    }
    Py_XDECREF(records);
    return messages;
}

int
look_up_outgoing(void)
{
    static const Wanted wanted[] = {
        {"mapping.record", "Received", &out.received},
        {"mapping.amqp.outgoing", "from_record", &out.from_record},
        {"mapping.amqp.outgoing", "partition_head", &out.partition_head},
        {"mapping.amqp.outgoing", "few_headers", &out.few_headers},
        {"mapping.amqp.outgoing", "short_headers", &out.short_headers},
        {"mapping.amqp.outgoing", "PLAIN_HEADER", &out.plain_header},
        {"mapping.amqp.outgoing", "ANNOTATIONS", &out.annotations},
        {"mapping.amqp.outgoing", "AFTER_OFFSET", &out.after_offset},
        {"mapping.amqp.outgoing", "AFTER_SEQUENCE", &out.after_sequence},
        {"mapping.amqp.outgoing", "EVENT_HUBS_OFFSET", &out.event_hubs},
        {"mapping.amqp.outgoing", "KEY", &out.key_name},
    };
    static const Place places[] = {
        {&out.received, "topic", &place.topic},         {&out.received, "key", &place.key},
        {&out.received, "value", &place.value},         {&out.received, "headers", &place.headers},
        {&out.received, "timestamp", &place.timestamp}, {&out.received, "partition", &place.partition},
        {&out.received, "offset", &place.offset},
    };
    return LOOK_UP(wanted) == 0 && FIND_FIELDS(places) == 0 ? 0 : -1;
}
