/* Reading and checking bytes and simple values (part 1.6), and converting them to header text. */
#include "mapping/amqp/_native.h"

static int
is_ascii(const uint8_t *at, size_t size)
{
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        if (word & UINT64_C(0x8080808080808080)) {
            return 0;
        }
    }
    for (; size; at++, size--) {
        if (*at & 0x80) {
            return 0;
        }
    }
    return 1;
}

/* Whether Python decodes it. */
int
is_utf8(const uint8_t *at, size_t size)
{
    if (is_ascii(at, size)) {
        return 1;
    }
    PyObject *text = PyUnicode_DecodeUTF8((const char *)at, (Py_ssize_t)size, NULL);
    if (!text) {
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(text);
    return 1;
}

PyObject *
decimal(int64_t value)
{
    char text[24];
    return PyBytes_FromStringAndSize(text, snprintf(text, sizeof text, "%" PRId64, value));
}

/* The types that are handled here, by constructor: letters of `mapping.amqp.values`, which in capitals are unsigned. */
static const char letters[256] = {
    [0x40] = 'n', [0x41] = 'b', [0x42] = 'b', [0x56] = 'b',
    [0x50] = 'B', [0x60] = 'H', [0x70] = 'I', [0x52] = 'I', [0x43] = 'I', [0x80] = 'L', [0x53] = 'L', [0x44] = 'L',
    [0x51] = 'g', [0x61] = 'h', [0x71] = 'i', [0x54] = 'i', [0x81] = 'l', [0x55] = 'l', [0x72] = 'f',
    [0x82] = 'd', [0x83] = 't',
    [0xA0] = 'x', [0xB0] = 'x', [0xA1] = 's', [0xB1] = 's', [0xA3] = 'y', [0xB3] = 'y',
};

/* Read the simple value at `*place` and advance `*place`; LEFT when it is not handled or reaches beyond `end`. */
Verdict
read_simple(const uint8_t **place, const uint8_t *end, Simple *found)
{
    static const uint8_t widths[] = {0, 1, 2, 4, 8}; /* of constructors 0x4. to 0x8. */
    const uint8_t *at = *place;
    if (at >= end || !letters[*at]) {
        return LEFT;
    }
    size_t left = (size_t)(end - at) - 1;
    found->code = *at++;
    if (found->code < 0xA0) {
        found->size = widths[(found->code >> 4) - 4];
    }
    else {
        size_t length = found->code < 0xB0 ? 1 : 4;
        if (left < length) {
            return LEFT;
        }
        found->size = length == 1 ? *at : read_u32(at);
        at += length;
        left -= length;
    }
    if (found->size > left || (found->code == 0x56 && *at > 1)) {
        return LEFT;
    }
    found->at = at;
    *place = at + found->size;
    return TAKEN;
}

/* Whether a string is valid UTF-8 and a symbol ASCII; true for other types. */
int
is_sound(const Simple *value)
{
    if (is_string(value->code)) {
        return is_utf8(value->at, value->size);
    }
    return !is_symbol(value->code) || is_ascii(value->at, value->size);
}

/* Read the content of a fixed width up to eight bytes, in network order. */
static uint64_t
read_bits(const Simple *value)
{
    uint64_t bits = 0;
    for (size_t index = 0; index < value->size; index++) {
        bits = bits << 8 | value->at[index];
    }
    return bits;
}

/* Read a number in two's complement of one to eight bytes. */
int64_t
read_signed(const Simple *value)
{
    uint64_t sign = UINT64_C(1) << (8 * value->size - 1), bits = (read_bits(value) ^ sign) - sign;
    int64_t number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static PyObject *
repr_of(double value)
{
    char *text = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    PyObject *found = text ? PyBytes_FromString(text) : NULL;
    PyMem_Free(text);
    return found;
}

/* Return an application property's text and type letter (`mapping.amqp.values`); NULL without an error means LEFT. */
PyObject *
property_text(const Simple *value, char *letter)
{
    *letter = letters[value->code];
    switch (*letter) {
    case 'n': Py_RETURN_NONE;
    case 'b': return PyBytes_FromString(value->code == 0x41 || (value->code == 0x56 && *value->at) ? "true" : "false");
    case 'f': {
        uint32_t bits = read_u32(value->at);
        float number;
        memcpy(&number, &bits, sizeof number);
        return repr_of((double)number);
    }
    case 'd': {
        uint64_t bits = read_bits(value);
        double number;
        memcpy(&number, &bits, sizeof number);
        return repr_of(number);
    }
    case 'x': case 'y': case 's': return is_sound(value) ? bytes_of(value->at, value->size) : NULL;
    case 'B': case 'H': case 'I': case 'L': {
        char text[24];
        return PyBytes_FromStringAndSize(text, snprintf(text, sizeof text, "%" PRIu64, read_bits(value)));
    }
    default: return decimal(read_signed(value)); /* signed, or a timestamp */
    }
}
