/* Runs of PUBLISH packets and of acknowledgements, in one call: what `receiving.py` does with them one by one, in C.

   The Python code is the reference, and the tests hold both equal: the same events, the same state, for any bytes. Only
   what is good and usual is taken here. A run ends before everything else: Python says what it means, or what is wrong
   with it. */
#include "protocols/native.h"

#include <stdbool.h>

#define PAIRS 64   /* user properties of one message that are taken here */
#define FIELDS 64  /* of `Properties` at the most */
#define FLAGS 16   /* rows of the table of PUBLISH's flags */
#define LONGEST 28 /* bits of a variable byte integer (section 1.5.5) */

typedef enum { FAILED = -1, LEFT = 0, TAKEN = 1 } Verdict; /* a Python error is set; for Python; done */

/* The properties of a PUBLISH that a client may send (table 2-4); user properties are apart. */
typedef enum { FORMAT, EXPIRY, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION, ALIAS, KINDS } Kind;

/* What is taken from Python once. */
static struct {
    PyObject *publish, *puback, *pubrec, *pubrel, *pubcomp; /* the types of events */
    PyObject *awaits_puback, *awaits_pubrec, *awaits_pubrel, *awaits_pubcomp;
    PyObject *properties; /* the type */
    PyObject *defaults;   /* of its fields, a tuple */
    Py_ssize_t fields;    /* how many it has */
    Py_ssize_t place[KINDS], user_place; /* where among them they stand */
} py;

typedef struct {
    const unsigned char *data;
    Py_ssize_t size;
    Py_ssize_t position; /* of the next packet */
    PyObject *found;     /* events are appended to it */
    bool v5;
    Py_ssize_t limit;  /* bytes of a packet */
    Py_ssize_t window; /* messages of QoS 1 and 2 that may come */
    Py_ssize_t taken;  /* that came */
    Py_ssize_t freed;  /* of ours that were acknowledged */
    PyObject *flags;   /* rows of (qos, retain, dup), or None */
    long alias_maximum;
    PyObject *aliases, *qos2, *awaited; /* the connection's */
    /* The topic of the last PUBLISH that had one: the next one often has the same. */
    PyObject *topic;
    const unsigned char *topic_at;
    Py_ssize_t topic_size;
} Run;

/* Data types (section 1.5) */

static inline Py_ssize_t
two_bytes(const unsigned char *at)
{
    return (Py_ssize_t)at[0] << 8 | at[1];
}

/* Read a variable byte integer, and move behind it. Not one that is not whole, or longer than it needs to be. */
static bool
read_varint(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, Py_ssize_t *value)
{
    *value = 0;
    for (int shift = 0; shift < LONGEST && *at < end; shift += 7) {
        unsigned char byte = data[(*at)++];
        *value |= (Py_ssize_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return byte || !shift;
        }
    }
    return false;
}

/* Whether a text may be a topic's name: `codec.decode_name` and `topics.is_valid_name`. */
static bool
is_name(PyObject *text)
{
    int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    Py_ssize_t size = PyUnicode_GET_LENGTH(text);
    for (Py_ssize_t index = 0; index < size; index++) {
        Py_UCS4 one = PyUnicode_READ(kind, data, index);
        if (one < 0x20 || one == '+' || one == '#' || (one >= 0x7f && one <= 0x9f) || (one >= 0xfdd0 && one <= 0xfdef)
            || (one & 0xfffe) == 0xfffe) {
            return false;
        }
    }
    return size > 0;
}

/* TAKEN, with a new text; LEFT when it is none that MQTT allows. */
static Verdict
take_text(const unsigned char *at, Py_ssize_t size, bool name, PyObject **found)
{
    if (memchr(at, 0, (size_t)size) != NULL) {
        return LEFT;
    }
    PyObject *text = PyUnicode_DecodeUTF8((const char *)at, size, NULL);
    if (text == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
            return FAILED;
        }
        PyErr_Clear();
        return LEFT;
    }
    if (name && !is_name(text)) {
        Py_DECREF(text);
        return LEFT;
    }
    *found = text;
    return TAKEN;
}

/* Find the bytes behind a length of two bytes, and move behind them. */
static bool
read_sized(const unsigned char *data, Py_ssize_t *at, Py_ssize_t stop, const unsigned char **begin, Py_ssize_t *size)
{
    if (stop - *at < 2) {
        return false;
    }
    *size = two_bytes(data + *at);
    *begin = data + *at + 2;
    *at += 2 + *size;
    return *at <= stop;
}

/* Properties */

typedef struct {
    PyObject *values[KINDS]; /* owned; NULL: absent */
    PyObject *pairs[PAIRS];  /* owned */
    Py_ssize_t count;        /* of pairs */
    long alias;              /* 0: none */
} Found;

static void
clear_found(Found *found)
{
    for (int kind = 0; kind < KINDS; kind++) {
        Py_CLEAR(found->values[kind]);
    }
    while (found->count) {
        Py_DECREF(found->pairs[--found->count]);
    }
}

static Verdict
take_pair(const unsigned char *data, Py_ssize_t *at, Py_ssize_t stop, Found *found)
{
    const unsigned char *name_at, *value_at;
    Py_ssize_t name_size, value_size;
    if (found->count == PAIRS || !read_sized(data, at, stop, &name_at, &name_size)
        || !read_sized(data, at, stop, &value_at, &value_size)) {
        return LEFT;
    }
    PyObject *name = NULL, *value = NULL, *pair = NULL;
    Verdict verdict = take_text(name_at, name_size, false, &name);
    if (verdict == TAKEN) {
        verdict = take_text(value_at, value_size, false, &value);
    }
    if (verdict == TAKEN) {
        pair = PyTuple_Pack(2, name, value);
        verdict = pair ? TAKEN : FAILED;
    }
    if (pair) {
        found->pairs[found->count++] = pair;
    }
    Py_XDECREF(name);
    Py_XDECREF(value);
    return verdict;
}

/* A property that is a number of `size` bytes; not one outside `lowest`..`highest`. */
static Verdict
take_number(const unsigned char *data, Py_ssize_t *at, Py_ssize_t stop, int size, unsigned long lowest,
            unsigned long highest, PyObject **found)
{
    if (stop - *at < size) {
        return LEFT;
    }
    unsigned long value = 0;
    for (int index = 0; index < size; index++) {
        value = value << 8 | data[(*at)++];
    }
    if (value < lowest || value > highest) {
        return LEFT;
    }
    *found = PyLong_FromUnsignedLong(value);
    return *found ? TAKEN : FAILED;
}

static Verdict
take_property(const unsigned char *data, Py_ssize_t *at, Py_ssize_t stop, Found *found)
{
    static const struct {
        unsigned char identifier;
        unsigned char size;    /* of a number; 0: a text or bytes */
        unsigned long lowest, highest;
    } table[KINDS] = {
        [FORMAT] = {0x01, 1, 0, 1},       [EXPIRY] = {0x02, 4, 0, 0xffffffff}, [CONTENT_TYPE] = {0x03, 0, 0, 0},
        [RESPONSE_TOPIC] = {0x08, 0, 0, 0}, [CORRELATION] = {0x09, 0, 0, 0},     [ALIAS] = {0x23, 2, 1, 0xffff},
    };
    unsigned char identifier = data[(*at)++];
    if (identifier == 0x26) {
        return take_pair(data, at, stop, found);
    }
    int kind = 0;
    while (kind < KINDS && table[kind].identifier != identifier) {
        kind++;
    }
    if (kind == KINDS || found->values[kind]) {
        return LEFT;
    }
    PyObject **value = &found->values[kind];
    if (table[kind].size) {
        Verdict verdict = take_number(data, at, stop, table[kind].size, table[kind].lowest, table[kind].highest, value);
        if (verdict == TAKEN && kind == ALIAS) {
            found->alias = (long)two_bytes(data + *at - 2);
        }
        return verdict;
    }
    const unsigned char *begin;
    Py_ssize_t size;
    if (!read_sized(data, at, stop, &begin, &size)) {
        return LEFT;
    }
    if (kind != CORRELATION) {
        return take_text(begin, size, kind == RESPONSE_TOPIC, value);
    }
    *value = PyBytes_FromStringAndSize((const char *)begin, size);
    return *value ? TAKEN : FAILED;
}

static PyObject *
make_properties(const Found *found)
{
    PyObject *pairs = NULL;
    PyObject *arguments[FIELDS];
    memcpy(arguments, &PyTuple_GET_ITEM(py.defaults, 0), (size_t)py.fields * sizeof *arguments);
    for (int kind = 0; kind < KINDS; kind++) {
        if (found->values[kind]) {
            arguments[py.place[kind]] = found->values[kind];
        }
    }
    if (found->count) {
        pairs = PyTuple_New(found->count);
        if (pairs == NULL) {
            return NULL;
        }
        for (Py_ssize_t number = 0; number < found->count; number++) {
            PyTuple_SET_ITEM(pairs, number, Py_NewRef(found->pairs[number]));
        }
        arguments[py.user_place] = pairs;
    }
    PyObject *properties = PyObject_Vectorcall(py.properties, arguments, (size_t)py.fields, NULL);
    Py_XDECREF(pairs);
    return properties;
}

/* Take the properties of a PUBLISH, with their length before them; None when there are none. */
static Verdict
take_properties(const unsigned char *data, Py_ssize_t *at, Py_ssize_t end, PyObject **properties, Found *found)
{
    Py_ssize_t length;
    if (!read_varint(data, at, end, &length) || length > end - *at) {
        return LEFT;
    }
    if (!length) {
        *properties = Py_NewRef(Py_None);
        return TAKEN;
    }
    Verdict verdict = TAKEN;
    Py_ssize_t stop = *at + length;
    while (verdict == TAKEN && *at < stop) {
        verdict = take_property(data, at, stop, found);
    }
    if (verdict == TAKEN) {
        *properties = make_properties(found);
        verdict = *properties ? TAKEN : FAILED;
    }
    return verdict;
}

/* PUBLISH (section 3.3) */

/* The topic: the text itself, or what its alias stands for (section 3.3.2.3.4). */
static Verdict
take_topic(Run *run, const unsigned char *at, Py_ssize_t size, const Found *found, PyObject **topic)
{
    if (found->alias > run->alias_maximum) {
        return LEFT;
    }
    if (!size) {
        PyObject *known = found->alias ? PyDict_GetItemWithError(run->aliases, found->values[ALIAS]) : NULL;
        if (known == NULL) {
            return PyErr_Occurred() ? FAILED : LEFT;
        }
        *topic = Py_NewRef(known);
        return TAKEN;
    }
    if (run->topic == NULL || run->topic_size != size || memcmp(run->topic_at, at, (size_t)size) != 0) {
        PyObject *text;
        Verdict verdict = take_text(at, size, true, &text);
        if (verdict != TAKEN) {
            return verdict;
        }
        Py_XSETREF(run->topic, text);
        run->topic_at = at;
        run->topic_size = size;
    }
    *topic = Py_NewRef(run->topic);
    return TAKEN;
}

/* Append the event, and note what it changes. */
static Verdict
tell_publish(Run *run, PyObject *const *event, PyObject *alias, bool named, int qos, bool counted)
{
    PyObject *made = PyObject_Vectorcall(py.publish, event, 7, NULL);
    if (made == NULL) {
        return FAILED;
    }
    int failed = 0;
    if (alias && named) {
        failed = PyDict_SetItem(run->aliases, alias, event[0]);
    }
    if (!failed && counted && qos == 2) {
        failed = PyDict_SetItem(run->qos2, event[5], Py_True);
    }
    if (!failed) {
        failed = PyList_Append(run->found, made);
    }
    Py_DECREF(made);
    run->taken += counted && !failed;
    return failed ? FAILED : TAKEN;
}

static Verdict
take_publish(Run *run, Py_ssize_t start, Py_ssize_t end)
{
    const unsigned char *data = run->data;
    PyObject *row = PyTuple_GET_ITEM(run->flags, data[run->position] & 0x0f);
    int qos = data[run->position] >> 1 & 3;
    if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 3 || end - start < 2) {
        return LEFT;
    }
    Py_ssize_t topic_size = two_bytes(data + start), at = start + 2 + topic_size;
    long number = 0;
    if (qos) {
        number = at + 2 <= end ? (long)two_bytes(data + at) : 0;
        at += 2;
        if (!number) {
            return LEFT;
        }
    }
    if (at > end) {
        return LEFT;
    }
    Found found = {.count = 0};
    PyObject *topic = NULL, *payload = NULL, *properties = NULL, *packet_id = PyLong_FromLong(number);
    Verdict verdict = packet_id ? TAKEN : FAILED;
    bool counted = qos > 0;
    if (verdict == TAKEN && qos == 2) {
        int known = PyDict_Contains(run->qos2, packet_id);
        verdict = known < 0 ? FAILED : TAKEN;
        counted = !known;
    }
    if (verdict == TAKEN && counted && run->taken >= run->window) {
        verdict = LEFT;
    }
    if (verdict == TAKEN && run->v5) {
        verdict = take_properties(data, &at, end, &properties, &found);
    }
    if (verdict == TAKEN) {
        verdict = take_topic(run, data + start + 2, topic_size, &found, &topic);
    }
    if (verdict == TAKEN) {
        payload = PyBytes_FromStringAndSize((const char *)data + at, end - at);
        verdict = payload ? TAKEN : FAILED;
    }
    if (verdict == TAKEN) {
        PyObject *const event[] = {
            topic, payload, PyTuple_GET_ITEM(row, 0), PyTuple_GET_ITEM(row, 1), PyTuple_GET_ITEM(row, 2), packet_id,
            properties ? properties : Py_None,
        };
        verdict = tell_publish(run, event, found.values[ALIAS], topic_size > 0, qos, counted);
    }
    clear_found(&found);
    Py_XDECREF(topic);
    Py_XDECREF(payload);
    Py_XDECREF(properties);
    Py_XDECREF(packet_id);
    return verdict;
}

/* Acknowledgements that say nothing but their packet identifiers */

static Verdict
take_acknowledgement(Run *run)
{
    const unsigned char *at = run->data + run->position;
    if (run->size - run->position < 4 || at[1] != 2) {
        return LEFT;
    }
    PyObject *kind, *awaited = NULL;
    switch (at[0]) {
    case 0x40:
        kind = py.puback;
        awaited = py.awaits_puback;
        break;
    case 0x50:
        kind = py.pubrec;
        awaited = py.awaits_pubrec;
        break;
    case 0x62:
        kind = py.pubrel;
        break;
    case 0x70:
        kind = py.pubcomp;
        awaited = py.awaits_pubcomp;
        break;
    default:
        return LEFT;
    }
    PyObject *packet_id = PyLong_FromLong((long)two_bytes(at + 2)), *event = NULL;
    Verdict verdict = packet_id ? TAKEN : FAILED;
    if (verdict == TAKEN && awaited) {
        PyObject *state = PyDict_GetItemWithError(run->awaited, packet_id);
        verdict = state == awaited ? TAKEN : state || !PyErr_Occurred() ? LEFT : FAILED;
    }
    else if (verdict == TAKEN && !two_bytes(at + 2)) {
        verdict = LEFT;
    }
    if (verdict == TAKEN) {
        event = PyObject_CallOneArg(kind, packet_id);
        verdict = event && PyList_Append(run->found, event) == 0 ? TAKEN : FAILED;
    }
    if (verdict == TAKEN && awaited) {
        int failed = at[0] == 0x50 ? PyDict_SetItem(run->awaited, packet_id, py.awaits_pubrel)
                                   : PyDict_DelItem(run->awaited, packet_id);
        verdict = failed ? FAILED : TAKEN;
        run->freed += at[0] != 0x50;
    }
    Py_XDECREF(event);
    Py_XDECREF(packet_id);
    return verdict;
}

/* Take the packet at the run's position, and move behind it. */
static Verdict
take_packet(Run *run)
{
    if ((run->data[run->position] & 0xf0) != 0x30) {
        Verdict verdict = take_acknowledgement(run);
        run->position += verdict == TAKEN ? 4 : 0;
        return verdict;
    }
    Py_ssize_t start = run->position + 1, length;
    if (!read_varint(run->data, &start, run->size, &length) || length > run->size - start
        || start + length - run->position > run->limit) {
        return LEFT;
    }
    Verdict verdict = take_publish(run, start, start + length);
    run->position = verdict == TAKEN ? start + length : run->position;
    return verdict;
}

static PyObject *
take_usual(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *buffer;
    int v5;
    Run run = {0};
    if (!PyArg_ParseTuple(arguments, "SnO!pnnO!lO!O!O!:take_usual", &buffer, &run.position, &PyList_Type, &run.found, &v5,
                          &run.limit, &run.window, &PyTuple_Type, &run.flags, &run.alias_maximum, &PyDict_Type,
                          &run.aliases, &PyDict_Type, &run.qos2, &PyDict_Type, &run.awaited)) {
        return NULL;
    }
    if (run.position < 0 || PyTuple_GET_SIZE(run.flags) != FLAGS) {
        PyErr_SetString(PyExc_ValueError, "a position, and a row for each of the flags");
        return NULL;
    }
    run.data = (const unsigned char *)PyBytes_AS_STRING(buffer);
    run.size = PyBytes_GET_SIZE(buffer);
    run.v5 = v5;
    Verdict verdict = TAKEN;
    while (verdict == TAKEN && run.position < run.size) {
        verdict = take_packet(&run);
    }
    Py_XDECREF(run.topic);
    return verdict == FAILED ? NULL : Py_BuildValue("nnn", run.position, run.taken, run.freed);
}

/* What is taken from Python */

static int
look_up(const char *module_name, const char *class_name, const char *const *names, PyObject **const *places, int count)
{
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *from = module && class_name ? PyObject_GetAttrString(module, class_name) : Py_XNewRef(module);
    int failed = from ? 0 : -1;
    for (int index = 0; !failed && index < count; index++) {
        *places[index] = PyObject_GetAttrString(from, names[index]);
        failed = *places[index] ? 0 : -1;
    }
    Py_XDECREF(from);
    Py_XDECREF(module);
    return failed;
}

static int
look_up_types(PyObject *Py_UNUSED(module))
{
    static const char *const events[] = {
        "PublishReceived", "PubackReceived", "PubrecReceived", "PubrelReceived", "PubcompReceived",
    };
    static PyObject **const event_places[] = {&py.publish, &py.puback, &py.pubrec, &py.pubrel, &py.pubcomp};
    static const char *const awaits[] = {"PUBACK", "PUBREC", "PUBREL", "PUBCOMP"};
    static PyObject **const await_places[] = {
        &py.awaits_puback, &py.awaits_pubrec, &py.awaits_pubrel, &py.awaits_pubcomp,
    };
    static const char *const types[] = {"Properties"};
    static PyObject **const type_places[] = {&py.properties};
    return look_up("protocols.mqtt.events", NULL, events, event_places, 5) < 0
                   || look_up("protocols.mqtt.states", "Awaits", awaits, await_places, 4) < 0
                   || look_up("protocols.mqtt.properties", NULL, types, type_places, 1) < 0
               ? -1
               : 0;
}

static Py_ssize_t
place_of(PyObject *fields, const char *name)
{
    PyObject *text = PyUnicode_FromString(name);
    Py_ssize_t place = text ? PySequence_Index(fields, text) : -1;
    Py_XDECREF(text);
    return place;
}

/* Where the fields of `Properties` stand, all of which have defaults. */
static int
look_up_fields(PyObject *Py_UNUSED(module))
{
    static const char *const names[KINDS] = {
        [FORMAT] = "payload_format_indicator", [EXPIRY] = "message_expiry_interval",
        [CONTENT_TYPE] = "content_type",       [RESPONSE_TOPIC] = "response_topic",
        [CORRELATION] = "correlation_data",    [ALIAS] = "topic_alias",
    };
    PyObject *fields = PyObject_GetAttrString(py.properties, "__struct_fields__");
    py.defaults = fields ? PyObject_GetAttrString(py.properties, "__struct_defaults__") : NULL;
    int failed = py.defaults ? 0 : -1;
    for (int kind = 0; !failed && kind < KINDS; kind++) {
        py.place[kind] = place_of(fields, names[kind]);
        failed = py.place[kind] < 0;
    }
    if (!failed) {
        py.user_place = place_of(fields, "user_properties");
        py.fields = PyObject_Size(fields);
        failed = py.user_place < 0;
    }
    if (!failed && (!PyTuple_Check(py.defaults) || PyTuple_GET_SIZE(py.defaults) != py.fields || py.fields > FIELDS)) {
        PyErr_SetString(PyExc_ImportError, "Properties has other fields than are known here");
        failed = 1;
    }
    Py_XDECREF(fields);
    return failed ? -1 : 0;
}

static PyMethodDef functions[] = {
    {"take_usual", take_usual, METH_VARARGS, PyDoc_STR("Take packets as long as they are usual; see usual.py.")},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, refuse_when_switched_off},
    {Py_mod_exec, look_up_types},
    {Py_mod_exec, look_up_fields},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "protocols.mqtt._native",
    .m_doc = PyDoc_STR("Runs of packets in C; receiving.py does the same in Python."),
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
