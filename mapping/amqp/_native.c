/*
 * From an AMQP message to a record, in C: `mapping.amqp.incoming.to_record` for what real clients send.
 *
 * The Python code is the reference. Whatever is not handled here, and whatever is refused, is left to it: one call of
 * `Mapper.record` gives the same record or the same error for every input (tests, and `loadtest.bench.amqp_mutated`).
 * Nothing is read that was not first measured against the end of what it is in.
 *
 * Handled are messages of these sections, each with its descriptor as a ulong of one or eight bytes:
 *   header, message annotations, properties, application properties   all optional, in short and long form
 *   one Data section, or an amqp-value that is a string, a binary or null   in short and long form
 * whose values are simple types: no compound, no array, no described value, no char, no decimal.
 */
#include "protocols/native.h"

#include <stdint.h>
#include <structmember.h>

typedef enum { FAILED = -1, LEFT = 0, TAKEN = 1 } Verdict; /* a Python error is set; for the reference; done */

#define PROPERTIES_LIMIT 13    /* part 3.2.4 */
#define APPLICATION_LIMIT 256  /* entries of application properties; more are left */
#define HEADERS_LIMIT (PROPERTIES_LIMIT + APPLICATION_LIMIT + 8)
#define NOW_LIMIT (INT64_C(1) << 60)  /* epoch milliseconds, so that no sum with a ttl overflows */
#define NAMES_KNOWN 256               /* places of names of application properties; a power of two */

enum { HEADER = 0x70, ANNOTATIONS = 0x72, PROPERTIES = 0x73, APPLICATION = 0x74, DATA = 0x75, SEQUENCE = 0x76, VALUE = 0x77 };

/* Properties by their places (part 3.2.4); those that are not named are strings. */
enum {
    MESSAGE_ID = 0, USER_ID = 1, TO = 2, CORRELATION_ID = 5, CONTENT_TYPE = 6, EXPIRY = 8, CREATION = 9, GROUP_ID = 10,
    GROUP_SEQUENCE = 11,
};

/* What is taken from the Python modules once, so that every name is written down in one place. */
static struct {
    PyObject *durable, *priority, *types, *body, *sections; /* names of headers */
    PyObject *properties[PROPERTIES_LIMIT];                                     /* likewise, in the order of part 3.2.4 */
    PyObject *one, *text_form, *binary_form, *null_form;                        /* values of headers */
    PyObject *json;        /* likewise: the content type of JSON */
    PyObject *header_name; /* the header's name for an application property's */
    PyObject *to_value;    /* the record's value for a body that is taken apart in Python */
    PyObject *to_record;   /* the reference */
    PyObject *record;      /* the type */
    int64_t window;        /* CREATION_WINDOW_MS */
} py;

/* Names of application properties that were seen: applications have few. The oldest of a place gives way. */
static struct {
    PyObject *raw, *name;
} known_names[NAMES_KNOWN];

/* Messages to one destination. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t left;                                     /* messages that were mapped by the reference */
    PyObject *destination;
    PyObject *topic, *key, *partition, *headers;         /* of its records */
    PyObject *address, *user;                            /* bytes */
    int64_t before, after;                               /* how far from now the topic lets a timestamp be, in ms */
    int64_t partitions, partition_number;                /* -1: the address names none */
} Mapper;

/* One message on its way; what it owns is in `headers`, `key` and `value`. */
typedef struct {
    const Mapper *to;
    PyObject *data;
    int64_t now;
    PyObject *key, *value;
    int64_t partition;            /* -1: none */
    int64_t expiry, timestamp;    /* where `expires` and `stamped` say so */
    int own_key, expires, stamped;
    int exact;                    /* whether the sections header is needed */
    int exact_body;               /* whether it is to have the body, too */
    Py_ssize_t count;
    PyObject *headers[HEADERS_LIMIT];
} Message;

typedef struct {
    int code;
    const uint8_t *start, *value, *end; /* of the section; of its value's constructor; behind it */
} Section;

/* Bytes */

static inline uint32_t
read_u32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline uint64_t
read_u64(const uint8_t *at)
{
    return (uint64_t)read_u32(at) << 32 | read_u32(at + 4);
}

/* Two's complement without implementation-defined conversions. */
static inline int64_t
as_signed(uint64_t raw)
{
    return raw > INT64_MAX ? -(int64_t)(UINT64_MAX - raw) - 1 : (int64_t)raw;
}

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

static inline int
continues(uint8_t byte)
{
    return (byte & 0xC0) == 0x80;
}

/* RFC 3629, as Python decodes: no overlong form, no surrogate, nothing above U+10FFFF. */
static int
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

static PyObject *
bytes_of(const uint8_t *at, size_t size)
{
    return PyBytes_FromStringAndSize((const char *)at, (Py_ssize_t)size);
}

static char *
write_hex(char *out, const uint8_t *at, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    for (; size; at++, size--) {
        *out++ = digits[*at >> 4];
        *out++ = digits[*at & 15];
    }
    return out;
}

/* A number behind `prefix`, which has at most 16 bytes. */
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

static PyObject *
decimal(int64_t value)
{
    return decimal_behind("", value < 0, value < 0 ? UINT64_C(0) - (uint64_t)value : (uint64_t)value);
}

/* As `str(uuid)` behind `prefix`, which has at most 16 bytes. */
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

/* A simple value: its constructor, and its content without a length. */
typedef struct {
    uint8_t code;
    const uint8_t *at;
    size_t size;
} Simple;

/* Read the simple value at `*place`, which is moved behind it; LEFT when it is none or reaches beyond `end`. */
static Verdict
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

static inline int
is_string(uint8_t code)
{
    return code == 0xA1 || code == 0xB1;
}
static inline int
is_symbol(uint8_t code)
{
    return code == 0xA3 || code == 0xB3;
}
static inline int
is_binary(uint8_t code)
{
    return code == 0xA0 || code == 0xB0;
}

/* Whether strings and symbols have the characters that they may. */
static int
is_sound(const Simple *value)
{
    if (is_string(value->code)) {
        return is_utf8(value->at, value->size);
    }
    return !is_symbol(value->code) || is_ascii(value->at, value->size);
}

/* The integer of any width; 0 when it is none, or is above what 63 bits hold. */
static int
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

/* A uint (part 1.6.8) */
static int
read_uint(const Simple *value, int64_t *found)
{
    return (value->code == 0x43 || value->code == 0x52 || value->code == 0x70) && read_integer(value, found);
}

/* The text of an application property's value, and its letter (`mapping.amqp.values`). NULL without an error: left. */
static PyObject *
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

/* The text of a message or correlation id (`mapping.amqp.values.id_text`). NULL without an error: left. */
static PyObject *
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

/* Sections */

/* The section at `at`; LEFT when its form is not one of those that are handled, or it reaches beyond `end`. */
static Verdict
read_section(const uint8_t *at, const uint8_t *end, Section *found)
{
    static const uint8_t wide[] = {0, 0x80, 0, 0, 0, 0, 0, 0, 0}; /* the ulong in eight bytes but for its last one */
    found->start = at;
    if (end - at > 3 && at[0] == 0 && at[1] == 0x53) {
        found->code = at[2];
        at += 3;
    }
    else if (end - at > 10 && !memcmp(at, wide, sizeof wide)) {
        found->code = at[9];
        at += 10;
    }
    else {
        return LEFT;
    }
    found->value = at;
    size_t left = (size_t)(end - at) - 1;
    switch (*at++) {
    case 0x40: case 0x45:
        found->end = at;
        return TAKEN;
    case 0xA0: case 0xA1: case 0xC0: case 0xC1:
        if (left < 1 || at[0] > left - 1) {
            return LEFT;
        }
        found->end = at + 1 + at[0];
        return TAKEN;
    case 0xB0: case 0xB1: case 0xD0: case 0xD1:
        if (left < 4 || read_u32(at) > left - 4) {
            return LEFT;
        }
        found->end = at + 4 + read_u32(at);
        return TAKEN;
    default:
        return LEFT;
    }
}

/* Where the items of a section's list (or map) begin, and their number; LEFT when it is none. */
static Verdict
read_items(const Section *section, int map, const uint8_t **place, uint32_t *count)
{
    const uint8_t *at = section->value;
    size_t left = (size_t)(section->end - at);
    if (at[0] == 0x45 && !map) {
        *count = 0;
        *place = at + 1;
    }
    else if (at[0] == 0xC0 + map && left >= 3) {
        *count = at[2];
        *place = at + 3;
    }
    else if (at[0] == 0xD0 + map && left >= 9) {
        *count = read_u32(at + 5);
        *place = at + 9;
    }
    else {
        return LEFT;
    }
    return TAKEN;
}

/* Append a header; `value` is taken over, and NULL means LEFT, or FAILED with an error. */
static Verdict
put(Message *message, PyObject *name, PyObject *value)
{
    if (!value) {
        return PyErr_Occurred() ? FAILED : LEFT;
    }
    PyObject *header = message->count < HEADERS_LIMIT ? PyTuple_New(2) : NULL;
    if (!header) {
        Py_DECREF(value);
        return PyErr_Occurred() ? FAILED : LEFT;
    }
    Py_INCREF(name);
    PyTuple_SET_ITEM(header, 0, name);
    PyTuple_SET_ITEM(header, 1, value);
    PyObject_GC_UnTrack(header); /* a string and bytes: no cycle goes through it */
    message->headers[message->count++] = header;
    return TAKEN;
}

static void
set_key(Message *message, PyObject *key)
{
    PyObject *before = message->key;
    message->key = key;
    Py_XDECREF(before);
}

static Verdict
take_header(Message *message, const Section *section)
{
    static const uint8_t plain[] = {0x00, 0x53, 0x70, 0xC0, 0x02, 0x01, 0x41}; /* durable alone: `PLAIN_HEADER` */
    const uint8_t *place;
    uint32_t count;
    if (!read_items(section, 0, &place, &count) || count > 5) {
        return LEFT;
    }
    for (uint32_t index = 0; index < count; index++) {
        Simple value;
        int64_t number;
        if (!read_simple(&place, section->end, &value)) {
            return LEFT;
        }
        if (value.code == 0x40) {
            continue;
        }
        int boolean = value.code == 0x41 || value.code == 0x42 || value.code == 0x56;
        switch (index) {
        case 0: /* durable */
            if (!boolean) {
                return LEFT;
            }
            if (value.code == 0x42 || (value.code == 0x56 && !value.at[0])) {
                break;
            }
            Py_INCREF(py.one);
            if (put(message, py.durable, py.one) != TAKEN) {
                return FAILED;
            }
            break;
        case 1: /* priority, of which 4 is the default */
            if (value.code != 0x50) {
                return LEFT;
            }
            if (value.at[0] != 4 && put(message, py.priority, decimal(value.at[0])) != TAKEN) {
                return FAILED;
            }
            break;
        case 2: /* ttl */
            if (!read_uint(&value, &number)) {
                return LEFT;
            }
            message->expires = 1;
            message->expiry = message->now + number;
            break;
        case 3: /* first-acquirer */
            if (!boolean) {
                return LEFT;
            }
            break;
        default: /* delivery-count */
            if (!read_uint(&value, &number)) {
                return LEFT;
            }
        }
    }
    if (place != section->end) {
        return LEFT;
    }
    message->exact = section->end - section->start != sizeof plain || memcmp(section->start, plain, sizeof plain) != 0;
    return TAKEN;
}

static inline int
is_named(const Simple *value, const char *name, size_t size)
{
    return value->size == size && !memcmp(value->at, name, size);
}
#define IS_NAMED(value, name) is_named(value, name, sizeof(name) - 1)

/* Whether it is one of `COORDINATE_NAMES`: what the record says anyway. */
static int
is_coordinate(const Simple *name)
{
    return IS_NAMED(name, "x-opt-bridge.topic") || IS_NAMED(name, "x-opt-bridge.partition")
        || IS_NAMED(name, "x-opt-bridge.key") || IS_NAMED(name, "x-opt-bridge.offset")
        || IS_NAMED(name, "x-opt-sequence-number") || IS_NAMED(name, "x-opt-enqueued-time")
        || IS_NAMED(name, "x-opt-offset") || IS_NAMED(name, "x-opt-bridge.tombstone");
}

static Verdict
take_annotations(Message *message, const Section *section)
{
    const uint8_t *place;
    uint32_t count;
    if (!read_items(section, 1, &place, &count) || count % 2) {
        return LEFT;
    }
    for (; count; count -= 2) {
        Simple name, value;
        if (!read_simple(&place, section->end, &name) || !read_simple(&place, section->end, &value)) {
            return LEFT;
        }
        if (!(is_symbol(name.code) || is_string(name.code)) || !is_sound(&name) || !is_sound(&value)) {
            return LEFT;
        }
        if (!is_coordinate(&name)) {
            message->exact = 1;
        }
        if (IS_NAMED(&name, "x-opt-bridge.key") || (IS_NAMED(&name, "x-opt-partition-key") && !message->own_key)) {
            if (value.code == 0x40) {
                continue;
            }
            if (!is_string(value.code) && !is_symbol(value.code) && !is_binary(value.code)) {
                return LEFT;
            }
            PyObject *key = bytes_of(value.at, value.size);
            if (!key) {
                return FAILED;
            }
            set_key(message, key);
            message->own_key = 1;
        }
        else if (IS_NAMED(&name, "x-opt-bridge.partition")) {
            if (value.code == 0x40) {
                continue;
            }
            if (!read_integer(&value, &message->partition) || message->partition < 0) {
                return LEFT;
            }
        }
        else if (IS_NAMED(&name, "x-opt-delivery-time") || IS_NAMED(&name, "x-opt-delivery-delay")) {
            return LEFT;
        }
    }
    return place == section->end ? TAKEN : LEFT;
}

/* The record's timestamp, or a header, for a creation-time; see `mapping.amqp.incoming.creation_timestamp`. */
static Verdict
take_creation(Message *message, int64_t created)
{
    uint64_t now = (uint64_t)message->now, then = (uint64_t)created; /* differences of ordered values fit */
    int64_t before = message->to->before < py.window ? message->to->before : py.window;
    if (created <= message->now ? now - then <= (uint64_t)before : then - now <= (uint64_t)message->to->after) {
        message->stamped = 1;
        message->timestamp = created;
        return TAKEN;
    }
    return put(message, py.properties[CREATION], decimal(created));
}

static Verdict
take_properties(Message *message, const Section *section)
{
    const Mapper *to = message->to;
    const uint8_t *place;
    uint32_t count;
    int has_created = 0;
    int64_t created = 0, number;
    if (!read_items(section, 0, &place, &count) || count > PROPERTIES_LIMIT) {
        return LEFT;
    }
    for (uint32_t index = 0; index < count; index++) {
        Simple value;
        PyObject *text;
        if (!read_simple(&place, section->end, &value)) {
            return LEFT;
        }
        if (value.code == 0x40) {
            continue;
        }
        switch (index) {
        case MESSAGE_ID: case CORRELATION_ID:
            text = id_text(&value);
            break;
        case USER_ID:
            if (!is_binary(value.code) || value.size != (size_t)PyBytes_GET_SIZE(to->user)
                || memcmp(value.at, PyBytes_AS_STRING(to->user), value.size)) {
                return LEFT;
            }
            text = Py_NewRef(to->user);
            break;
        case EXPIRY: case CREATION:
            if (value.code != 0x83) {
                return LEFT;
            }
            number = as_signed(read_u64(value.at));
            if (index == CREATION) {
                has_created = 1;
                created = number;
            }
            else {
                if (!message->expires || number < message->expiry) {
                    message->expiry = number;
                }
                message->expires = 1;
            }
            continue;
        case GROUP_SEQUENCE:
            if (!read_uint(&value, &number)) {
                return LEFT;
            }
            text = decimal(number);
            break;
        default: /* a string; where a short symbol stands for one, it is taken for it, as the reference does */
            if (!(is_string(value.code) || value.code == 0xA3) || !is_utf8(value.at, value.size)) {
                return LEFT;
            }
            if (index == TO && value.size == (size_t)PyBytes_GET_SIZE(to->address)
                && !memcmp(value.at, PyBytes_AS_STRING(to->address), value.size)) {
                continue; /* `to` says what the link says */
            }
            text = bytes_of(value.at, value.size);
        }
        Verdict verdict = put(message, py.properties[index], text);
        if (verdict != TAKEN) {
            return verdict;
        }
        if (index == GROUP_ID && !message->own_key) {
            set_key(message, Py_NewRef(text)); /* the header keeps it */
        }
    }
    if (place != section->end) {
        return LEFT;
    }
    message->exact = 1;
    return has_created ? take_creation(message, created) : TAKEN;
}

/* The header's name for an application property's, a new reference. NULL without an error: left. */
static PyObject *
name_of(const Simple *raw)
{
    size_t hash = raw->size;
    for (size_t index = 0; index < raw->size; index++) {
        hash = hash * 31 + raw->at[index];
    }
    hash = (hash ^ hash >> 8) % NAMES_KNOWN;
    PyObject *known = known_names[hash].raw;
    if (known && (size_t)PyBytes_GET_SIZE(known) == raw->size
        && !memcmp(PyBytes_AS_STRING(known), raw->at, raw->size)) {
        return Py_NewRef(known_names[hash].name);
    }
    if (!is_utf8(raw->at, raw->size)) {
        return NULL;
    }
    PyObject *fresh = bytes_of(raw->at, raw->size);
    PyObject *name = fresh ? PyObject_CallOneArg(py.header_name, fresh) : NULL;
    if (!name) {
        Py_XDECREF(fresh);
        return NULL;
    }
    PyObject *old_raw = known_names[hash].raw, *old_name = known_names[hash].name; /* the call may have changed them */
    known_names[hash].raw = fresh;
    known_names[hash].name = Py_NewRef(name);
    Py_XDECREF(old_raw);
    Py_XDECREF(old_name);
    return name;
}

static Verdict
take_application_properties(Message *message, const Section *section)
{
    char letters[APPLICATION_LIMIT];
    const uint8_t *place;
    uint32_t count;
    int plain = 1; /* all are strings */
    if (!read_items(section, 1, &place, &count) || count % 2 || count / 2 > APPLICATION_LIMIT) {
        return LEFT;
    }
    count /= 2;
    for (uint32_t index = 0; index < count; index++) {
        Simple raw, value;
        if (!read_simple(&place, section->end, &raw) || raw.code != 0xA1) {
            return LEFT;
        }
        if (!read_simple(&place, section->end, &value)) {
            return LEFT;
        }
        PyObject *name = name_of(&raw);
        if (!name) {
            return PyErr_Occurred() ? FAILED : LEFT;
        }
        Verdict verdict = put(message, name, property_text(&value, &letters[index]));
        Py_DECREF(name);
        if (verdict != TAKEN) {
            return verdict;
        }
        if (letters[index] != 's') {
            plain = 0;
        }
    }
    if (place != section->end) {
        return LEFT;
    }
    message->exact = 1;
    return plain ? TAKEN : put(message, py.types, bytes_of((const uint8_t *)letters, count));
}

/* The value of the header `amqp.body`; `prefix` is what stands before the content where it is not the shortest form. */
static PyObject *
form_of(const char *kind, const Section *section, const uint8_t *content, int with_size)
{
    char text[8 + 2 * 15 + 1 + 20], *out = text; /* a descriptor of ten bytes, a constructor and four of length */
    size_t size = strlen(kind);
    memcpy(out, kind, size);
    out = write_hex(out + size, section->start, (size_t)(content - section->start));
    *out++ = '/';
    if (with_size) {
        out += snprintf(out, 20, "%zu", (size_t)(section->end - content));
    }
    return PyBytes_FromStringAndSize(text, out - text);
}

/* The header `content-type` for JSON of our making, if there is none. */
static Verdict
put_json_type(Message *message)
{
    PyObject *name = py.properties[CONTENT_TYPE];
    for (Py_ssize_t index = 0; index < message->count; index++) {
        if (PyTuple_GET_ITEM(message->headers[index], 0) == name) {
            return TAKEN;
        }
    }
    return put(message, name, Py_NewRef(py.json));
}

/* A map, a list or a sequence: what becomes of it is said in Python, `mapping.amqp.body`. */
static Verdict
take_compound(Message *message, const Section *section)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(message->data);
    PyObject *body = PyObject_CallFunction(py.to_value, "O[(innn)]", message->data, section->code,
                                           (Py_ssize_t)(section->start - data), (Py_ssize_t)(section->value - data),
                                           (Py_ssize_t)(section->end - data));
    if (!body) { /* the reference says what is wrong with it */
        PyErr_Clear();
        return LEFT;
    }
    PyObject *form = PyObject_GetAttrString(body, "form");
    PyObject *exact = PyObject_GetAttrString(body, "exact");
    PyObject *is_json = PyObject_GetAttrString(body, "is_json");
    message->value = PyObject_GetAttrString(body, "value");
    Verdict verdict = form && exact && is_json && message->value ? TAKEN : FAILED;
    if (verdict == TAKEN && exact != Py_None) {
        message->exact = message->exact_body = 1;
    }
    if (verdict == TAKEN && form != Py_None) {
        verdict = put(message, py.body, Py_NewRef(form));
    }
    if (verdict == TAKEN && is_json == Py_True) {
        verdict = put_json_type(message);
    }
    Py_DECREF(body);
    Py_XDECREF(form);
    Py_XDECREF(exact);
    Py_XDECREF(is_json);
    return verdict;
}

/* The record's value, and the header that says how the body had it. */
static Verdict
take_body(Message *message, const Section *section)
{
    uint8_t constructor = section->value[0];
    int usual = section->value - section->start == 3; /* the descriptor's form */
    int small = constructor == 0xA0 || constructor == 0xA1, text = is_string(constructor);
    if (section->code == VALUE && constructor == 0x40 && usual) {
        message->value = Py_NewRef(Py_None);
        return put(message, py.body, Py_NewRef(py.null_form));
    }
    if (section->code != DATA && constructor >= 0xC0) {
        return section->code == VALUE || section->code == SEQUENCE ? take_compound(message, section) : LEFT;
    }
    if (!(text && section->code == VALUE) && !(is_binary(constructor) && (section->code == VALUE || section->code == DATA))) {
        return LEFT;
    }
    const uint8_t *content = section->value + (small ? 2 : 5);
    size_t size = (size_t)(section->end - content);
    if (text && !is_utf8(content, size)) {
        return LEFT;
    }
    message->value = bytes_of(content, size);
    if (!message->value) {
        return FAILED;
    }
    int shortest = usual && (small || size > 255);
    if (section->code == DATA) {
        return shortest ? TAKEN : put(message, py.body, form_of("data:", section, content, 1));
    }
    if (shortest) {
        return put(message, py.body, Py_NewRef(text ? py.text_form : py.binary_form));
    }
    return put(message, py.body, form_of(text ? "v:str:" : "v:bin:", section, content, 0));
}

/* All of a message but the tuple of its headers. */
static Verdict
take_message(Message *message)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(message->data);
    const uint8_t *end = data + PyBytes_GET_SIZE(message->data);
    Section section;
    Verdict verdict = read_section(data, end, &section);
    static const struct {
        int code;
        Verdict (*take)(Message *, const Section *);
    } before_body[] = {
        {HEADER, take_header},
        {ANNOTATIONS, take_annotations},
        {PROPERTIES, take_properties},
        {APPLICATION, take_application_properties},
    };
    for (size_t index = 0; index < sizeof before_body / sizeof before_body[0]; index++) {
        if (verdict != TAKEN) {
            return verdict;
        }
        if (section.code != before_body[index].code) {
            continue;
        }
        verdict = before_body[index].take(message, &section);
        if (verdict == TAKEN) {
            verdict = read_section(section.end, end, &section);
        }
    }
    if (verdict != TAKEN) {
        return verdict;
    }
    if (section.end != end || message->partition >= message->to->partitions) {
        return LEFT;
    }
    if (message->expires) {
        if (message->expiry <= message->now) {
            return LEFT;
        }
        verdict = put(message, py.properties[EXPIRY], decimal(message->expiry));
        if (verdict != TAKEN) {
            return verdict;
        }
    }
    verdict = take_body(message, &section);
    if (verdict == TAKEN && message->exact) {
        const uint8_t *behind = message->exact_body ? end : section.start;
        verdict = put(message, py.sections, bytes_of(data, (size_t)(behind - data)));
    }
    return verdict;
}

/* The headers of the destination and those of the message; the message's are taken over. */
static PyObject *
all_headers(Message *message)
{
    PyObject *common = message->to->headers;
    if (!message->count) {
        return Py_NewRef(common);
    }
    Py_ssize_t before = PyTuple_GET_SIZE(common);
    PyObject *all = PyTuple_New(before + message->count);
    if (!all) {
        return NULL;
    }
    for (Py_ssize_t index = 0; index < before; index++) {
        PyTuple_SET_ITEM(all, index, Py_NewRef(PyTuple_GET_ITEM(common, index)));
    }
    for (Py_ssize_t index = 0; index < message->count; index++) {
        PyTuple_SET_ITEM(all, before + index, message->headers[index]);
    }
    message->count = 0;
    return all;
}

static PyObject *
make_record(Message *message)
{
    const Mapper *to = message->to;
    PyObject *headers = all_headers(message);
    PyObject *timestamp = message->stamped ? PyLong_FromLongLong(message->timestamp) : Py_NewRef(Py_None);
    PyObject *partition = message->partition == to->partition_number ? Py_NewRef(to->partition)
                                                                     : PyLong_FromLongLong(message->partition);
    PyObject *record = NULL;
    if (headers && timestamp && partition) {
        PyObject *fields[] = {
            to->topic, message->key ? message->key : to->key, message->value, headers, timestamp, partition,
        };
        record = PyObject_Vectorcall(py.record, fields, 6, NULL);
    }
    Py_XDECREF(headers);
    Py_XDECREF(timestamp);
    Py_XDECREF(partition);
    return record;
}

/* Mapper */

static PyObject *
map_message(Mapper *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2 || !PyBytes_CheckExact(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "record(data: bytes, now_ms: int)");
        return NULL;
    }
    int overflow;
    long long now = PyLong_AsLongLongAndOverflow(arguments[1], &overflow);
    if (now == -1 && PyErr_Occurred()) {
        return NULL;
    }
    Message message; /* its headers are not cleared: `count` says how many there are */
    message.to = self;
    message.data = arguments[0];
    message.now = now;
    message.key = message.value = NULL;
    message.partition = self->partition_number;
    message.own_key = message.expires = message.stamped = message.exact = message.exact_body = 0;
    message.count = 0;

    PyObject *record = NULL;
    Verdict verdict = !overflow && now >= 0 && now < NOW_LIMIT ? take_message(&message) : LEFT;
    if (verdict == TAKEN) {
        record = make_record(&message);
    }
    for (Py_ssize_t index = 0; index < message.count; index++) {
        Py_DECREF(message.headers[index]);
    }
    Py_XDECREF(message.key);
    Py_XDECREF(message.value);
    if (verdict != LEFT) {
        return record;
    }
    self->left++;
    PyObject *all[] = {arguments[0], self->destination, arguments[1]};
    return PyObject_Vectorcall(py.to_record, all, 3, NULL);
}

static int64_t
integer_of(PyObject *from, const char *name)
{
    PyObject *found = PyObject_GetAttrString(from, name);
    int64_t value = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return value;
}

static PyObject *
text_of(PyObject *from, const char *name)
{
    PyObject *found = PyObject_GetAttrString(from, name);
    PyObject *encoded = found ? PyUnicode_AsUTF8String(found) : NULL;
    Py_XDECREF(found);
    return encoded;
}

/* Read the destination. -1, with an exception, when it is none. */
static int
fill(Mapper *self, PyObject *destination)
{
    self->destination = Py_NewRef(destination);
    self->topic = PyObject_GetAttrString(destination, "topic");
    self->key = PyObject_GetAttrString(destination, "key");
    self->partition = PyObject_GetAttrString(destination, "partition");
    self->headers = PyObject_GetAttrString(destination, "headers");
    self->address = PyObject_GetAttrString(destination, "address_bytes");
    self->user = text_of(destination, "user");
    if (!self->topic || !self->key || !self->partition || !self->headers || !self->address || !self->user) {
        return -1;
    }
    if (!PyTuple_Check(self->headers) || !PyBytes_Check(self->address)) {
        PyErr_SetString(PyExc_TypeError, "a destination's headers are a tuple, its address is bytes");
        return -1;
    }
    self->before = integer_of(destination, "before_ms");
    self->after = PyErr_Occurred() ? -1 : integer_of(destination, "after_ms");
    self->partitions = PyErr_Occurred() ? -1 : integer_of(destination, "partitions");
    if (PyErr_Occurred()) {
        return -1;
    }
    self->partition_number = self->partition == Py_None ? -1 : PyLong_AsLongLong(self->partition);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (self->before < 0 || self->after < 0 || self->partition_number < -1) {
        PyErr_SetString(PyExc_ValueError, "a negative number in a destination");
        return -1;
    }
    return 0;
}

static PyObject *
mapper_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *destination;
    static char *names[] = {"", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O:Mapper", names, &destination)) {
        return NULL;
    }
    Mapper *self = (Mapper *)type->tp_alloc(type, 0);
    if (self && fill(self, destination) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void
mapper_dealloc(Mapper *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->destination);
    Py_XDECREF(self->topic);
    Py_XDECREF(self->key);
    Py_XDECREF(self->partition);
    Py_XDECREF(self->headers);
    Py_XDECREF(self->address);
    Py_XDECREF(self->user);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"record", (PyCFunction)(void (*)(void))map_message, METH_FASTCALL, PyDoc_STR("As `to_record`.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"destination", T_OBJECT_EX, offsetof(Mapper, destination), READONLY, PyDoc_STR("where they go")},
    {"left", T_PYSSIZET, offsetof(Mapper, left), READONLY, PyDoc_STR("messages that were mapped by `to_record`")},
    {NULL, 0, 0, 0, NULL},
};

/* What it refers to are strings, bytes and numbers: no cycle can go through it, so the collector need not know it. */
static PyType_Slot mapper_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Maps the messages of one destination; see incoming.py.")},
    {Py_tp_new, mapper_new},
    {Py_tp_dealloc, mapper_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec mapper_spec = {
    .name = "mapping.amqp._native.Mapper",
    .basicsize = sizeof(Mapper),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = mapper_slots,
};

/* Module */

static int
look_up(const char *module_name, const char *name, PyObject **found)
{
    PyObject *module = PyImport_ImportModule(module_name);
    *found = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return *found ? 0 : -1;
}

static int
look_up_all(PyObject *Py_UNUSED(module))
{
    static const struct {
        const char *module, *name;
        PyObject **found;
    } wanted[] = {
        {"mapping.record", "AMQP_DURABLE", &py.durable},
        {"mapping.record", "AMQP_PRIORITY", &py.priority},
        {"mapping.record", "AMQP_TYPES", &py.types},
        {"mapping.record", "AMQP_BODY", &py.body},
        {"mapping.record", "AMQP_SECTIONS", &py.sections},
        {"mapping.record", "Record", &py.record},
        {"mapping.amqp.values", "header_name", &py.header_name},
        {"mapping.amqp.body", "JSON_TYPE", &py.json},
        {"mapping.amqp.body", "to_value", &py.to_value},
        {"mapping.amqp.incoming", "to_record", &py.to_record},
    };
    static const char *const properties[PROPERTIES_LIMIT] = {
        "MESSAGE_ID", "USER_ID", "TO", "SUBJECT", "REPLY_TO", "CORRELATION_ID", "CONTENT_TYPE", "CONTENT_ENCODING",
        "EXPIRY", "CREATION_TIME", "GROUP_ID", "GROUP_SEQUENCE", "REPLY_TO_GROUP_ID",
    };
    for (size_t index = 0; index < sizeof wanted / sizeof wanted[0]; index++) {
        if (look_up(wanted[index].module, wanted[index].name, wanted[index].found) < 0) {
            return -1;
        }
    }
    for (size_t index = 0; index < PROPERTIES_LIMIT; index++) {
        if (look_up("mapping.record", properties[index], &py.properties[index]) < 0) {
            return -1;
        }
    }
    PyObject *window;
    if (look_up("mapping.amqp.incoming", "CREATION_WINDOW_MS", &window) < 0) {
        return -1;
    }
    py.window = PyLong_AsLongLong(window);
    Py_DECREF(window);
    py.one = PyBytes_FromString("1");
    py.text_form = PyBytes_FromString("v:str");
    py.binary_form = PyBytes_FromString("v:bin");
    py.null_form = PyBytes_FromString("v:null");
    return py.one && py.text_form && py.binary_form && py.null_form && !PyErr_Occurred() ? 0 : -1;
}

static int
add_type(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &mapper_spec, NULL);
    if (!type) {
        return -1;
    }
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, refuse_when_switched_off},
    {Py_mod_exec, look_up_all},
    {Py_mod_exec, add_type},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mapping.amqp._native",
    .m_doc = PyDoc_STR("From AMQP messages to records, in C; incoming.py is the same in Python."),
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
