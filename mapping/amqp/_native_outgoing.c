/*
 * Mapping records to AMQP messages, in C: `mapping.amqp.outgoing.from_records`. The Python code is the reference, and
 * unusual records are left to it. A usual record has a value, no failed delivery, and only headers that become
 * properties or application properties (none of `_SPECIAL` there).
 */
#include "mapping/amqp/_native.h"

#define USUAL_HEADERS 4        /* a record with more headers is left to the reference */
#define CACHE_SLOTS 4096       /* cached tuples of headers, and cached partitions; a power of two */
#define CACHED_BYTES 100       /* the size of a cached header */
#define COORDINATES 7          /* annotations of a usual message */

/* Objects that are imported once from the Python modules. */
static struct {
    PyObject *received;                                                  /* the type Received */
    PyObject *topic, *key, *value, *headers, *timestamp, *partition, *offset; /* its fields' names */
    PyObject *from_record;    /* the reference for one record */
    PyObject *partition_head; /* function: the annotations before the offset */
    PyObject *few_headers;    /* function: the bare message's sections for some headers */
    PyObject *plain_header, *annotations, *after_offset, *after_sequence, *event_hubs, *key_name; /* constant bytes */
} out;

static PyObject *cached_headers; /* cache: headers -> the bare message's sections; many records share their headers */

/* Cache: the annotations before the offset, by topic and partition. */
static struct {
    PyObject *topic, *head;
    int64_t partition;
} cached_heads[CACHE_SLOTS];

/* Fields of a record, owned. */
typedef struct {
    PyObject *topic, *key, *value, *headers;
    int64_t timestamp, partition, offset;
} Fields;

static int
read_number(PyObject *record, PyObject *name, int64_t *found)
{
    PyObject *value = PyObject_GetAttr(record, name);
    *found = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return *found == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Read a record's fields; LEFT when it is no `Received` or a field has an unusual type or value. */
static Verdict
read_fields(PyObject *record, Fields *found)
{
    *found = (Fields){0};
    if (Py_TYPE(record) != (PyTypeObject *)out.received) {
        return LEFT;
    }
    found->topic = PyObject_GetAttr(record, out.topic);
    found->key = found->topic ? PyObject_GetAttr(record, out.key) : NULL;
    found->value = found->key ? PyObject_GetAttr(record, out.value) : NULL;
    found->headers = found->value ? PyObject_GetAttr(record, out.headers) : NULL;
    if (!found->headers || read_number(record, out.timestamp, &found->timestamp) < 0
        || read_number(record, out.partition, &found->partition) < 0
        || read_number(record, out.offset, &found->offset) < 0) {
        PyErr_Clear();
        return LEFT;
    }
    int usual = PyUnicode_CheckExact(found->topic) && PyBytes_CheckExact(found->value)
        && (found->key == Py_None || PyBytes_CheckExact(found->key)) && PyTuple_CheckExact(found->headers)
        && PyTuple_GET_SIZE(found->headers) <= USUAL_HEADERS && found->offset >= 0;
    return usual ? TAKEN : LEFT;
}

static void
drop_fields(Fields *fields)
{
    Py_XDECREF(fields->topic);
    Py_XDECREF(fields->key);
    Py_XDECREF(fields->value);
    Py_XDECREF(fields->headers);
}

/* Return the encoded annotations before the offset, a new reference; NULL with an exception. */
static PyObject *
head_of(const Fields *fields)
{
    uint64_t hash = (uint64_t)PyObject_Hash(fields->topic) ^ (uint64_t)fields->partition * 31;
    size_t place = (size_t)((hash ^ hash >> 12) % CACHE_SLOTS);
    PyObject *known = cached_heads[place].topic;
    if (known && cached_heads[place].partition == fields->partition
        && (known == fields->topic || PyUnicode_Compare(known, fields->topic) == 0)) {
        return Py_NewRef(cached_heads[place].head);
    }
    PyObject *head = PyObject_CallFunction(out.partition_head, "OL", fields->topic, (long long)fields->partition);
    if (head && PyBytes_CheckExact(head)) {
        Py_XSETREF(cached_heads[place].topic, Py_NewRef(fields->topic));
        Py_XSETREF(cached_heads[place].head, Py_NewRef(head));
        cached_heads[place].partition = fields->partition;
    }
    return head;
}

static int
are_small(PyObject *headers)
{
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(headers); index++) {
        PyObject *header = PyTuple_GET_ITEM(headers, index);
        PyObject *content = PyTuple_GET_ITEM(header, 1);
        Py_ssize_t size = PyUnicode_GET_LENGTH(PyTuple_GET_ITEM(header, 0));
        if (size + (content == Py_None ? 0 : PyBytes_GET_SIZE(content)) > CACHED_BYTES) {
            return 0;
        }
    }
    return 1;
}

static int
are_headers(PyObject *headers)
{
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(headers); index++) {
        PyObject *header = PyTuple_GET_ITEM(headers, index);
        if (!PyTuple_CheckExact(header) || PyTuple_GET_SIZE(header) != 2
            || !PyUnicode_CheckExact(PyTuple_GET_ITEM(header, 0))
            || !(PyTuple_GET_ITEM(header, 1) == Py_None || PyBytes_CheckExact(PyTuple_GET_ITEM(header, 1)))) {
            return 0;
        }
    }
    return 1;
}

/* Return the bare message's sections, a new reference; NULL without an error when the headers are not usual. */
static PyObject *
bare_of(PyObject *headers)
{
    PyObject *known = PyDict_GetItemWithError(cached_headers, headers);
    if (known || PyErr_Occurred()) {
        return Py_XNewRef(known);
    }
    if (!are_headers(headers)) {
        return NULL;
    }
    PyObject *bare = PyObject_CallOneArg(out.few_headers, headers);
    if (bare && !PyBytes_CheckExact(bare)) {
        Py_DECREF(bare);
        return NULL;
    }
    if (bare && are_small(headers)) {
        if (PyDict_GET_SIZE(cached_headers) >= CACHE_SLOTS) {
            PyDict_Clear(cached_headers);
        }
        if (PyDict_SetItem(cached_headers, headers, bare) < 0) {
            Py_CLEAR(bare);
        }
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
write_message(const Fields *fields, PyObject *head, PyObject *bare)
{
    char number[24];
    int digits = snprintf(number, sizeof number, "%lld", (long long)fields->offset);
    PyObject *key = fields->key;
    Py_ssize_t items = PyBytes_GET_SIZE(head) + 8 + PyBytes_GET_SIZE(out.after_offset) + 8
        + PyBytes_GET_SIZE(out.after_sequence) + 8 + PyBytes_GET_SIZE(out.event_hubs) + 1 + digits
        + PyBytes_GET_SIZE(out.key_name) + (key == Py_None ? 1 : sized(key));
    Py_ssize_t total = PyBytes_GET_SIZE(out.plain_header) + PyBytes_GET_SIZE(out.annotations) + 8 + items
        + PyBytes_GET_SIZE(bare) + 3 + sized(fields->value);
    PyObject *message = PyBytes_FromStringAndSize(NULL, total);
    if (!message) {
        return NULL;
    }
    char *at = write_bytes(PyBytes_AS_STRING(message), out.plain_header);
    at = write_bytes(at, out.annotations);
    at = write_u32(at, (uint32_t)items + 4);
    at = write_u32(at, 2 * COORDINATES);
    at = write_bytes(at, head);
    at = write_bytes(write_u64(at, (uint64_t)fields->offset), out.after_offset);
    at = write_bytes(write_u64(at, (uint64_t)fields->offset), out.after_sequence);
    at = write_bytes(write_u64(at, (uint64_t)fields->timestamp), out.event_hubs);
    *at++ = (char)digits;
    memcpy(at, number, (size_t)digits);
    at = write_bytes(at + digits, out.key_name);
    if (key == Py_None) {
        *at++ = 0x40;
    }
    else {
        int text = is_utf8((const uint8_t *)PyBytes_AS_STRING(key), (size_t)PyBytes_GET_SIZE(key));
        at = write_sized(at, text ? 0xA1 : 0xA0, key);
    }
    at = write_bytes(at, bare);
    *at++ = 0x00;
    *at++ = 0x53;
    *at++ = DATA;
    write_sized(at, 0xA0, fields->value);
    return message;
}

/* Map one record if it is usual; NULL without an error when it is left to the reference. */
static PyObject *
usual_message(PyObject *record)
{
    Fields fields;
    PyObject *message = NULL;
    if (read_fields(record, &fields) == TAKEN) {
        PyObject *bare = bare_of(fields.headers);
        PyObject *head = bare ? head_of(&fields) : NULL;
        message = head ? write_message(&fields, head, bare) : NULL;
        Py_XDECREF(bare);
        Py_XDECREF(head);
    }
    drop_fields(&fields);
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
look_up_outgoing(PyObject *Py_UNUSED(module))
{
    static const struct {
        const char *name;
        PyObject **found;
    } wanted[] = {
        {"from_record", &out.from_record},
        {"partition_head", &out.partition_head},
        {"few_headers", &out.few_headers},
        {"PLAIN_HEADER", &out.plain_header},
        {"ANNOTATIONS", &out.annotations},
        {"AFTER_OFFSET", &out.after_offset},
        {"AFTER_SEQUENCE", &out.after_sequence},
        {"EVENT_HUBS_OFFSET", &out.event_hubs},
        {"KEY", &out.key_name},
    }, fields[] = {
        {"topic", &out.topic}, {"key", &out.key}, {"value", &out.value}, {"headers", &out.headers},
        {"timestamp", &out.timestamp}, {"partition", &out.partition}, {"offset", &out.offset},
    };
    for (size_t index = 0; index < sizeof wanted / sizeof wanted[0]; index++) {
        if (look_up("mapping.amqp.outgoing", wanted[index].name, wanted[index].found) < 0) {
            return -1;
        }
    }
    for (size_t index = 0; index < sizeof fields / sizeof fields[0]; index++) {
        *fields[index].found = PyUnicode_InternFromString(fields[index].name);
        if (!*fields[index].found) {
            return -1;
        }
    }
    cached_headers = PyDict_New();
    return cached_headers && look_up("mapping.record", "Received", &out.received) == 0 ? 0 : -1;
}
