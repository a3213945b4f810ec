/*
 * Mapping an AMQP message to a record, in C: `mapping.amqp.incoming.to_record` for messages of common clients.
 *
 * The Python code is the reference. Every message that is not handled here, or that is refused, is left to it: both
 * give the same record or the same error for every input (tests, and `tests.support.amqp_mutated`). Every read is
 * checked against the end of the enclosing value first.
 *
 * Handled is what known clients send (`loadtest/clients/amqp_shapes.json`): a body of one section, and before it header,
 * message annotations, properties and application properties, all optional. Each has its descriptor as a ulong of one or
 * eight bytes, in the short or long form, and values of simple types, but no char, decimal or UUID. A body that is
 * no binary or string is converted in Python.
 */
#include "mapping/amqp/_native.h"

#define NOW_LIMIT (INT64_C(1) << 60) /* epoch milliseconds; below it, adding a ttl cannot overflow */

struct Constants py;
struct Places fields_at;

/* Whether the destination's partition, if it has one, exists; an error that is set is the reference's, too. */
static int
has_its_partition(PyObject *to)
{
    PyObject *partition = field(to, fields_at.partition);
    return partition == Py_None || PyObject_RichCompareBool(partition, field(to, fields_at.partitions), Py_LT) == 1;
}

/* Map a message, except for the record itself. */
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
    if (!has_its_partition(message->to)) {
        return PyErr_Occurred() ? FAILED : LEFT;
    }
    if (message->expires) {
        if (message->expiry <= message->now) {
            return LEFT;
        }
        verdict = put(message, property_name(EXPIRY), decimal(message->expiry));
        if (verdict != TAKEN) {
            return verdict;
        }
    }
    verdict = take_body(message, &section, end);
    if (verdict == TAKEN && message->exact) {
        const uint8_t *behind = message->exact_body ? end : section.start;
        verdict = put(message, py.sections, bytes_of(data, (size_t)(behind - data)));
    }
    return verdict;
}

/* Build the tuple of the destination's and the message's headers; it takes the references to the message's. */
static PyObject *
all_headers(Message *message)
{
    PyObject *common = field(message->to, fields_at.headers);
    if (!message->count) {
        return Py_NewRef(common);
    }
    Py_ssize_t before = PyTuple_GET_SIZE(common);
    PyObject *all = PyTuple_New(before + message->count);
    for (Py_ssize_t index = 0; all && index < before; index++) {
        PyTuple_SET_ITEM(all, index, Py_NewRef(PyTuple_GET_ITEM(common, index)));
    }
    for (; all && message->count; message->count--) {
        PyTuple_SET_ITEM(all, before + message->count - 1, message->headers[message->count - 1]);
    }
    return all;
}

/* Make the record of a message that is mapped. */
static PyObject *
make_record(Message *message)
{
    PyObject *to = message->to;
    PyObject *headers = all_headers(message);
    PyObject *record = NULL;
    if (headers) {
        PyObject *fields[] = {
            field(to, fields_at.topic),
            message->key ? message->key : field(to, fields_at.key),
            message->value,
            headers,
            Py_None, /* the timestamp is the record's arrival, which the publisher sets */
            field(to, fields_at.partition),
        };
        record = PyObject_Vectorcall(py.record, fields, 6, NULL);
    }
    Py_XDECREF(headers);
    return record;
}

/* Check the arguments `destination` and `now_ms`, and take the time. Returns -1 with an exception. */
static int
take_arguments(PyObject *to, PyObject *now_ms, int64_t *now)
{
    if ((PyObject *)Py_TYPE(to) != py.destination) {
        PyErr_Format(PyExc_TypeError, "an AmqpDestination, not %.100s", Py_TYPE(to)->tp_name);
        return -1;
    }
    if (!PyTuple_CheckExact(field(to, fields_at.headers)) || !PyBytes_Check(field(to, fields_at.address))) {
        PyErr_SetString(PyExc_TypeError, "a destination's headers are a tuple, its address is bytes");
        return -1;
    }
    int overflow;
    *now = PyLong_AsLongLongAndOverflow(now_ms, &overflow);
    return *now == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Map one message; `now` is `now_ms`, or -1 when that is too large. */
static PyObject *
map_message(PyObject *data, PyObject *to, PyObject *now_ms, int64_t now)
{
    if (!PyBytes_CheckExact(data)) {
        PyErr_SetString(PyExc_TypeError, "a message is bytes");
        return NULL;
    }
    Message message; /* `headers` is not set: that would take longer than all else */
    memset(&message, 0, offsetof(Message, headers));
    message.data = data;
    message.to = to;
    message.now = now;
    Verdict verdict = now >= 0 && now < NOW_LIMIT ? take_message(&message) : LEFT;
    PyObject *record = verdict == TAKEN ? make_record(&message) : NULL;
    for (Py_ssize_t index = 0; index < message.count; index++) {
        Py_DECREF(message.headers[index]);
    }
    Py_XDECREF(message.key);
    Py_XDECREF(message.value);
    return verdict == LEFT ? PyObject_CallFunctionObjArgs(py.to_record, data, to, now_ms, NULL) : record;
}

static PyObject *
to_record(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    int64_t now;
    if (check_count("to_record", given, 3) < 0 || take_arguments(arguments[1], arguments[2], &now) < 0) {
        return NULL;
    }
    return map_message(arguments[0], arguments[1], arguments[2], now);
}

static PyObject *
to_records(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    int64_t now;
    if (check_count("to_records", given, 5) < 0 || take_arguments(arguments[2], arguments[3], &now) < 0) {
        return NULL;
    }
    PyObject *messages = arguments[0], *records = arguments[4];
    Py_ssize_t index = PyLong_AsSsize_t(arguments[1]);
    if (index < 0 || !PyList_Check(messages) || !PyList_Check(records)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a list of messages, the first one's index, and a list to append to");
        }
        return NULL;
    }
    for (; index < PyList_GET_SIZE(messages); index++) {
        PyObject *data = Py_NewRef(PyList_GET_ITEM(messages, index)); /* the reference may run any code */
        PyObject *record = map_message(data, arguments[2], arguments[3], now);
        Py_DECREF(data);
        int failed = !record || PyList_Append(records, record) < 0;
        Py_XDECREF(record);
        if (failed) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* Module */

static int
set_up(PyObject *Py_UNUSED(module))
{
    const Wanted wanted[] = {
        {"mapping.record", "AMQP_TYPES", &py.types},
        {"mapping.record", "AMQP_BODY", &py.body},
        {"mapping.record", "AMQP_SECTIONS", &py.sections},
        {"mapping.record", "Record", &py.record},
        {"mapping.amqp.values", "header_name", &py.header_name},
        {"mapping.amqp.fields", "short_header_fields", &py.header_fields},
        {"mapping.amqp.body", "JSON_TYPE", &py.json},
        {"mapping.amqp.body", "to_value", &py.to_value},
        {"mapping.amqp.incoming", "to_record", &py.to_record},
        {"mapping.amqp.fields", "PROPERTIES", &py.properties},
        {"mapping.amqp.fields", "AmqpDestination", &py.destination},
        {"mapping.amqp.body", "Body", &py.stored_body},
    };
    static const Place places[] = {
        {&py.destination, "topic", &fields_at.topic},
        {&py.destination, "address_bytes", &fields_at.address},
        {&py.destination, "partition", &fields_at.partition},
        {&py.destination, "key", &fields_at.key},
        {&py.destination, "user", &fields_at.user},
        {&py.destination, "headers", &fields_at.headers},
        {&py.destination, "partitions", &fields_at.partitions},
        {&py.stored_body, "value", &fields_at.value},
        {&py.stored_body, "form", &fields_at.form},
        {&py.stored_body, "exact", &fields_at.exact},
        {&py.stored_body, "is_json", &fields_at.is_json},
    };
    if (LOOK_UP(wanted) < 0 || FIND_FIELDS(places) < 0) {
        return -1;
    }
    if (!PyTuple_Check(py.properties) || PyTuple_GET_SIZE(py.properties) != PROPERTIES_LIMIT) {
        PyErr_SetString(PyExc_ImportError, "the names of all properties are a tuple");
        return -1;
    }
    py.text_form = PyBytes_FromString("v:str");
    py.binary_form = PyBytes_FromString("v:bin");
    return py.text_form && py.binary_form ? look_up_outgoing() : -1;
}

static PyMethodDef functions[] = {
    {"to_record", (PyCFunction)(void (*)(void))to_record, METH_FASTCALL, PyDoc_STR("See incoming.py.")},
    {"to_records", (PyCFunction)(void (*)(void))to_records, METH_FASTCALL, PyDoc_STR("See incoming.py.")},
    {"from_records", (PyCFunction)(void (*)(void))from_records, METH_FASTCALL, PyDoc_STR("See outgoing.py.")},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE("mapping.amqp._native",
              "Between AMQP messages and records, in C; incoming.py and outgoing.py are the same in Python.")
