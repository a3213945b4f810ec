/* Mapping the sections before the body to the record's headers, key, partition and timestamp. */
#include "mapping/amqp/_native.h"

#define NAME_SLOTS 256 /* slots of the name cache; a power of two */
#define CACHED_NAME 100 /* bytes; a longer name is not cached */

/* Cache of application properties' names: applications use few. A new name replaces the former one in its slot. */
static struct {
    PyObject *raw, *name;
} cached_names[NAME_SLOTS];

/* Sections */

/* Read the section at `at`; LEFT when its encoding is not handled here, or it reaches beyond `end`. */
Verdict
read_section(const uint8_t *at, const uint8_t *end, Section *found)
{
    static const uint8_t wide[] = {0, 0x80, 0, 0, 0, 0, 0, 0, 0}; /* a ulong of eight bytes without the last one */
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

/* Find the first item of a section's list (or map) and their number; LEFT when it is no list (or map). */
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

/* Append a header; steals the reference to `value`. A NULL value gives FAILED if an error is set, else LEFT. */
Verdict
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
    PyObject_GC_UnTrack(header); /* it holds a string and bytes, so it cannot be part of a cycle */
    message->headers[message->count++] = header;
    return TAKEN;
}

Verdict
take_header(Message *message, const Section *section)
{
    static const uint8_t plain[] = {0x00, 0x53, 0x70, 0xC0, 0x02, 0x01, 0x41}; /* only durable=true: `PLAIN_HEADER` */
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
        Verdict verdict = TAKEN;
        switch (index) {
        case 0: case 3: /* durable, first-acquirer */
            if (!boolean) {
                return LEFT;
            }
            if (index == 0 && is_true(&value)) {
                verdict = put(message, py.durable, Py_NewRef(py.one));
            }
            break;
        case 1: /* priority; the default is 4 */
            if (value.code != 0x50) {
                return LEFT;
            }
            if (value.at[0] != 4) {
                verdict = put(message, py.priority, decimal(value.at[0]));
            }
            break;
        default: /* ttl, delivery-count */
            if (!read_uint(&value, &number)) {
                return LEFT;
            }
            if (index == 2) {
                message->expires = 1;
                message->expiry = message->now + number;
            }
        }
        if (verdict != TAKEN) {
            return verdict;
        }
    }
    if (place != section->end) {
        return LEFT;
    }
    message->exact = section->end - section->start != sizeof plain || memcmp(section->start, plain, sizeof plain) != 0;
    return TAKEN;
}

static inline int
is_same(const Simple *value, const char *name, size_t size)
{
    return value->size == size && !memcmp(value->at, name, size);
}
#define IS_NAMED(value, name) is_same(value, name, sizeof(name) - 1)

static inline int
is_bytes(const Simple *value, PyObject *bytes)
{
    return is_same(value, PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes));
}

/* Whether an annotation's name is one of `COORDINATE_NAMES`, which repeat the record's coordinates. */
static int
is_coordinate(const Simple *name)
{
    return IS_NAMED(name, "x-opt-bridge.topic") || IS_NAMED(name, "x-opt-bridge.partition")
        || IS_NAMED(name, "x-opt-bridge.key") || IS_NAMED(name, "x-opt-bridge.offset")
        || IS_NAMED(name, "x-opt-sequence-number") || IS_NAMED(name, "x-opt-enqueued-time")
        || IS_NAMED(name, "x-opt-offset") || IS_NAMED(name, "x-opt-bridge.tombstone");
}

Verdict
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
            Py_XSETREF(message->key, key);
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

/* Set the record's timestamp from a creation-time, or add a header; see `mapping.amqp.incoming._timestamp`. */
static Verdict
take_creation(Message *message, int64_t created)
{
    uint64_t now = (uint64_t)message->now, then = (uint64_t)created; /* unsigned, so their difference cannot overflow */
    int64_t before = message->to->before < py.window ? message->to->before : py.window;
    if (created <= message->now ? now - then <= (uint64_t)before : then - now <= (uint64_t)message->to->after) {
        message->stamped = 1;
        message->timestamp = created;
        return TAKEN;
    }
    return put(message, property_name(CREATION), decimal(created));
}

Verdict
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
            if (!is_binary(value.code) || !is_bytes(&value, to->user)) {
                return LEFT;
            }
            text = Py_NewRef(to->user);
            break;
        case EXPIRY: case CREATION:
            if (value.code != 0x83) {
                return LEFT;
            }
            number = read_signed(&value);
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
        default: /* a string; a short symbol is accepted as one, as in the reference */
            if (!(is_string(value.code) || value.code == 0xA3) || !is_utf8(value.at, value.size)) {
                return LEFT;
            }
            if (index == TO && is_bytes(&value, field(to->destination, fields_at.address))) {
                continue; /* it repeats the link's address */
            }
            text = bytes_of(value.at, value.size);
        }
        Verdict verdict = put(message, property_name(index), text);
        if (verdict != TAKEN) {
            return verdict;
        }
        if (index == GROUP_ID && !message->own_key) {
            Py_XSETREF(message->key, Py_NewRef(text)); /* the header holds the other reference */
        }
    }
    if (place != section->end) {
        return LEFT;
    }
    message->exact = 1;
    return has_created ? take_creation(message, created) : TAKEN;
}

/* Return the header name of an application property, a new reference; NULL without an error means LEFT. */
static PyObject *
name_of(const Simple *raw)
{
    size_t hash = raw->size;
    for (size_t index = 0; index < raw->size; index++) {
        hash = hash * 31 + raw->at[index];
    }
    hash = (hash ^ hash >> 8) % NAME_SLOTS;
    PyObject *known = cached_names[hash].raw;
    if (known && is_bytes(raw, known)) {
        return Py_NewRef(cached_names[hash].name);
    }
    if (!is_utf8(raw->at, raw->size)) {
        return NULL;
    }
    PyObject *fresh = bytes_of(raw->at, raw->size);
    PyObject *name = fresh ? PyObject_CallFunction(py.header_name, "s#", raw->at, (Py_ssize_t)raw->size) : NULL;
    if (!name) {
        Py_XDECREF(fresh);
        return NULL;
    }
    if (raw->size > CACHED_NAME) {
        Py_DECREF(fresh);
        return name;
    }
    PyObject *old_raw = cached_names[hash].raw, *old_name = cached_names[hash].name; /* the call may have replaced them */
    cached_names[hash].raw = fresh;
    cached_names[hash].name = Py_NewRef(name);
    Py_XDECREF(old_raw);
    Py_XDECREF(old_name);
    return name;
}

Verdict
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
