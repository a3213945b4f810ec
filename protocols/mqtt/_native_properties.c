/* MQTT's data types and a PUBLISH's properties, as in codec.py and properties.py; invalid ones are left to Python. */
#include "protocols/mqtt/_native.h"

#define LONGEST 28 /* maximum number of bits of a variable byte integer (section 1.5.5) */

static PyObject *type; /* `Properties` */
static Py_ssize_t user_place;

/* The properties that a client may send in a PUBLISH (table 2-4), except user properties. */
typedef enum { BYTES, TEXT, NAME, NUMBER } Kind;
static struct {
    unsigned char identifier;
    Kind kind;
    const char *name;
    int size; /* of a number, and its limits */
    unsigned long lowest, highest;
    Py_ssize_t place;
} table[] = {
    {0x01, NUMBER, "payload_format_indicator", 1, 0, 1, 0},
    {0x02, NUMBER, "message_expiry_interval", 4, 0, 0xffffffff, 0},
    {0x03, TEXT, "content_type", 0, 0, 0, 0},
    {0x08, NAME, "response_topic", 0, 0, 0, 0},
    {0x09, BYTES, "correlation_data", 0, 0, 0, 0},
    {0x23, NUMBER, "topic_alias", 2, 1, 0xffff, 0},
};
#define PROPERTIES (sizeof table / sizeof table[0])
#define USER_PROPERTY 0x26
#define TOPIC_ALIAS 0x23

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
    unsigned char identifier = data[(*at)++];
    if (identifier == USER_PROPERTY) {
        return take_pair(data, at, stop, found);
    }
    size_t row = 0;
    while (row < PROPERTIES && table[row].identifier != identifier) {
        row++;
    }
    if (row == PROPERTIES || field(found->properties, table[row].place) != Py_None) {
        return LEFT;
    }
    PyObject *value = NULL;
    const unsigned char *begin;
    Py_ssize_t size;
    Verdict verdict;
    if (table[row].kind == NUMBER) {
        verdict = take_number(data, at, stop, table[row].size, table[row].lowest, table[row].highest, &value);
    }
    else if (!read_sized(data, at, stop, &begin, &size)) {
        verdict = LEFT;
    }
    else if (table[row].kind == BYTES) {
        value = PyBytes_FromStringAndSize((const char *)begin, size);
        verdict = value ? TAKEN : FAILED;
    }
    else {
        verdict = take_text(begin, size, table[row].kind == NAME, &value);
    }
    if (verdict != TAKEN) {
        return verdict;
    }
    set_field(found->properties, table[row].place, value);
    if (identifier == TOPIC_ALIAS) {
        found->alias = value;
        found->alias_number = (long)two_bytes(data + *at - 2);
    }
    return TAKEN;
}

/* Parse the properties of a PUBLISH with their length prefix. The caller drops `found`, also after a failure. */
Verdict
take_properties(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, Found *found)
{
    Py_ssize_t length;
    if (!read_varint(data, at, end, &length) || length > end - *at) {
        return LEFT;
    }
    if (!length) {
        return TAKEN;
    }
    found->properties = PyObject_CallNoArgs(type);
    Verdict verdict = found->properties ? TAKEN : FAILED;
    Py_ssize_t stop = *at + length;
    while (verdict == TAKEN && *at < stop) {
        verdict = take_property(data, at, stop, found);
    }
    if (verdict == TAKEN && found->count) {
        PyObject *pairs = PyTuple_New(found->count);
        if (!pairs) {
            return FAILED;
        }
        while (found->count) { /* it takes the references over */
            found->count--;
            PyTuple_SET_ITEM(pairs, found->count, found->pairs[found->count]);
        }
        set_field(found->properties, user_place, pairs);
    }
    return verdict;
}

/* Look up the type `Properties`, and where its objects keep their fields. */
int
look_up_properties(void)
{
    int failed = look_up("protocols.mqtt.properties", "Properties", &type)
                 || find_fields(&(Place){&type, "user_properties", &user_place}, 1);
    for (size_t row = 0; !failed && row < PROPERTIES; row++) {
        failed = find_fields(&(Place){&type, table[row].name, &table[row].place}, 1);
    }
    return failed ? -1 : 0;
}
