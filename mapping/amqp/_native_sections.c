/* Mapping a message's sections to the record's headers, key and value. */
#include "mapping/amqp/_native.h"

#define SHORT_HEADER 100 /* bytes; a longer header section is left to the reference, which does not cache it */
#define NAME_SLOTS 256   /* a power of two */

/* Cache of application properties' names: applications use few. A new name replaces the former one in its slot. */
static struct CachedName {
    PyObject *name; /* the header's */
    size_t size;
    char raw[255]; /* a longer name is left to the reference */
} cached_names[NAME_SLOTS];

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
    PyTuple_SET_ITEM(header, 0, Py_NewRef(name));
    PyTuple_SET_ITEM(header, 1, value);
    PyObject_GC_UnTrack(header); /* it holds a string and bytes, so it cannot be part of a cycle */
    message->headers[message->count++] = header;
    return TAKEN;
}

/* Before the body */

Verdict
take_header(Message *message, const Section *section)
{
    static const uint8_t plain[] = {0x00, 0x53, 0x70, 0xC0, 0x02, 0x01, 0x41}; /* only durable=true: `PLAIN_HEADER` */
    static PyObject *plain_fields; /* of the plain header, once it was seen */
    message->exact = section->end - section->start != sizeof plain || memcmp(section->start, plain, sizeof plain) != 0;
    PyObject *found = Py_XNewRef(message->exact ? NULL : plain_fields); /* headers, ttl */
    if (!found) {
        size_t size = (size_t)(section->end - section->value);
        PyObject *raw = size <= SHORT_HEADER ? bytes_of(section->value, size) : NULL;
        found = raw ? PyObject_CallOneArg(py.header_fields, raw) : NULL;
        Py_XDECREF(raw);
    }
    if (!found) {
        PyErr_Clear(); /* the reference raises it again */
        return LEFT;
    }
    if (!message->exact && !plain_fields) {
        plain_fields = Py_NewRef(found);
    }
    Verdict verdict = TAKEN;
    PyObject *headers = PyTuple_GET_ITEM(found, 0), *ttl = PyTuple_GET_ITEM(found, 1);
    for (Py_ssize_t index = 0; verdict == TAKEN && index < PyTuple_GET_SIZE(headers); index++) {
        PyObject *header = PyTuple_GET_ITEM(headers, index);
        verdict = put(message, PyTuple_GET_ITEM(header, 0), Py_NewRef(PyTuple_GET_ITEM(header, 1)));
    }
    if (verdict == TAKEN && ttl != Py_None) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(ttl, &overflow);
        if (number < 0 || number > UINT32_MAX) { /* also in an overflow, which gives -1 */
            verdict = LEFT;
        }
        else {
            message->expires = 1;
            message->expiry = message->now + number;
        }
    }
    Py_DECREF(found);
    return verdict;
}

static inline int
is_same(const Simple *value, const char *name, size_t size)
{
    return value->size == size && !memcmp(value->at, name, size);
}
#define IS_NAMED(value, name) is_same(value, name, sizeof(name) - 1)
#define BEGINS_WITH(value, start)                                                                                      \
    ((value)->size >= sizeof(start) - 1 && !memcmp((value)->at, start, sizeof(start) - 1))

/* Of the annotations that begin with `x-opt-`, only those of JMS and those that set the key are taken here. */
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
        if (!is_symbol(name.code) || !is_sound(&name) || !is_sound(&value)) {
            return LEFT;
        }
        int own = IS_NAMED(&name, "x-opt-bridge.key"), other = IS_NAMED(&name, "x-opt-partition-key");
        if (!own) { /* ours only repeats a coordinate of the record */
            message->exact = 1;
        }
        if (own || other) {
            if (value.code == 0x40 || (other && message->key)) {
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
        }
        else if (BEGINS_WITH(&name, "x-opt-") && !BEGINS_WITH(&name, "x-opt-jms-")) {
            return LEFT;
        }
    }
    return place == section->end ? TAKEN : LEFT;
}

Verdict
take_properties(Message *message, const Section *section)
{
    PyObject *address = field(message->to, fields_at.address);
    const uint8_t *place;
    uint32_t count;
    int has_created = 0;
    int64_t created = 0;
    if (!read_items(section, 0, &place, &count) || count > PROPERTIES_LIMIT) {
        return LEFT;
    }
    for (uint32_t index = 0; index < count; index++) {
        Simple value;
        if (!read_simple(&place, section->end, &value)) {
            return LEFT;
        }
        if (value.code == 0x40) {
            continue;
        }
        if (index == EXPIRY || index == CREATION) {
            if (value.code != 0x83) {
                return LEFT;
            }
            int64_t time = read_signed(&value);
            if (index == CREATION) {
                has_created = 1;
                created = time;
            }
            else if (!message->expires || time < message->expiry) {
                message->expires = 1;
                message->expiry = time;
            }
            continue;
        }
        if (index == USER_ID) {
            Py_ssize_t size;
            const char *user = PyUnicode_AsUTF8AndSize(field(message->to, fields_at.user), &size);
            if (!user || !is_binary(value.code) || !is_same(&value, user, (size_t)size)) {
                PyErr_Clear(); /* the reference refuses it */
                return LEFT;
            }
        }
        else if (index == GROUP_SEQUENCE) {
            if (!is_uint(value.code)) {
                return LEFT;
            }
        }
        /* The others are strings; a short symbol is accepted as one, as in the reference. */
        else if (!(is_string(value.code) || value.code == 0xA3) || !is_utf8(value.at, value.size)) {
            return LEFT;
        }
        if ((index == MESSAGE_ID || index == CORRELATION_ID) && BEGINS_WITH(&value, "AMQP_")) {
            return LEFT;
        }
        if (index == TO && is_same(&value, PyBytes_AS_STRING(address), (size_t)PyBytes_GET_SIZE(address))) {
            continue; /* it repeats the link's address */
        }
        char letter;
        PyObject *text = index == GROUP_SEQUENCE ? property_text(&value, &letter) : bytes_of(value.at, value.size);
        Verdict verdict = put(message, property_name(index), text);
        if (verdict != TAKEN) {
            return verdict;
        }
        if (index == GROUP_ID && !message->key) {
            message->key = Py_NewRef(text); /* the header holds the other reference */
        }
        message->has_type |= index == CONTENT_TYPE;
    }
    if (place != section->end) {
        return LEFT;
    }
    message->exact = 1;
    return has_created ? put(message, property_name(CREATION), decimal(created)) : TAKEN;
}

/* Return the header name of an application property, a new reference; NULL without an error means LEFT. */
static PyObject *
name_of(const Simple *raw)
{
    size_t hash = raw->size;
    for (size_t index = 0; index < raw->size; index++) {
        hash = hash * 31 + raw->at[index];
    }
    struct CachedName *slot = &cached_names[(hash ^ hash >> 8) % NAME_SLOTS];
    if (slot->name && is_same(raw, slot->raw, slot->size)) {
        return Py_NewRef(slot->name);
    }
    PyObject *name = PyObject_CallFunction(py.header_name, "s#", raw->at, (Py_ssize_t)raw->size);
    if (!name) {
        PyErr_Clear(); /* it is not UTF-8, which the reference refuses */
        return NULL;
    }
    memcpy(slot->raw, raw->at, raw->size);
    slot->size = raw->size;
    Py_XSETREF(slot->name, Py_NewRef(name));
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
        plain &= letters[index] == 's';
    }
    if (place != section->end) {
        return LEFT;
    }
    message->exact = 1;
    return plain ? TAKEN : put(message, py.types, bytes_of((const uint8_t *)letters, count));
}

/* The body */

/* Return the header `amqp.body` of a binary or string that is not in the shortest encoding. */
static PyObject *
form_of(const char *kind, const Section *section, const uint8_t *content)
{
    static const char digits[] = "0123456789abcdef";
    char text[64], *out = text + strlen(kind); /* kind; hex of descriptor (10), constructor and length (5); slash; size */
    memcpy(text, kind, strlen(kind));
    for (const uint8_t *at = section->start; at < content; at++) {
        *out++ = digits[*at >> 4];
        *out++ = digits[*at & 15];
    }
    *out++ = '/';
    if (section->code == DATA) {
        out += snprintf(out, 21, "%zu", (size_t)(section->end - content));
    }
    return PyBytes_FromStringAndSize(text, out - text);
}

/* Map a null, a map, a list or a sequence with the Python code, `mapping.amqp.body`. */
static Verdict
take_compound(Message *message, const Section *section)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(message->data);
    PyObject *body = PyObject_CallFunction(py.to_value, "O[(innn)]", message->data, section->code,
                                           (Py_ssize_t)(section->start - data), (Py_ssize_t)(section->value - data),
                                           (Py_ssize_t)(section->end - data));
    if (!body || (PyObject *)Py_TYPE(body) != py.stored_body) { /* the reference raises the error again */
        Py_XDECREF(body);
        PyErr_Clear();
        return LEFT;
    }
    Verdict verdict = TAKEN;
    message->value = Py_NewRef(field(body, fields_at.value));
    if (field(body, fields_at.exact) != Py_None) {
        message->exact = message->exact_body = 1;
    }
    if (field(body, fields_at.form) != Py_None) {
        verdict = put(message, py.body, Py_NewRef(field(body, fields_at.form)));
    }
    if (verdict == TAKEN && field(body, fields_at.is_json) == Py_True && !message->has_type) {
        verdict = put(message, property_name(CONTENT_TYPE), Py_NewRef(py.json));
    }
    Py_DECREF(body);
    return verdict;
}

/* Map the body, one section with which the message ends; a message with more is left to the reference. */
Verdict
take_body(Message *message, const Section *section, const uint8_t *end)
{
    const uint8_t *at = section->value;
    int is_text = is_string(*at), is_data = section->code == DATA;
    if (section->end != end || section->code < DATA || section->code > VALUE) {
        return LEFT;
    }
    if (section->code == SEQUENCE || !(is_binary(*at) || (is_text && !is_data))) {
        return take_compound(message, section);
    }
    const uint8_t *content = at + (*at < 0xB0 ? 2 : 5);
    size_t size = (size_t)(end - content);
    if (is_text && !is_utf8(content, size)) {
        return LEFT;
    }
    message->value = bytes_of(content, size);
    if (!message->value) {
        return FAILED;
    }
    if (at - section->start != 3 || (*at >= 0xB0 && size < 256)) {
        return put(message, py.body, form_of(is_data ? "data:" : is_text ? "v:str:" : "v:bin:", section, content));
    }
    return is_data ? TAKEN : put(message, py.body, Py_NewRef(is_text ? py.text_form : py.binary_form));
}
