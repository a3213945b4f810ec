/* Encode records one after the other, as in a Kafka batch (message format 2): record_buffer.py in C. Choose the
   partition of a key, and group records by partition: murmur2.py in C.

   The Python code is the reference, and the tests check that both give the same results and errors. Between measuring
   and copying a record's parts no Python code runs, so they cannot change meanwhile. */
#include "protocols/native.h"

#include <stdbool.h>
#include <stdint.h>

#define LONGEST INT32_MAX /* bytes of a record, without its length field */

typedef struct {
    PyObject_HEAD
    PyObject *out;    /* the bytearray to append to, shared with the caller */
    Py_ssize_t limit; /* its largest size in bytes; the first record always fits */
    Py_ssize_t count;
    long long first;
    long long last;
} RecordBuffer;

/* `mapping.record.Record` and the offsets of its fields. */
static struct {
    PyObject *type;
    Py_ssize_t topic, key, value, headers, timestamp, partition;
} of_record;

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

/* Signed varints (zig-zag). */

static inline uint64_t
zigzag(int64_t value)
{
    return ((uint64_t)value << 1) ^ (value < 0 ? UINT64_MAX : 0);
}

static inline Py_ssize_t
varint_size(int64_t value)
{
    Py_ssize_t size = 1;
    for (uint64_t left = zigzag(value); left > 0x7f; left >>= 7) {
        size++;
    }
    return size;
}

static inline char *
put_varint(char *at, int64_t value)
{
    uint64_t left = zigzag(value);
    for (; left > 0x7f; left >>= 7) {
        *at++ = (char)(left | 0x80);
    }
    *at++ = (char)left;
    return at;
}

/* Length-prefixed bytes; null has the length -1. */

static inline char *
put_sized(char *at, const char *content, Py_ssize_t size)
{
    at = put_varint(at, size);
    memcpy(at, content, (size_t)size);
    return at + size;
}

static inline char *
put_bytes(char *at, PyObject *content)
{
    if (content == Py_None) {
        return put_varint(at, -1);
    }
    return put_sized(at, PyBytes_AS_STRING(content), PyBytes_GET_SIZE(content));
}

/* Add to a sum of sizes, which saturates above LONGEST and so cannot overflow. */
static inline void
add(Py_ssize_t *sum, Py_ssize_t size)
{
    if (*sum <= LONGEST) {
        *sum += size > LONGEST ? (Py_ssize_t)LONGEST + 1 : size;
    }
}

static inline void
add_sized(Py_ssize_t *sum, Py_ssize_t size)
{
    add(sum, varint_size(size));
    add(sum, size);
}

/* Add the size of `content`. Returns -1 with an exception when it is neither bytes nor None. */
static inline int
add_bytes(Py_ssize_t *sum, PyObject *content)
{
    if (content == Py_None) {
        add(sum, varint_size(-1));
        return 0;
    }
    if (!PyBytes_Check(content)) {
        PyErr_Format(PyExc_TypeError, "bytes or None, not %.100s", Py_TYPE(content)->tp_name);
        return -1;
    }
    add_sized(sum, PyBytes_GET_SIZE(content));
    return 0;
}

/* Take a record's timestamp, and its difference from the batch's first one. Returns -1 with an exception. */
static int
take_timestamp(const RecordBuffer *self, PyObject *number, long long *timestamp, long long *distance)
{
    int overflow;
    *timestamp = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (*timestamp == -1 && !overflow && PyErr_Occurred()) {
        return -1;
    }
    *distance = 0;
    if (overflow || *timestamp == LLONG_MIN
        || (self->count && __builtin_sub_overflow(*timestamp, self->first, distance))) {
        PyErr_Format(PyExc_OverflowError, "timestamp %S", number);
        return -1;
    }
    return 0;
}

/* Add the sizes of headers. Returns -1 with an exception when one is no tuple of name and value. */
static int
add_headers(Py_ssize_t *sum, PyObject *const *headers, Py_ssize_t count)
{
    for (Py_ssize_t number = 0; number < count; number++) {
        PyObject *header = headers[number];
        if (!PyTuple_Check(header) || PyTuple_GET_SIZE(header) != 2) {
            PyErr_SetString(PyExc_TypeError, "a header is a tuple of name and value");
            return -1;
        }
        Py_ssize_t size;
        if (PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(header, 0), &size) == NULL) {
            return -1;
        }
        add_sized(sum, size);
        if (add_bytes(sum, PyTuple_GET_ITEM(header, 1)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Grow `out` by `size` bytes and return where they start. Capacity is doubled, so that large batches seldom move. */
static char *
extend(PyObject *out, Py_ssize_t size)
{
    Py_ssize_t before = PyByteArray_GET_SIZE(out);
    Py_ssize_t behind = before + size;
    if (behind >= ((PyByteArrayObject *)out)->ob_alloc && PyByteArray_Resize(out, 2 * behind) < 0) {
        return NULL;
    }
    if (PyByteArray_Resize(out, behind) < 0) {
        return NULL;
    }
    return PyByteArray_AS_STRING(out) + before;
}

static Py_ssize_t
write_parts(RecordBuffer *self, long long timestamp, long long distance, PyObject *key, PyObject *value,
            PyObject *const *headers, Py_ssize_t header_count)
{
    Py_ssize_t length = 1 + varint_size(distance) + varint_size(self->count) + varint_size(header_count);
    if (add_bytes(&length, key) < 0 || add_headers(&length, headers, header_count) < 0
        || add_bytes(&length, value) < 0) {
        return -1;
    }
    if (length > LONGEST) {
        PyErr_Format(PyExc_OverflowError, "a record of more than %d bytes", LONGEST);
        return -1;
    }
    Py_ssize_t size = varint_size(length) + length;
    if (self->count && size > self->limit - PyByteArray_GET_SIZE(self->out)) {
        return 0;
    }
    char *at = extend(self->out, size);
    if (at == NULL) {
        return -1;
    }
    at = put_varint(at, length);
    *at++ = 0; /* attributes, unused */
    at = put_varint(at, distance);
    at = put_varint(at, self->count);
    at = put_bytes(at, key);
    at = put_bytes(at, value);
    at = put_varint(at, header_count);
    for (Py_ssize_t number = 0; number < header_count; number++) {
        Py_ssize_t name_size;
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(headers[number], 0), &name_size); /* cached */
        at = put_sized(at, name, name_size);
        at = put_bytes(at, PyTuple_GET_ITEM(headers[number], 1));
    }
    assert(at == PyByteArray_AS_STRING(self->out) + PyByteArray_GET_SIZE(self->out));
    if (!self->count) {
        self->first = self->last = timestamp;
    }
    else if (timestamp > self->last) {
        self->last = timestamp;
    }
    self->count++;
    return size;
}

/* Write a record. Returns its size, 0 when it does not fit, or -1 with an exception when it cannot be written. */
static Py_ssize_t
write_record(RecordBuffer *self, PyObject *stamp, PyObject *key, PyObject *value, PyObject *headers)
{
    long long timestamp, distance;
    PyObject *fast = PySequence_Fast(headers, "headers are a sequence");
    Py_ssize_t size = -1;
    if (fast && take_timestamp(self, stamp, &timestamp, &distance) == 0) { /* it may run Python code */
        size = write_parts(self, timestamp, distance, key, value, PySequence_Fast_ITEMS(fast),
                           PySequence_Fast_GET_SIZE(fast));
    }
    Py_XDECREF(fast);
    return size;
}

static PyObject *
append(RecordBuffer *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (check_count("append", given, 4) < 0) {
        return NULL;
    }
    Py_ssize_t size = write_record(self, arguments[0], arguments[1], arguments[2], arguments[3]);
    return size < 0 ? NULL : PyLong_FromSsize_t(size);
}

/* Append each record from `start` on. It stops before one that does not fit or cannot be written; `append` of that
   record then returns or raises the reason. */
static PyObject *
append_records(RecordBuffer *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (check_count("append_records", given, 4) < 0) {
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(arguments[2]);
    Py_ssize_t most = start == -1 && PyErr_Occurred() ? -1 : PyLong_AsSsize_t(arguments[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (start < 0 || !PyList_Check(arguments[1])) {
        PyErr_SetString(PyExc_ValueError, "a list of records, and a position");
        return NULL;
    }
    Py_ssize_t count = 0, size = 0, written = 1;
    while (written > 0 && start + count < PyList_GET_SIZE(arguments[1]) && (count == 0 || size < most)) {
        PyObject *record = Py_NewRef(PyList_GET_ITEM(arguments[1], start + count));
        written = -1;
        if (is_record(record)) {
            PyObject *own = field(record, of_record.timestamp);
            written = write_record(self, own == Py_None ? arguments[0] : own, field(record, of_record.key),
                                   field(record, of_record.value), field(record, of_record.headers));
        }
        Py_DECREF(record);
        if (written > 0) {
            count++;
            size += written;
        }
    }
    PyErr_Clear();
    return Py_BuildValue("nn", count, size);
}

static PyObject *
buffer_new(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    static char *keywords[] = {"out", "limit", NULL};
    PyObject *out;
    Py_ssize_t limit;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "O!n:RecordBuffer", keywords, &PyByteArray_Type, &out, &limit)) {
        return NULL;
    }
    RecordBuffer *self = (RecordBuffer *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->out = Py_NewRef(out);
        self->limit = limit;
    }
    return (PyObject *)self;
}

static void
buffer_dealloc(RecordBuffer *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->out);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef buffer_methods[] = {
    {"append", (PyCFunction)(void (*)(void))append, METH_FASTCALL, PyDoc_STR("Write a record.")},
    {"append_records", (PyCFunction)(void (*)(void))append_records, METH_FASTCALL,
     PyDoc_STR("Write records one behind another.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef buffer_members[] = {
    {"count", T_PYSSIZET, offsetof(RecordBuffer, count), READONLY, PyDoc_STR("records written")},
    {"first", T_LONGLONG, offsetof(RecordBuffer, first), READONLY, PyDoc_STR("timestamp of the first one")},
    {"last", T_LONGLONG, offsetof(RecordBuffer, last), READONLY, PyDoc_STR("the latest timestamp of all")},
    {NULL, 0, 0, 0, NULL},
};

/* A bytearray holds no references, so a buffer can be in no reference cycle and needs no garbage collection. */
static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Writes records behind what is in a bytearray; see record_buffer.py.")},
    {Py_tp_new, buffer_new},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_methods, buffer_methods},
    {Py_tp_members, buffer_members},
    {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "gateway.kafka.publish._native.RecordBuffer",
    .basicsize = sizeof(RecordBuffer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = buffer_slots,
};

/* Partitions. */

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

static PyObject *
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

/* `Accepted` in murmur2.py, and the topic. */
typedef struct {
    PyObject *topic;
    long partitions, keyless;
    long long oldest, latest;
    Py_ssize_t headers;
} Group;

/* Return the partition of a record of the group; -1 means that it is none, -2 an error. */
static long
find_partition(PyObject *record, const Group *group)
{
    if (!is_record(record)) {
        return -2;
    }
    PyObject *own = field(record, of_record.topic), *key = field(record, of_record.key);
    PyObject *stamp = field(record, of_record.timestamp);
    int usual = own == group->topic ? 1 : PyObject_RichCompareBool(own, group->topic, Py_EQ);
    if (usual <= 0 || field(record, of_record.partition) != Py_None) {
        return usual < 0 ? -2 : -1;
    }
    PyObject *headers = field(record, of_record.headers);
    if (!PyTuple_Check(headers) || PyTuple_GET_SIZE(headers) > group->headers) {
        return -1;
    }
    if (stamp != Py_None) {
        int overflow;
        long long timestamp = PyLong_AsLongLongAndOverflow(stamp, &overflow);
        if (timestamp == -1 && PyErr_Occurred()) {
            return -2;
        }
        if (overflow || timestamp < group->oldest || timestamp > group->latest) {
            return -1;
        }
    }
    if (key == Py_None || !PyBytes_Check(key)) {
        return key == Py_None ? group->keyless : -1;
    }
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(key);
    return (long)(murmur2(data, PyBytes_GET_SIZE(key)) & 0x7fffffff) % group->partitions;
}

static PyObject *
by_partition(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *records, *tokens;
    Py_ssize_t position;
    Group group;
    if (!PyArg_ParseTuple(arguments, "O!O!n(llLLn):by_partition", &PyList_Type, &records, &PyList_Type, &tokens, &position,
                          &group.partitions, &group.keyless, &group.oldest, &group.latest, &group.headers)) {
        return NULL;
    }
    if (position < 0 || position >= PyList_GET_SIZE(records) || group.partitions <= 0 || group.keyless < -1) {
        PyErr_SetString(PyExc_ValueError, "a position in the records, and a topic's partitions");
        return NULL;
    }
    PyObject *parts = PyDict_New();
    PyObject *first = PyList_GET_ITEM(records, position);
    group.topic = parts && is_record(first) ? Py_NewRef(field(first, of_record.topic)) : NULL;
    int failed = group.topic ? 0 : -1;
    while (!failed && position < PyList_GET_SIZE(records) && position < PyList_GET_SIZE(tokens)) {
        PyObject *record = Py_NewRef(PyList_GET_ITEM(records, position));
        PyObject *token = Py_NewRef(PyList_GET_ITEM(tokens, position)); /* comparing topics may change the lists */
        long number = find_partition(record, &group);
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
    Py_XDECREF(group.topic);
    Py_XDECREF(parts);
    return result;
}

static int
set_up(PyObject *module)
{
    static const Place places[] = {
        {&of_record.type, "topic", &of_record.topic},         {&of_record.type, "key", &of_record.key},
        {&of_record.type, "value", &of_record.value},         {&of_record.type, "headers", &of_record.headers},
        {&of_record.type, "timestamp", &of_record.timestamp}, {&of_record.type, "partition", &of_record.partition},
    };
    return look_up("mapping.record", "Record", &of_record.type) < 0 || FIND_FIELDS(places) < 0
                   || add_type(module, &buffer_spec) < 0
               ? -1
               : 0;
}

static PyMethodDef functions[] = {
    {"partition_of", (PyCFunction)(void (*)(void))partition_of, METH_FASTCALL,
     PyDoc_STR("The partition of a key; see murmur2.py.")},
    {"by_partition", by_partition, METH_VARARGS,
     PyDoc_STR("Records of one topic by their partitions; see murmur2.py.")},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE("gateway.kafka.publish._native",
              "Records of a batch and partitions of keys, in C; record_buffer.py and murmur2.py are the same.")
