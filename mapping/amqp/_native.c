/*
 * Mapping an AMQP message to a record, in C: `mapping.amqp.incoming.to_record` for messages of common clients.
 *
 * The Python code is the reference. Every message that is not handled here, or that is refused, is left to it:
 * `Mapper.record` gives the same record or the same error for every input (tests, and `loadtest.bench.amqp_mutated`).
 * Every read is checked against the end of the enclosing value first.
 *
 * Handled are messages of these sections, each with its descriptor as a ulong of one or eight bytes:
 *   header, message annotations, properties, application properties   all optional, in short and long form
 *   one Data section, or an amqp-value that is a string, a binary or null   in short and long form
 * whose values are simple types: no compound, no array, no described value, no char, no decimal. Other bodies of one
 * section are converted in Python.
 */
#include "mapping/amqp/_native.h"

#define NOW_LIMIT (INT64_C(1) << 60) /* epoch milliseconds; below it, adding a ttl cannot overflow */

struct Constants py;
struct Places fields_at;

/* Messages */

/* Map a message, except for the tuple of its headers. */
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
    if (message->partition >= message->to->partitions) {
        return LEFT;
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

/* Build the tuple of the destination's and the message's headers; it steals the references to the message's. */
static PyObject *
all_headers(Message *message)
{
    PyObject *common = field(message->to->destination, fields_at.headers);
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
    PyObject *of = to->destination;
    PyObject *headers = all_headers(message);
    PyObject *timestamp = message->stamped ? PyLong_FromLongLong(message->timestamp) : Py_NewRef(Py_None);
    PyObject *partition = message->partition == to->partition_number ? Py_NewRef(field(of, fields_at.partition))
                                                                     : PyLong_FromLongLong(message->partition);
    PyObject *record = NULL;
    if (headers && timestamp && partition) {
        PyObject *fields[] = {
            field(of, fields_at.topic),
            message->key ? message->key : field(of, fields_at.key),
            message->value,
            headers,
            timestamp,
            partition,
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
    Message message; /* `headers` is not initialized: `count` is the number of valid entries */
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

/* Take what is read of a destination for each message; -1 with an exception when a field has the wrong type. */
static int
fill(Mapper *self, PyObject *destination)
{
    PyObject *partition = field(destination, fields_at.partition), *headers = field(destination, fields_at.headers);
    self->destination = Py_NewRef(destination);
    self->user = PyUnicode_AsUTF8String(field(destination, fields_at.user));
    if (!self->user) {
        return -1;
    }
    if (!PyTuple_Check(headers) || !PyBytes_Check(field(destination, fields_at.address))) {
        PyErr_SetString(PyExc_TypeError, "a destination's headers are a tuple, its address is bytes");
        return -1;
    }
    const struct {
        PyObject *number;
        int64_t *found;
    } numbers[] = {
        {field(destination, fields_at.before), &self->before},
        {field(destination, fields_at.after), &self->after},
        {field(destination, fields_at.partitions), &self->partitions},
        {partition == Py_None ? NULL : partition, &self->partition_number},
    };
    for (size_t index = 0; index < sizeof numbers / sizeof numbers[0]; index++) {
        *numbers[index].found = numbers[index].number ? PyLong_AsLongLong(numbers[index].number) : -1;
        if (numbers[index].number && *numbers[index].found < 0) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "a negative number in a destination");
            }
            return -1;
        }
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
    if ((PyObject *)Py_TYPE(destination) != py.destination) {
        PyErr_Format(PyExc_TypeError, "a Destination, not %.100s", Py_TYPE(destination)->tp_name);
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

/* It refers only to strings, bytes and numbers, so it cannot be part of a cycle and needs no garbage collection. */
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
set_up(PyObject *module)
{
    PyObject *window;
    const Wanted wanted[] = {
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
        {"mapping.amqp.incoming", "CREATION_WINDOW_MS", &window},
        {"mapping.amqp.fields", "PROPERTIES", &py.properties},
        {"mapping.amqp.fields", "Destination", &py.destination},
        {"mapping.amqp.body", "Body", &py.stored_body},
    };
    static const Place places[] = {
        {&py.destination, "topic", &fields_at.topic},
        {&py.destination, "address_bytes", &fields_at.address},
        {&py.destination, "partition", &fields_at.partition},
        {&py.destination, "key", &fields_at.key},
        {&py.destination, "user", &fields_at.user},
        {&py.destination, "headers", &fields_at.headers},
        {&py.destination, "before_ms", &fields_at.before},
        {&py.destination, "after_ms", &fields_at.after},
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
    py.window = PyLong_AsLongLong(window);
    Py_DECREF(window);
    py.one = PyBytes_FromString("1");
    py.text_form = PyBytes_FromString("v:str");
    py.binary_form = PyBytes_FromString("v:bin");
    py.null_form = PyBytes_FromString("v:null");
    if (!py.one || !py.text_form || !py.binary_form || !py.null_form || PyErr_Occurred()) {
        return -1;
    }
    return look_up_outgoing() < 0 ? -1 : add_type(module, &mapper_spec);
}

static PyMethodDef functions[] = {
    {"from_records", (PyCFunction)(void (*)(void))from_records, METH_FASTCALL, PyDoc_STR("See outgoing.py.")},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE("mapping.amqp._native",
              "Between AMQP messages and records, in C; incoming.py and outgoing.py are the same in Python.")
