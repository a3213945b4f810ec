/* Reading and checking bytes and simple values (part 1.6), and converting them to header text. */
#include "mapping/amqp/_native.h"

/* Bytes */

int
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

static inline int
continues(uint8_t byte)
{
    return (byte & 0xC0) == 0x80;
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
        uint8_t lead = *at;
        size_t left = (size_t)(end - at);
        if (lead < 0x80) {
            at++;
        }
        else if (lead >= 0xC2 && lead <= 0xDF) {
            if (left < 2 || !continues(at[1])) {
                return 0;
            }
            at += 2;
        }
        else if (lead >= 0xE0 && lead <= 0xEF) {
            if (left < 3 || !continues(at[1]) || !continues(at[2])) {
                return 0;
            }
            if ((lead == 0xE0 && at[1] < 0xA0) || (lead == 0xED && at[1] >= 0xA0)) {
                return 0;
            }
            at += 3;
        }
        else if (lead >= 0xF0 && lead <= 0xF4) {
            if (left < 4 || !continues(at[1]) || !continues(at[2]) || !continues(at[3])) {
                return 0;
            }
            if ((lead == 0xF0 && at[1] < 0x90) || (lead == 0xF4 && at[1] >= 0x90)) {
                return 0;
            }
            at += 4;
        }
        else {
            return 0;
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

/* Read the simple value at `*place` and advance `*place`; LEFT when it is not simple or reaches beyond `end`. */
Verdict
read_simple(const uint8_t **place, const uint8_t *end, Simple *found)
{
    const uint8_t *at = *place;
    if (at >= end) {
        return LEFT;
    }
    size_t left = (size_t)(end - at) - 1;
    found->code = *at++;
    switch (found->code) {
    case 0x40: case 0x41: case 0x42: case 0x43: case 0x44:
        found->size = 0;
        break;
    case 0x50: case 0x51: case 0x52: case 0x53: case 0x54: case 0x55:
        found->size = 1;
        break;
    case 0x56:
        if (left < 1 || *at > 1) {
            return LEFT;
        }
        found->size = 1;
        break;
    case 0x60: case 0x61:
        found->size = 2;
        break;
    case 0x70: case 0x71: case 0x72:
        found->size = 4;
        break;
    case 0x80: case 0x81: case 0x82: case 0x83:
        found->size = 8;
        break;
    case 0x98:
        found->size = 16;
        break;
    case 0xA0: case 0xA1: case 0xA3:
        if (left < 1) {
            return LEFT;
        }
        found->size = *at++;
        left -= 1;
        break;
    case 0xB0: case 0xB1: case 0xB3:
        if (left < 4) {
            return LEFT;
        }
        found->size = read_u32(at);
        at += 4;
        left -= 4;
        break;
    default:
        return LEFT;
    }
    if (found->size > left) {
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

/* Read an integer of any width; return 0 when it is no integer or does not fit int64_t. */
int
read_integer(const Simple *value, int64_t *found)
{
    const uint8_t *at = value->at;
    switch (value->code) {
    case 0x43: case 0x44: *found = 0; return 1;
    case 0x50: case 0x52: case 0x53: *found = at[0]; return 1;
    case 0x51: case 0x54: case 0x55: *found = at[0] < 0x80 ? at[0] : (int64_t)at[0] - 0x100; return 1;
    case 0x60: *found = (int64_t)at[0] << 8 | at[1]; return 1;
    case 0x61: *found = ((int64_t)at[0] << 8 | at[1]) - (at[0] < 0x80 ? 0 : 0x10000); return 1;
    case 0x70: *found = read_u32(at); return 1;
    case 0x71: *found = (int64_t)read_u32(at) - (at[0] < 0x80 ? 0 : INT64_C(0x100000000)); return 1;
    case 0x81: *found = as_signed(read_u64(at)); return 1;
    case 0x80: *found = as_signed(read_u64(at)); return at[0] < 0x80;
    default: return 0;
    }
}

/* Read a uint (part 1.6.8); return 0 when it is none. */
int
read_uint(const Simple *value, int64_t *found)
{
    return (value->code == 0x43 || value->code == 0x52 || value->code == 0x70) && read_integer(value, found);
}

/* Return an application property's text and type letter (`mapping.amqp.values`); NULL without an error means LEFT. */
PyObject *
property_text(const Simple *value, char *letter)
{
    const uint8_t *at = value->at;
    int64_t number;
    switch (value->code) {
    case 0x40: *letter = 'n'; Py_RETURN_NONE;
    case 0x41: *letter = 'b'; return PyBytes_FromString("true");
    case 0x42: *letter = 'b'; return PyBytes_FromString("false");
    case 0x56: *letter = 'b'; return PyBytes_FromString(at[0] ? "true" : "false");
    case 0x50: *letter = 'B'; break;
    case 0x60: *letter = 'H'; break;
    case 0x43: case 0x52: case 0x70: *letter = 'I'; break;
    case 0x44: case 0x53: *letter = 'L'; break;
    case 0x80: *letter = 'L'; return decimal_behind("", 0, read_u64(at));
    case 0x51: *letter = 'g'; break;
    case 0x61: *letter = 'h'; break;
    case 0x54: case 0x71: *letter = 'i'; break;
    case 0x55: case 0x81: *letter = 'l'; break;
    case 0x83: *letter = 't'; return decimal(as_signed(read_u64(at)));
    case 0x72: {
        uint32_t bits = read_u32(at);
        float narrow;
        memcpy(&narrow, &bits, sizeof narrow);
        *letter = 'f';
        return repr_of((double)narrow);
    }
    case 0x82: {
        uint64_t bits = read_u64(at);
        double wide;
        memcpy(&wide, &bits, sizeof wide);
        *letter = 'd';
        return repr_of(wide);
    }
    case 0x98: *letter = 'u'; return uuid_behind("", at);
    default:
        *letter = is_binary(value->code) ? 'x' : is_symbol(value->code) ? 'y' : 's';
        return is_sound(value) ? bytes_of(at, value->size) : NULL;
    }
    return read_integer(value, &number) ? decimal(number) : NULL;
}

/* Return the text of a message or correlation id (`mapping.amqp.values.id_text`); NULL without an error means LEFT. */
PyObject *
id_text(const Simple *value)
{
    switch (value->code) {
    case 0x44: return PyBytes_FromString("AMQP_ULONG:0");
    case 0x53: return decimal_behind("AMQP_ULONG:", 0, value->at[0]);
    case 0x80: return decimal_behind("AMQP_ULONG:", 0, read_u64(value->at));
    case 0x98: return uuid_behind("AMQP_UUID:", value->at);
    case 0xA0: {
        char text[12 + 2 * 255] = "AMQP_BINARY:";
        return PyBytes_FromStringAndSize(text, write_hex(text + 12, value->at, value->size) - text);
    }
    case 0xA1: case 0xA3: case 0xB1: {
        if (!is_utf8(value->at, value->size)) {
            return NULL;
        }
        if (value->size < 5 || memcmp(value->at, "AMQP_", 5)) {
            return bytes_of(value->at, value->size);
        }
        if (value->size > 255) {
            return NULL;
        }
        char text[12 + 255] = "AMQP_STRING:";
        memcpy(text + 12, value->at, value->size);
        return PyBytes_FromStringAndSize(text, (Py_ssize_t)(12 + value->size));
    }
    default: return NULL;
    }
}
