/* Maps runs of consecutive PUBLISHes to records, as runs.py does. The Python code is the reference; the tests check
   that both give equal results. */
#include "protocols/native.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define DIGITS 24                     /* maximum length of a number, with its sign */
#define NOW_LIMIT (INT64_C(1) << 60)  /* limit of epoch milliseconds, so that no sum with an expiry overflows */

/* Python objects that are looked up once. */
static struct {
    PyObject *publish, *properties, *route, *record;          /* the types */
    PyObject *reserved, *prefixes, *stored_name;              /* for header names that users must not use */
    PyObject *content_type, *correlation_id, *reply_to, *expiry, *format; /* names of headers */
} py;

/* Positions of struct fields. */
static struct {
    Py_ssize_t topic, payload, qos, retain, packet_id, properties; /* of an event */
    Py_ssize_t to, key, headers;                                   /* of a route */
    Py_ssize_t content_type, correlation_data, response_topic, message_expiry_interval, payload_format_indicator,
        user_properties;
} at;

typedef struct {
    int64_t now;
    PyObject *routes;
    long qos; /* of the run; -1 before the first message */
    PyObject *records, *packet_ids;
} Run;

/* A record's headers: a new tuple that is filled from the front. */
typedef struct {
    PyObject *all;
    Py_ssize_t next; /* index of the next header */
} Headers;

/* Add a header; false, with the error set, without a value. */
static bool
add_header(Headers *headers, PyObject *header_name, PyObject *value)
{
    PyObject *header = value ? PyTuple_Pack(2, header_name, value) : NULL;
    if (header) {
        PyTuple_SET_ITEM(headers->all, headers->next++, header);
    }
    return header != NULL;
}

/* Add a header for a text or bytes property, if it is not None. */
static bool
add_property(Headers *headers, PyObject *value, PyObject *header_name)
{
    if (value == Py_None) {
        return true;
    }
    PyObject *content = PyUnicode_Check(value) ? PyUnicode_AsUTF8String(value) : Py_NewRef(value);
    bool added = add_header(headers, header_name, content);
    Py_XDECREF(content);
    return added;
}

/* Add a header for a number property, if it is not None: `base + times * value`, in decimal. */
static bool
add_number(Headers *headers, PyObject *value, PyObject *header_name, int64_t base, int times)
{
    if (value == Py_None) {
        return true;
    }
    long number = PyLong_AsLong(value);
    if (number < 0 || number > (long)UINT32_MAX) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "a property has at most four bytes");
        }
        return false;
    }
    char digits[DIGITS];
    int size = snprintf(digits, sizeof digits, "%" PRId64, base + (int64_t)times * number);
    PyObject *content = PyBytes_FromStringAndSize(digits, size);
    bool added = add_header(headers, header_name, content);
    Py_XDECREF(content);
    return added;
}

/* The header name for a user property, nearly always the property's own. */
static PyObject *
stored_name(PyObject *own)
{
    int reserved = PySet_Contains(py.reserved, own);
    for (Py_ssize_t number = 0; !reserved && number < PyTuple_GET_SIZE(py.prefixes); number++) {
        reserved = (int)PyUnicode_Tailmatch(own, PyTuple_GET_ITEM(py.prefixes, number), 0, PY_SSIZE_T_MAX, -1);
    }
    if (reserved < 0) {
        return NULL;
    }
    return reserved ? PyObject_CallOneArg(py.stored_name, own) : Py_NewRef(own);
}

static bool
add_pairs(Headers *headers, PyObject *pairs)
{
    for (Py_ssize_t number = 0; number < PyTuple_GET_SIZE(pairs); number++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, number);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 || !PyUnicode_Check(PyTuple_GET_ITEM(pair, 0))
            || !PyUnicode_Check(PyTuple_GET_ITEM(pair, 1))) {
            PyErr_SetString(PyExc_TypeError, "a user property is a pair of texts");
            return false;
        }
        PyObject *stored = stored_name(PyTuple_GET_ITEM(pair, 0));
        PyObject *value = stored ? PyUnicode_AsUTF8String(PyTuple_GET_ITEM(pair, 1)) : NULL;
        bool added = add_header(headers, stored, value);
        Py_XDECREF(value);
        Py_XDECREF(stored);
        if (!added) {
            return false;
        }
    }
    return true;
}

/* The headers of a record: the route's, then those for the properties, in the order of `property_headers`. */
static PyObject *
joined(const Run *run, PyObject *common, PyObject *properties)
{
    PyObject *pairs = (PyObject *)Py_TYPE(properties) == py.properties ? field(properties, at.user_properties) : NULL;
    if (pairs == NULL || !PyTuple_Check(pairs)) {
        PyErr_SetString(PyExc_TypeError, "properties have a tuple of user properties");
        return NULL;
    }
    PyObject *type = field(properties, at.content_type), *correlation = field(properties, at.correlation_data);
    PyObject *reply = field(properties, at.response_topic), *expiry = field(properties, at.message_expiry_interval);
    PyObject *format = field(properties, at.payload_format_indicator);
    Py_ssize_t size = PyTuple_GET_SIZE(common);
    Py_ssize_t added = (type != Py_None) + (correlation != Py_None) + (reply != Py_None) + (expiry != Py_None)
                       + (format != Py_None) + PyTuple_GET_SIZE(pairs);
    Headers headers = {PyTuple_New(size + added), 0};
    if (headers.all == NULL) {
        return NULL;
    }
    for (; headers.next < size; headers.next++) {
        PyTuple_SET_ITEM(headers.all, headers.next, Py_NewRef(PyTuple_GET_ITEM(common, headers.next)));
    }
    if (add_property(&headers, type, py.content_type) && add_property(&headers, correlation, py.correlation_id)
        && add_property(&headers, reply, py.reply_to) && add_number(&headers, expiry, py.expiry, run->now, 1000)
        && add_number(&headers, format, py.format, 0, 1) && add_pairs(&headers, pairs)) {
        return headers.all;
    }
    Py_DECREF(headers.all);
    return NULL;
}

/* TAKEN for an event with the run's QoS, without RETAIN flag and payload format indicator 1. */
static Verdict
is_usual(Run *run, PyObject *event, PyObject *properties)
{
    long qos = PyLong_AsLong(field(event, at.qos));
    if (qos == -1 && PyErr_Occurred()) {
        return FAILED;
    }
    if (run->qos < 0) {
        run->qos = qos;
    }
    if (qos != run->qos || qos < 0 || qos > 1) {
        return LEFT;
    }
    int found = PyObject_IsTrue(field(event, at.retain));
    if (!found && (PyObject *)Py_TYPE(properties) == py.properties) {
        found = PyObject_IsTrue(field(properties, at.payload_format_indicator));
    }
    return found < 0 ? FAILED : found ? LEFT : TAKEN;
}

static Verdict
append_record(Run *run, PyObject *event, PyObject *route, PyObject *properties)
{
    PyObject *by_qos = field(route, at.headers);
    PyObject *common = PyTuple_Check(by_qos) && PyTuple_GET_SIZE(by_qos) > run->qos ? PyTuple_GET_ITEM(by_qos, run->qos)
                                                                                    : NULL;
    if (common == NULL || !PyTuple_Check(common)) {
        PyErr_SetString(PyExc_TypeError, "a route has headers for each QoS");
        return FAILED;
    }
    PyObject *headers = properties == Py_None ? Py_NewRef(common) : joined(run, common, properties), *record = NULL;
    if (headers) {
        PyObject *const arguments[] = {field(route, at.to), field(route, at.key), field(event, at.payload), headers};
        record = PyObject_Vectorcall(py.record, arguments, 4, NULL);
    }
    Verdict verdict = FAILED;
    if (record && PyList_Append(run->records, record) == 0
        && PyList_Append(run->packet_ids, field(event, at.packet_id)) == 0) {
        verdict = TAKEN;
    }
    Py_XDECREF(record);
    Py_XDECREF(headers);
    return verdict;
}

static Verdict
map_event(Run *run, PyObject *event)
{
    if ((PyObject *)Py_TYPE(event) != py.publish) {
        return LEFT;
    }
    PyObject *route = Py_XNewRef(PyDict_GetItemWithError(run->routes, field(event, at.topic)));
    if (route == NULL) {
        return PyErr_Occurred() ? FAILED : LEFT;
    }
    PyObject *properties = field(event, at.properties);
    Verdict verdict = (PyObject *)Py_TYPE(route) == py.route ? is_usual(run, event, properties) : LEFT;
    if (verdict == TAKEN) {
        verdict = append_record(run, event, route, properties);
    }
    Py_DECREF(route);
    return verdict;
}

static PyObject *
map_run(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *events;
    Py_ssize_t start;
    long long now;
    Run run = {.qos = -1};
    if (!PyArg_ParseTuple(arguments, "O!nO!L:map_run", &PyList_Type, &events, &start, &PyDict_Type, &run.routes,
                          &now)) {
        return NULL;
    }
    run.now = now;
    if (start < 0 || run.now <= -NOW_LIMIT || run.now >= NOW_LIMIT) {
        PyErr_SetString(PyExc_ValueError, "the position is negative, or the time is out of range");
        return NULL;
    }
    run.records = PyList_New(0);
    run.packet_ids = PyList_New(0);
    Verdict verdict = run.records && run.packet_ids ? TAKEN : FAILED;
    for (Py_ssize_t number = start; verdict == TAKEN && number < PyList_GET_SIZE(events); number++) {
        PyObject *event = Py_NewRef(PyList_GET_ITEM(events, number));
        verdict = map_event(&run, event);
        Py_DECREF(event);
    }
    PyObject *result = verdict == FAILED ? NULL : PyTuple_Pack(2, run.records, run.packet_ids);
    Py_XDECREF(run.records);
    Py_XDECREF(run.packet_ids);
    return result;
}

/* Set-up */

static int
set_up(PyObject *Py_UNUSED(module))
{
    static const Wanted wanted[] = {
        {"protocols.mqtt.packets", "Publish", &py.publish},
        {"protocols.mqtt.properties", "Properties", &py.properties},
        {"mapping.mqtt.runs", "Route", &py.route},
        {"mapping.record", "Record", &py.record},
        {"mapping.record", "RESERVED_HEADERS", &py.reserved},
        {"mapping.record", "RESERVED_PREFIXES", &py.prefixes},
        {"mapping.record", "stored_name", &py.stored_name},
        {"mapping.record", "CONTENT_TYPE", &py.content_type},
        {"mapping.record", "CORRELATION_ID", &py.correlation_id},
        {"mapping.record", "REPLY_TO", &py.reply_to},
        {"mapping.record", "EXPIRY", &py.expiry},
        {"mapping.record", "MQTT_FORMAT", &py.format},
    };
    static const Place places[] = {
        {&py.publish, "topic", &at.topic},
        {&py.publish, "payload", &at.payload},
        {&py.publish, "qos", &at.qos},
        {&py.publish, "retain", &at.retain},
        {&py.publish, "packet_id", &at.packet_id},
        {&py.publish, "properties", &at.properties},
        {&py.route, "topic", &at.to},
        {&py.route, "key", &at.key},
        {&py.route, "headers", &at.headers},
        {&py.properties, "content_type", &at.content_type},
        {&py.properties, "correlation_data", &at.correlation_data},
        {&py.properties, "response_topic", &at.response_topic},
        {&py.properties, "message_expiry_interval", &at.message_expiry_interval},
        {&py.properties, "payload_format_indicator", &at.payload_format_indicator},
        {&py.properties, "user_properties", &at.user_properties},
    };
    if (LOOK_UP(wanted) < 0 || FIND_FIELDS(places) < 0) {
        return -1;
    }
    if (!PyAnySet_Check(py.reserved) || !PyTuple_Check(py.prefixes)) {
        PyErr_SetString(PyExc_ImportError, "reserved names are a set, their prefixes a tuple");
        return -1;
    }
    return 0;
}

static PyMethodDef functions[] = {
    {"map_run", map_run, METH_VARARGS, PyDoc_STR("Map a run of similar PUBLISHes; see runs.py.")},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE("mapping.mqtt._native", "Maps runs of PUBLISHes to records in C; runs.py does the same.")
