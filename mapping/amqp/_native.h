/* Shared declarations of `mapping.amqp._native`; `_native.c` describes the module. */
#ifndef TRIVIUM_MAPPING_AMQP_NATIVE_H
#define TRIVIUM_MAPPING_AMQP_NATIVE_H

#include "protocols/native.h"

#include <stdint.h>

#define PROPERTIES_LIMIT 13    /* part 3.2.4 */
#define APPLICATION_LIMIT 256  /* entries of application properties; a message with more is left to the reference */
#define HEADERS_LIMIT (PROPERTIES_LIMIT + APPLICATION_LIMIT + 8)

enum { HEADER = 0x70, ANNOTATIONS = 0x72, PROPERTIES = 0x73, APPLICATION = 0x74, DATA = 0x75, SEQUENCE = 0x76, VALUE = 0x77 };

/* Properties by their index (part 3.2.4); the others are strings. */
enum {
    MESSAGE_ID = 0, USER_ID = 1, TO = 2, CORRELATION_ID = 5, CONTENT_TYPE = 6, EXPIRY = 8, CREATION = 9, GROUP_ID = 10,
    GROUP_SEQUENCE = 11,
};

/* Objects that are imported once from the Python modules, so that every name is defined in one place. */
struct Constants {
    PyObject *durable, *priority, *types, *body, *sections; /* header names */
    PyObject *properties;                                   /* tuple of header names, in the order of part 3.2.4 */
    PyObject *one, *text_form, *binary_form, *null_form;    /* header values */
    PyObject *json;        /* a header value: the content type of JSON */
    PyObject *header_name; /* function: the header name for an application property's name */
    PyObject *to_value;    /* function: converts a body that is not converted in C */
    PyObject *to_record;   /* function: the reference */
    PyObject *record, *destination, *stored_body; /* the types Record, Destination, Body */
    int64_t window;        /* CREATION_WINDOW_MS */
};
extern struct Constants py;

/* Positions of fields of a Destination and a Body. */
struct Places {
    Py_ssize_t topic, address, partition, key, user, headers, before, after, partitions;
    Py_ssize_t value, form, exact, is_json;
};
extern struct Places fields_at;

/* The header name of a property. */
static inline PyObject *
property_name(uint32_t index)
{
    return PyTuple_GET_ITEM(py.properties, index);
}

/* Maps the messages of one destination. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t left;                       /* messages mapped by the reference */
    PyObject *destination;                 /* a Destination, which is frozen */
    PyObject *user;                        /* its user as bytes */
    int64_t before, after;                 /* limits of a timestamp, in ms before and after now */
    int64_t partitions, partition_number;  /* partition_number is -1 when the address names none */
} Mapper;

/* One message while it is mapped; it owns references in `headers`, `key` and `value`. */
typedef struct {
    const Mapper *to;
    PyObject *data;
    int64_t now;
    PyObject *key, *value;
    int64_t partition;            /* -1 means none */
    int64_t expiry, timestamp;    /* valid if `expires` or `stamped` is set */
    int own_key, expires, stamped;
    int exact;                    /* whether the sections header is needed */
    int exact_body;               /* whether it includes the body */
    Py_ssize_t count;
    PyObject *headers[HEADERS_LIMIT];
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

/* Two's complement without implementation-defined conversions. */
static inline int64_t
as_signed(uint64_t raw)
{
    return raw > INT64_MAX ? -(int64_t)(UINT64_MAX - raw) - 1 : (int64_t)raw;
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

int is_utf8(const uint8_t *at, size_t size);
PyObject *bytes_of(const uint8_t *at, size_t size);
char *write_hex(char *out, const uint8_t *at, size_t size);
PyObject *decimal(int64_t value);
Verdict read_simple(const uint8_t **place, const uint8_t *end, Simple *found);
int is_sound(const Simple *value);
int is_true(const Simple *value);
int64_t read_signed(const Simple *value);
int read_integer(const Simple *value, int64_t *found);
int read_uint(const Simple *value, int64_t *found);
PyObject *property_text(const Simple *value, char *letter);
PyObject *id_text(const Simple *value);

/* Sections: `_native_sections.c`; `put` appends a header */

Verdict read_section(const uint8_t *at, const uint8_t *end, Section *found);
Verdict put(Message *message, PyObject *name, PyObject *value);
Verdict take_header(Message *message, const Section *section);
Verdict take_annotations(Message *message, const Section *section);
Verdict take_properties(Message *message, const Section *section);
Verdict take_application_properties(Message *message, const Section *section);

/* The body: `_native_body.c` */

Verdict take_body(Message *message, const Section *section, const uint8_t *end);

/* Records to messages: `_native_outgoing.c` */

PyObject *from_records(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
int look_up_outgoing(void);

#endif
