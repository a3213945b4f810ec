/* Reading and checking bytes and simple values (part 1.6), and converting them to header text. */
#include "mapping/amqp/_native.h"

/* Bytes */

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

/* RFC 3629, as Python decodes: no overlong form, no surrogate, nothing above U+10FFFF. */
int
is_utf8(const uint8_t *at, size_t size)
{
    if (is_ascii(at, size)) {
        return 1;
    }
    const uint8_t *end = at + size;
    while (at < end) {
        uint8_t lead = *at++;
        if (lead < 0x80) {
            continue;
        }
        int following = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
        if (lead < 0xC2 || lead > 0xF4 || end - at < following) {
            return 0;
        }
        uint8_t least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80; /* of the second byte */
        uint8_t most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        for (; following; following--, at++, least = 0x80, most = 0xBF) {
            if (*at < least || *at > most) {
                return 0;
            }
        }
    }
    return 1;
}

PyObject *
bytes_of(const uint8_t *at, size_t size)
{
    return PyBytes_FromStringAndSize((const char *)at, (Py_ssize_t)size);
}

char *
write_hex(char *out, const uint8_t *at, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    for (; size; at++, size--) {
        *out++ = digits[*at >> 4];
        *out++ = digits[*at & 15];
    }
    return out;
}

/* Format a number after `prefix`, which has at most 16 bytes. */
static PyObject *
decimal_behind(const char *prefix, int negative, uint64_t magnitude)
{
    char text[40], *at = text + sizeof text;
    do *--at = (char)('0' + magnitude % 10);
    while (magnitude /= 10);
    if (negative) {
        *--at = '-';
    }
    size_t size = strlen(prefix);
    at -= size;
    memcpy(at, prefix, size);
    return PyBytes_FromStringAndSize(at, text + sizeof text - at);
}

PyObject *
decimal(int64_t value)
{
    return decimal_behind("", value < 0, value < 0 ? UINT64_C(0) - (uint64_t)value : (uint64_t)value);
}

/* Format a UUID like `str(uuid)` after `prefix`, which has at most 16 bytes. */
static PyObject *
uuid_behind(const char *prefix, const uint8_t *at)
{
    static const uint8_t groups[] = {4, 2, 2, 2, 6};
    char text[16 + 36 + 1], *out = text;
    size_t size = strlen(prefix);
    memcpy(out, prefix, size);
    out += size;
    for (size_t group = 0; group < sizeof groups; at += groups[group++]) {
        if (group) {
            *out++ = '-';
        }
        out = write_hex(out, at, groups[group]);
    }
    return PyBytes_FromStringAndSize(text, out - text);
}

static PyObject *
repr_of(double value)
{
    char *text = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (!text) {
        return NULL;
    }
    PyObject *found = PyBytes_FromString(text);
    PyMem_Free(text);
    return found;
}

/* Values (part 1.6) */

/* The types that are handled here, by constructor: letters of `mapping.amqp.values`, which in capitals are unsigned. */
static const char letters[256] = {
    [0x40] = 'n', [0x41] = 'b', [0x42] = 'b', [0x56] = 'b',
    [0x50] = 'B', [0x60] = 'H', [0x70] = 'I', [0x52] = 'I', [0x43] = 'I', [0x80] = 'L', [0x53] = 'L', [0x44] = 'L',
    [0x51] = 'g', [0x61] = 'h', [0x71] = 'i', [0x54] = 'i', [0x81] = 'l', [0x55] = 'l',
    [0x72] = 'f', [0x82] = 'd', [0x83] = 't', [0x98] = 'u',
    [0xA0] = 'x', [0xB0] = 'x', [0xA1] = 's', [0xB1] = 's', [0xA3] = 'y', [0xB3] = 'y',
};

/* Read the simple value at `*place` and advance `*place`; LEFT when it is not simple or reaches beyond `end`. */
Verdict
read_simple(const uint8_t **place, const uint8_t *end, Simple *found)
{
    static const uint8_t widths[] = {0, 1, 2, 4, 8, 16}; /* of constructors 0x4. to 0x9. */
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

/* Whether a boolean is true. */
int
is_true(const Simple *value)
{
    return value->code == 0x41 || (value->code == 0x56 && value->at[0]);
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

/* Read a number in two's complement of up to eight bytes. */
int64_t
read_signed(const Simple *value)
{
    uint64_t sign = value->size ? UINT64_C(1) << (8 * value->size - 1) : 0;
    return as_signed((read_bits(value) ^ sign) - sign);
}

/* Read an integer of any width; return 0 when it is no integer or does not fit int64_t. */
int
read_integer(const Simple *value, int64_t *found)
{
    char letter = letters[value->code];
    if (!strchr("BHILghil", letter)) {
        return 0;
    }
    int is_signed = letter >= 'a';
    *found = is_signed ? read_signed(value) : as_signed(read_bits(value));
    return is_signed || *found >= 0;
}

/* Read a uint (part 1.6.8); return 0 when it is none. */
int
read_uint(const Simple *value, int64_t *found)
{
    return letters[value->code] == 'I' && read_integer(value, found);
}

/* Return an application property's text and type letter (`mapping.amqp.values`); NULL without an error means LEFT. */
PyObject *
property_text(const Simple *value, char *letter)
{
    *letter = letters[value->code];
    switch (*letter) {
    case 'n': Py_RETURN_NONE;
    case 'b': return PyBytes_FromString(is_true(value) ? "true" : "false");
    case 'f': {
        uint32_t bits = read_u32(value->at);
        float narrow;
        memcpy(&narrow, &bits, sizeof narrow);
        return repr_of((double)narrow);
    }
    case 'd': {
        uint64_t bits = read_bits(value);
        double wide;
        memcpy(&wide, &bits, sizeof wide);
        return repr_of(wide);
    }
    case 'u': return uuid_behind("", value->at);
    case 'x': case 'y': case 's': return is_sound(value) ? bytes_of(value->at, value->size) : NULL;
    case 'B': case 'H': case 'I': case 'L': return decimal_behind("", 0, read_bits(value));
    default: return decimal(read_signed(value)); /* signed, or a timestamp */
    }
}

/* Return the text of a message or correlation id (`mapping.amqp.values.id_text`); NULL without an error means LEFT. */
PyObject *
id_text(const Simple *value)
{
    switch (value->code) {
    case 0x44: case 0x53: case 0x80: return decimal_behind("AMQP_ULONG:", 0, read_bits(value));
    case 0x98: return uuid_behind("AMQP_UUID:", value->at);
    case 0xA1: case 0xA3: case 0xB1: {
        int is_escaped = value->size >= 5 && !memcmp(value->at, "AMQP_", 5);
        return is_escaped || !is_utf8(value->at, value->size) ? NULL : bytes_of(value->at, value->size);
    }
    default: return NULL;
    }
}
