/* What the parts of protocols.amqp._native have in common. */
#ifndef TRIVIUM_AMQP_NATIVE_H
#define TRIVIUM_AMQP_NATIVE_H

#include "protocols/native.h"

#include <stdint.h>

PyObject *scan(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif
