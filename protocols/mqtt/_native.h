/* Shared declarations of `protocols.mqtt._native`; `_native.c` describes the module. */
#ifndef TRIVIUM_PROTOCOLS_MQTT_NATIVE_H
#define TRIVIUM_PROTOCOLS_MQTT_NATIVE_H

#include "protocols/native.h"

#include <stdbool.h>

#define PAIRS 1024 /* most user properties of one message; Python handles more */

/* The properties that a client may send in a PUBLISH (table 2-4), except user properties. */
typedef enum { FORMAT, EXPIRY, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION, ALIAS, KINDS } Kind;

/* The properties of one PUBLISH. */
typedef struct {
    PyObject *values[KINDS]; /* owned; NULL: absent */
    PyObject *pairs[PAIRS];  /* owned; only the first `count` are set, to save the time */
    Py_ssize_t count;        /* of pairs */
    long alias;              /* 0: none */
} Found;

static inline Py_ssize_t
two_bytes(const unsigned char *at)
{
    return (Py_ssize_t)at[0] << 8 | at[1];
}

/* Documented in _native_properties.c. */
bool read_varint(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, Py_ssize_t *value);
Verdict take_text(const unsigned char *at, Py_ssize_t size, bool name, PyObject **found);
Verdict take_properties(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, PyObject **properties, Found *found);
void clear_found(Found *found);
int look_up_properties(void);

#endif
