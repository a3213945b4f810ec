/* Parses a run of PUBLISH packets and acknowledgements in one call, as `receiving.py` does one by one.

   The Python code is the reference; the tests check that both produce the same events and state for any bytes. Only
   valid, usual packets are handled here. The run ends before any other packet, which Python then parses or refuses. */
#include "protocols/mqtt/_native.h"

#define FLAGS 16 /* rows of the table of PUBLISH's flags */

/* Python objects that are looked up once. */
static struct {
    PyObject *publish;       /* the type of events */
    PyObject *awaits_pubrel; /* the state after PUBREC */
} py;

/* The acknowledgements: first byte, name and type of the event, and the state in which one is awaited (PUBREL: any). */
static struct {
    unsigned char first;
    const char *name, *state;
    PyObject *type, *awaited;
} acknowledgements[] = {
    {.first = 0x40, .name = "Puback", .state = "PUBACK"},
    {.first = 0x50, .name = "Pubrec", .state = "PUBREC"},
    {.first = 0x62, .name = "Pubrel"},
    {.first = 0x70, .name = "Pubcomp", .state = "PUBCOMP"},
};
#define ACKNOWLEDGEMENTS (sizeof acknowledgements / sizeof acknowledgements[0])

typedef struct {
    const unsigned char *data;
    Py_ssize_t size;
    Py_ssize_t position; /* of the next packet */
    PyObject *found;     /* list that receives the events */
    bool v5;
    Py_ssize_t limit;  /* maximum packet size */
    Py_ssize_t window; /* number of QoS 1 and 2 messages that the client may send */
    Py_ssize_t taken;  /* number of those received */
    Py_ssize_t freed;  /* number of our deliveries that have ended */
    PyObject *flags;   /* rows of (qos, retain, dup), or None */
    long alias_maximum;
    PyObject *aliases, *qos2, *awaited; /* the connection's */
    /* The last topic in full, cached since the next PUBLISH often has the same. */
    PyObject *topic;
    const unsigned char *topic_at;
    Py_ssize_t topic_size;
} Run;

/* PUBLISH (section 3.3) */

/* Get the topic, directly or by its alias (section 3.3.2.3.4). */
static Verdict
take_topic(Run *run, const unsigned char *at, Py_ssize_t size, const Found *found, PyObject **topic)
{
    if (found->alias_number > run->alias_maximum) {
        return LEFT;
    }
    if (!size) {
        PyObject *known = found->alias ? PyDict_GetItemWithError(run->aliases, found->alias) : NULL;
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

/* Append the event, and update aliases, QoS 2 state and the count. */
static Verdict
append_publish(Run *run, PyObject *const *event, PyObject *alias, bool named, int qos, bool counted)
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
    Found found;
    found.properties = found.alias = NULL;
    found.alias_number = found.count = 0;
    PyObject *topic = NULL, *payload = NULL, *packet_id = PyLong_FromLong(number);
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
        verdict = take_properties(data, &at, end, &found);
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
            found.properties ? found.properties : Py_None,
        };
        verdict = append_publish(run, event, found.alias, topic_size > 0, qos, counted);
    }
    Py_XDECREF(found.properties);
    while (found.count) {
        Py_DECREF(found.pairs[--found.count]);
    }
    Py_XDECREF(topic);
    Py_XDECREF(payload);
    Py_XDECREF(packet_id);
    return verdict;
}

/* Acknowledgements without reason code */

static Verdict
take_acknowledgement(Run *run)
{
    const unsigned char *at = run->data + run->position;
    if (run->size - run->position < 4 || at[1] != 2) {
        return LEFT;
    }
    size_t kind = 0;
    while (kind < ACKNOWLEDGEMENTS && acknowledgements[kind].first != at[0]) {
        kind++;
    }
    if (kind == ACKNOWLEDGEMENTS) {
        return LEFT;
    }
    PyObject *awaited = acknowledgements[kind].awaited;
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
        event = PyObject_CallOneArg(acknowledgements[kind].type, packet_id);
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

/* Parse the packet at the run's position, and move behind it. */
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
        PyErr_SetString(PyExc_ValueError, "the position is negative, or flags has not 16 rows");
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

/* Set-up */

static int
set_up(PyObject *Py_UNUSED(module))
{
    PyObject *states = NULL;
    int failed = look_up_properties() < 0 || look_up("protocols.mqtt.packets", "Publish", &py.publish) < 0
                 || look_up("protocols.mqtt.states", "Awaits", &states) < 0
                 || (py.awaits_pubrel = PyObject_GetAttrString(states, "PUBREL")) == NULL;
    for (size_t kind = 0; !failed && kind < ACKNOWLEDGEMENTS; kind++) {
        const char *state = acknowledgements[kind].state;
        failed = look_up("protocols.mqtt.packets", acknowledgements[kind].name, &acknowledgements[kind].type) < 0
                 || (state && (acknowledgements[kind].awaited = PyObject_GetAttrString(states, state)) == NULL);
    }
    Py_XDECREF(states);
    return failed ? -1 : 0;
}

static PyMethodDef functions[] = {
    {"take_usual", take_usual, METH_VARARGS, PyDoc_STR("Parse a run of usual packets; see usual.py.")},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE("protocols.mqtt._native", "Runs of packets in C; receiving.py parses what it leaves.")
