/* Shared declarations of `mapping.amqp._native`; `_native.c` describes the module. */
#ifndef TRIVIUM_MAPPING_AMQP_NATIVE_H
#define TRIVIUM_MAPPING_AMQP_NATIVE_H

#include "protocols/native.h"

#include <inttypes.h>
#include <stdint.h>

enum { HEADER = 0x70, ANNOTATIONS = 0x72, PROPERTIES = 0x73, APPLICATION = 0x74, DATA = 0x75, SEQUENCE = 0x76, VALUE = 0x77 };

/* Properties by their index (part 3.2.4) that are more than a string. */
enum {
    MESSAGE_ID = 0, USER_ID = 1, TO = 2, CORRELATION_ID = 5, CONTENT_TYPE = 6, EXPIRY = 8, CREATION = 9, GROUP_ID = 10,
    GROUP_SEQUENCE = 11,
};
#define PROPERTIES_LIMIT 13
#define APPLICATION_LIMIT 64 /* application properties; a message with more is left to the reference */
#define HEADERS_LIMIT (PROPERTIES_LIMIT + APPLICATION_LIMIT + 8)

/* Objects that are imported once from the Python modules, so that every name is defined in one place. */
struct Constants {
    PyObject *types, *body, *sections;             /* header names */
    PyObject *properties;                          /* tuple of header names, in the order of part 3.2.4 */
    PyObject *text_form, *binary_form, *json;      /* header values */
    PyObject *header_fields; /* function: the fields of a short header section, cached */
    PyObject *header_name;   /* function: the header name for an application property's name */
    PyObject *to_value;      /* function: converts a body that is not converted in C */
    PyObject *to_record;     /* function: the reference */
    PyObject *record, *destination, *stored_body; /* the types Record, Destination, Body */
};
extern struct Constants py;

/* Positions of fields of an AmqpDestination and a Body. */
struct Places {
    Py_ssize_t topic, address, partition, key, user, headers, partitions;
    Py_ssize_t value, form, exact, is_json;
};
extern struct Places fields_at;

/* The header name of a property. */
static inline PyObject *
property_name(uint32_t index)
{
    return PyTuple_GET_ITEM(py.properties, index);
}

/* One message while it is mapped; it owns the references in `headers`, `key` and `value`. */
typedef struct {
    PyObject *data, *to; /* bytes; an AmqpDestination, which is frozen */
    int64_t now;
    PyObject *key, *value;     /* the key is NULL while the message has none of its own */
    int64_t expiry; /* valid if `expires` is set */
    int expires;
    int has_type;   /* whether it has a content-type */
    int exact;      /* whether the sections header is needed */
    int exact_body; /* whether it includes the body */
    Py_ssize_t count;
    PyObject *headers[HEADERS_LIMIT]; /* valid up to `count` */
} Message;

typedef struct {
    int code;
    const uint8_t *start, *value, *end; /* start of the section; constructor of its value; end of the section */
} Section;

/* A simple value: its constructor, and its content without the length. */
typedef struct {
    uint8_t code;
    const uint8_t *at;
    size_t size;
} Simple;

/* Bytes and values: `_native_values.c` */

static inline uint32_t
read_u32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
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

static inline int
is_uint(uint8_t code)
{
    return code == 0x70 || code == 0x52 || code == 0x43;
}

static inline PyObject *
bytes_of(const uint8_t *at, size_t size)
{
    return PyBytes_FromStringAndSize((const char *)at, (Py_ssize_t)size);
}

int is_utf8(const uint8_t *at, size_t size);
PyObject *decimal(int64_t value);
Verdict read_simple(const uint8_t **place, const uint8_t *end, Simple *found);
int is_sound(const Simple *value);
int64_t read_signed(const Simple *value);
PyObject *property_text(const Simple *value, char *letter);

/* Sections and the body: `_native_sections.c`; `put` appends a header */

Verdict read_section(const uint8_t *at, const uint8_t *end, Section *found);
Verdict put(Message *message, PyObject *name, PyObject *value);
Verdict take_header(Message *message, const Section *section);
Verdict take_annotations(Message *message, const Section *section);
Verdict take_properties(Message *message, const Section *section);
Verdict take_application_properties(Message *message, const Section *section);
Verdict take_body(Message *message, const Section *section, const uint8_t *end);

/* Records to messages: `_native_outgoing.c` */

PyObject *from_records(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
int look_up_outgoing(void);

#endif
