/* MQTT's data types and a PUBLISH's properties, as in codec.py and properties.py; invalid ones are left to Python. */
#include "protocols/mqtt/_native.h"

#define FIELDS 64  /* maximum number of fields of `Properties` */
#define LONGEST 28 /* maximum number of bits of a variable byte integer (section 1.5.5) */

/* Python objects and positions that are looked up once. */
static struct {
    PyObject *properties; /* the type */
    PyObject *defaults;   /* tuple of its fields' defaults */
    Py_ssize_t fields;    /* number of its fields */
    Py_ssize_t place[KINDS], user_place; /* indexes of fields */
} py;

/* Data types (section 1.5) */

/* Read a variable byte integer, and move behind it. False if it is incomplete or longer than needed. */
bool
read_varint(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, Py_ssize_t *value)
{
    *value = 0;
    for (int shift = 0; shift < LONGEST && *at < end; shift += 7) {
        unsigned char byte = data[(*at)++];
        *value |= (Py_ssize_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return byte || !shift;
        }
    }
    return false;
}

/* Whether a text is a valid topic name, as in `codec.decode_name` and `topics.is_valid_name`. */
static bool
is_name(PyObject *text)
{
    int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    Py_ssize_t size = PyUnicode_GET_LENGTH(text);
    for (Py_ssize_t index = 0; index < size; index++) {
        Py_UCS4 one = PyUnicode_READ(kind, data, index);
        if (one < 0x20 || one == '+' || one == '#' || (one >= 0x7f && one <= 0x9f) || (one >= 0xfdd0 && one <= 0xfdef)
            || (one & 0xfffe) == 0xfffe) {
            return false;
        }
    }
    return size > 0;
}

/* Decode a text into a new reference; LEFT if MQTT does not allow it. */
Verdict
take_text(const unsigned char *at, Py_ssize_t size, bool name, PyObject **found)
{
    if (memchr(at, 0, (size_t)size) != NULL) {
        return LEFT;
    }
    PyObject *text = PyUnicode_DecodeUTF8((const char *)at, size, NULL);
    if (text == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
            return FAILED;
        }
        PyErr_Clear();
        return LEFT;
    }
    if (name && !is_name(text)) {
        Py_DECREF(text);
        return LEFT;
    }
    *found = text;
    return TAKEN;
}

/* Read a two-byte length and the bytes behind it, and move behind them. */
static bool
read_sized(const unsigned char *data, Py_ssize_t *at, Py_ssize_t stop, const unsigned char **begin, Py_ssize_t *size)
{
    if (stop - *at < 2) {
        return false;
    }
    *size = two_bytes(data + *at);
    *begin = data + *at + 2;
    *at += 2 + *size;
    return *at <= stop;
}

/* Properties */

void
clear_found(Found *found)
{
    for (int kind = 0; kind < KINDS; kind++) {
        Py_CLEAR(found->values[kind]);
    }
    while (found->count) {
        Py_DECREF(found->pairs[--found->count]);
    }
}

static Verdict
take_pair(const unsigned char *data, Py_ssize_t *at, Py_ssize_t stop, Found *found)
{
    const unsigned char *name_at, *value_at;
    Py_ssize_t name_size, value_size;
    if (found->count == PAIRS || !read_sized(data, at, stop, &name_at, &name_size)
        || !read_sized(data, at, stop, &value_at, &value_size)) {
        return LEFT;
    }
    PyObject *name = NULL, *value = NULL, *pair = NULL;
    Verdict verdict = take_text(name_at, name_size, false, &name);
    if (verdict == TAKEN) {
        verdict = take_text(value_at, value_size, false, &value);
    }
    if (verdict == TAKEN) {
        pair = PyTuple_Pack(2, name, value);
        verdict = pair ? TAKEN : FAILED;
    }
    if (pair) {
        found->pairs[found->count++] = pair;
    }
    Py_XDECREF(name);
    Py_XDECREF(value);
    return verdict;
}

/* Read a number of `size` bytes; LEFT if it is outside `lowest`..`highest`. */
static Verdict
take_number(const unsigned char *data, Py_ssize_t *at, Py_ssize_t stop, int size, unsigned long lowest,
            unsigned long highest, PyObject **found)
{
    if (stop - *at < size) {
        return LEFT;
    }
    unsigned long value = 0;
    for (int index = 0; index < size; index++) {
        value = value << 8 | data[(*at)++];
    }
    if (value < lowest || value > highest) {
        return LEFT;
    }
    *found = PyLong_FromUnsignedLong(value);
    return *found ? TAKEN : FAILED;
}

static Verdict
take_property(const unsigned char *data, Py_ssize_t *at, Py_ssize_t stop, Found *found)
{
    static const struct {
        unsigned char identifier;
        unsigned char size;    /* of a number; 0: text or bytes */
        unsigned long lowest, highest;
    } table[KINDS] = {
        [FORMAT] = {0x01, 1, 0, 1},       [EXPIRY] = {0x02, 4, 0, 0xffffffff}, [CONTENT_TYPE] = {0x03, 0, 0, 0},
        [RESPONSE_TOPIC] = {0x08, 0, 0, 0}, [CORRELATION] = {0x09, 0, 0, 0},     [ALIAS] = {0x23, 2, 1, 0xffff},
    };
    unsigned char identifier = data[(*at)++];
    if (identifier == 0x26) {
        return take_pair(data, at, stop, found);
    }
    int kind = 0;
    while (kind < KINDS && table[kind].identifier != identifier) {
        kind++;
    }
    if (kind == KINDS || found->values[kind]) {
        return LEFT;
    }
    PyObject **value = &found->values[kind];
    if (table[kind].size) {
        Verdict verdict = take_number(data, at, stop, table[kind].size, table[kind].lowest, table[kind].highest, value);
        if (verdict == TAKEN && kind == ALIAS) {
            found->alias = (long)two_bytes(data + *at - 2);
        }
        return verdict;
    }
    const unsigned char *begin;
    Py_ssize_t size;
    if (!read_sized(data, at, stop, &begin, &size)) {
        return LEFT;
    }
    if (kind != CORRELATION) {
        return take_text(begin, size, kind == RESPONSE_TOPIC, value);
    }
    *value = PyBytes_FromStringAndSize((const char *)begin, size);
    return *value ? TAKEN : FAILED;
}

static PyObject *
make_properties(const Found *found)
{
    PyObject *pairs = NULL;
    PyObject *arguments[FIELDS];
    memcpy(arguments, &PyTuple_GET_ITEM(py.defaults, 0), (size_t)py.fields * sizeof *arguments);
    for (int kind = 0; kind < KINDS; kind++) {
        if (found->values[kind]) {
            arguments[py.place[kind]] = found->values[kind];
        }
    }
    if (found->count) {
        pairs = PyTuple_New(found->count);
        if (pairs == NULL) {
            return NULL;
        }
        for (Py_ssize_t number = 0; number < found->count; number++) {
            PyTuple_SET_ITEM(pairs, number, Py_NewRef(found->pairs[number]));
        }
        arguments[py.user_place] = pairs;
    }
    PyObject *properties = PyObject_Vectorcall(py.properties, arguments, (size_t)py.fields, NULL);
    Py_XDECREF(pairs);
    return properties;
}

/* Parse the properties of a PUBLISH with their length prefix; None if there are none. */
Verdict
take_properties(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, PyObject **properties, Found *found)
{
    Py_ssize_t length;
    if (!read_varint(data, at, end, &length) || length > end - *at) {
        return LEFT;
    }
    if (!length) {
        *properties = Py_NewRef(Py_None);
        return TAKEN;
    }
    Verdict verdict = TAKEN;
    Py_ssize_t stop = *at + length;
    while (verdict == TAKEN && *at < stop) {
        verdict = take_property(data, at, stop, found);
    }
    if (verdict == TAKEN) {
        *properties = make_properties(found);
        verdict = *properties ? TAKEN : FAILED;
    }
    return verdict;
}

static Py_ssize_t
place_of(PyObject *fields, const char *name)
{
    PyObject *text = PyUnicode_FromString(name);
    Py_ssize_t place = text ? PySequence_Index(fields, text) : -1;
    Py_XDECREF(text);
    return place;
}

/* Look up the type `Properties`, the indexes of its fields, and their defaults, which all must have. */
int
look_up_properties(void)
{
    static const char *const names[KINDS] = {
        [FORMAT] = "payload_format_indicator", [EXPIRY] = "message_expiry_interval",
        [CONTENT_TYPE] = "content_type",       [RESPONSE_TOPIC] = "response_topic",
        [CORRELATION] = "correlation_data",    [ALIAS] = "topic_alias",
    };
    PyObject *fields = look_up("protocols.mqtt.properties", "Properties", &py.properties) < 0
                           ? NULL
                           : PyObject_GetAttrString(py.properties, "__struct_fields__");
    py.defaults = fields ? PyObject_GetAttrString(py.properties, "__struct_defaults__") : NULL;
    int failed = py.defaults ? 0 : -1;
    for (int kind = 0; !failed && kind < KINDS; kind++) {
        py.place[kind] = place_of(fields, names[kind]);
        failed = py.place[kind] < 0;
    }
    if (!failed) {
        py.user_place = place_of(fields, "user_properties");
        py.fields = PyObject_Size(fields);
        failed = py.user_place < 0;
    }
    if (!failed && (!PyTuple_Check(py.defaults) || PyTuple_GET_SIZE(py.defaults) != py.fields || py.fields > FIELDS)) {
        PyErr_SetString(PyExc_ImportError, "Properties has unexpected fields");
        failed = 1;
    }
    Py_XDECREF(fields);
    return failed ? -1 : 0;
}
