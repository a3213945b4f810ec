/* Shared declarations of `protocols.mqtt._native`; `_native.c` describes the module. */
#ifndef TRIVIUM_PROTOCOLS_MQTT_NATIVE_H
#define TRIVIUM_PROTOCOLS_MQTT_NATIVE_H

#include "protocols/native.h"

#include <stdbool.h>

#define PAIRS 1024 /* most user properties of one message; Python handles more */

/* The properties of one PUBLISH. */
typedef struct {
    PyObject *properties; /* owned; NULL: none */
    PyObject *alias;      /* borrowed from `properties`; NULL: none */
    long alias_number;    /* 0: none */
    Py_ssize_t count;     /* of pairs */
    PyObject *pairs[PAIRS]; /* user properties; owned; only the first `count` are set, to save the time */
} Found;

static inline Py_ssize_t
two_bytes(const unsigned char *at)
{
    return (Py_ssize_t)at[0] << 8 | at[1];
}

/* Documented in _native_properties.c. */
bool read_varint(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, Py_ssize_t *value);
Verdict take_text(const unsigned char *at, Py_ssize_t size, bool name, PyObject **found);
Verdict take_properties(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, Found *found);
int look_up_properties(void);

#endif
