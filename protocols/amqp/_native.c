/*
 * The work per delivery, for a run of deliveries in one call: this file calls proton's C functions directly, and no
 * Python code runs between two deliveries. `tests/reference/amqp_deliveries.py` has the same functions in Python.
 *
 * The functions are those of the library that `cproton` has loaded: cffi returns their addresses and their types, and a
 * version of proton with other types is refused at import.
 *
 * Python identifies a delivery or a link by its address, an int. An unusual event ends the run and is left for the
 * engine.
 */
#include "protocols/amqp/_native.h"

#include <stdbool.h>
#include <sys/types.h>

#define TAG_BYTES 4
#define ACCEPTED 0x24             /* part 3.4.2 */
#define TRANSACTIONAL_STATE 0x34  /* part 4.5.8 */

/* As proton's headers declare them; the structures are opaque here. */
typedef struct pn_collector_t pn_collector_t;
typedef struct pn_event_t pn_event_t;
typedef struct pn_delivery_t pn_delivery_t;
typedef struct pn_link_t pn_link_t;
typedef struct {
    size_t size;
    const char *start;
} pn_bytes_t;

static struct {
    pn_event_t *(*peek)(pn_collector_t *);
    bool (*pop)(pn_collector_t *);
    int (*type)(pn_event_t *);
    pn_delivery_t *(*event_delivery)(pn_event_t *);
    pn_link_t *(*link)(pn_delivery_t *);
    bool (*readable)(pn_delivery_t *);
    bool (*partial)(pn_delivery_t *);
    size_t (*pending)(pn_delivery_t *);
    bool (*settled)(pn_delivery_t *);
    uint64_t (*remote_state)(pn_delivery_t *);
    void (*update)(pn_delivery_t *, uint64_t);
    void (*settle)(pn_delivery_t *);
    ssize_t (*recv)(pn_link_t *, char *, size_t);
    bool (*advance)(pn_link_t *);
    pn_delivery_t *(*delivery)(pn_link_t *, pn_bytes_t);
    ssize_t (*send)(pn_link_t *, const char *, size_t);
    pn_collector_t *events; /* `native.EVENTS` */
    int delivery_event;     /* PN_DELIVERY */
} pn;

/* Python objects that are looked up once: types, and the name of an attribute. */
static struct {
    PyObject *link, *transfers, *accepted;
    PyObject *address;
} py;

/* Positions of fields of a link, and of the two types of events. */
static struct {
    Py_ssize_t attached, incoming, partial, credit, limit, held, held_bytes;
    struct EventPlaces {
        Py_ssize_t link, deliveries, messages;
    } transfers, accepted;
} at;

/* Consecutive deliveries of one link, and their shared state. */
typedef struct {
    PyObject *links, *sent, *events; /* the engine's */
    bool transactional;
    pn_link_t *handle;  /* NULL when there is no run */
    PyObject *link;     /* our Link; owned */
    bool incoming;
    Py_ssize_t credit, limit;          /* of an incoming link */
    Py_ssize_t taken, held, bytes;     /* changes to the link's `credit` (less), `held` and `held_bytes` */
    PyObject *deliveries, *messages;   /* the lists of the run's event; owned; NULL when there is no event yet */
} Run;

/* The pointer from an address, an int whose reference it takes; NULL with an exception on failure, and for NULL. */
static void *
pointer_of(PyObject *address)
{
    void *found = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    if (!found && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "a null address");
    }
    return found;
}

/* Runs */

/* Add to a number that a link keeps. */
static int
change(PyObject *link, Py_ssize_t place, Py_ssize_t by)
{
    if (!by) {
        return 0;
    }
    Py_ssize_t before = PyLong_AsSsize_t(field(link, place));
    PyObject *number = before == -1 && PyErr_Occurred() ? NULL : PyLong_FromSsize_t(before + by);
    if (number) {
        set_field(link, place, number);
    }
    return number ? 0 : -1;
}

/* Write the run's changes to its link, and clear the run. An error may be set. */
static Verdict
end_run(Run *run)
{
    if (!run->handle) {
        return TAKEN;
    }
    int failed = change(run->link, at.credit, -run->taken) || change(run->link, at.held, run->held)
                 || change(run->link, at.held_bytes, run->bytes);
    run->handle = NULL;
    Py_CLEAR(run->link);
    Py_CLEAR(run->deliveries);
    Py_CLEAR(run->messages);
    return failed ? FAILED : TAKEN;
}

/* Start a run for a link; LEFT when the link is unknown, detached, or has an incomplete message. */
static Verdict
begin_run(Run *run, pn_link_t *handle)
{
    PyObject *address = PyLong_FromVoidPtr(handle);
    PyObject *link = address ? PyDict_GetItemWithError(run->links, address) : NULL;
    Py_XDECREF(address);
    if (!link) {
        return PyErr_Occurred() ? FAILED : LEFT;
    }
    if ((PyObject *)Py_TYPE(link) != py.link || field(link, at.attached) != Py_True) {
        return LEFT;
    }
    run->incoming = field(link, at.incoming) == Py_True;
    if (run->incoming) {
        if (field(link, at.partial) != Py_None) {
            return LEFT;
        }
        run->credit = PyLong_AsSsize_t(field(link, at.credit));
        run->limit = PyLong_AsSsize_t(field(link, at.limit));
        if (PyErr_Occurred()) {
            return FAILED;
        }
    }
    run->handle = handle;
    run->link = Py_NewRef(link);
    run->taken = run->held = run->bytes = 0;
    return TAKEN;
}

/* Take the lists of the last event if it has this type and the run's link, else those of a new event. */
static Verdict
join_event(Run *run, PyObject *type, const struct EventPlaces *places)
{
    if (run->deliveries) {
        return TAKEN;
    }
    Py_ssize_t count = PyList_GET_SIZE(run->events);
    PyObject *event = count ? PyList_GET_ITEM(run->events, count - 1) : NULL;
    if (event && (PyObject *)Py_TYPE(event) == type && field(event, places->link) == run->link) {
        run->deliveries = Py_NewRef(field(event, places->deliveries));
        run->messages = places->messages ? Py_NewRef(field(event, places->messages)) : NULL;
        return TAKEN;
    }
    run->deliveries = PyList_New(0);
    run->messages = run->deliveries && places->messages ? PyList_New(0) : NULL;
    PyObject *fields[] = {run->link, run->deliveries, run->messages};
    event = run->messages || (run->deliveries && !places->messages)
                ? PyObject_Vectorcall(type, fields, places->messages ? 3 : 2, NULL)
                : NULL;
    int failed = event ? PyList_Append(run->events, event) : -1;
    Py_XDECREF(event);
    return failed ? FAILED : TAKEN;
}

/* Process a complete message that came in one transfer. */
static Verdict
take_transfer(Run *run, pn_delivery_t *delivery)
{
    if (run->taken >= run->credit || !pn.readable(delivery) || pn.partial(delivery)) {
        return LEFT;
    }
    if (run->transactional && pn.remote_state(delivery) == TRANSACTIONAL_STATE) {
        return LEFT;
    }
    size_t size = pn.pending(delivery);
    if (size == 0 || size > (size_t)run->limit) {
        return LEFT;
    }
    PyObject *message = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (!message) {
        return FAILED;
    }
    if (pn.recv(run->handle, PyBytes_AS_STRING(message), size) != (ssize_t)size) { /* it was aborted */
        Py_DECREF(message);
        return LEFT;
    }
    pn.advance(run->handle);
    run->taken++;
    PyObject *token;
    Verdict verdict = join_event(run, py.transfers, &at.transfers);
    if (pn.settled(delivery)) {
        pn.settle(delivery);
        token = Py_NewRef(Py_None);
    }
    else {
        token = PyLong_FromVoidPtr(delivery);
        run->held++;
    }
    if (!token || verdict != TAKEN || PyList_Append(run->messages, message) < 0
        || PyList_Append(run->deliveries, token) < 0) {
        verdict = FAILED;
    }
    Py_DECREF(message);
    Py_XDECREF(token);
    return verdict;
}

/* Process the peer's `accepted` for a delivery that we sent: settle it before the next event, as the engine does. */
static Verdict
take_acceptance(Run *run, pn_delivery_t *delivery)
{
    if (pn.remote_state(delivery) != ACCEPTED) {
        return LEFT;
    }
    PyObject *address = PyLong_FromVoidPtr(delivery);
    if (!address) {
        return FAILED;
    }
    Verdict verdict = LEFT;
    PyObject *sent = PyDict_GetItemWithError(run->sent, address); /* link, token, size in bytes */
    if (sent && PyTuple_CheckExact(sent) && PyTuple_GET_SIZE(sent) == 3 && PyTuple_GET_ITEM(sent, 0) == run->link) {
        Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(sent, 2));
        verdict = size == -1 && PyErr_Occurred() ? FAILED : join_event(run, py.accepted, &at.accepted);
        if (verdict == TAKEN) {
            pn.settle(delivery);
            run->held--;
            run->bytes -= size;
            if (PyList_Append(run->deliveries, PyTuple_GET_ITEM(sent, 1)) < 0
                || PyDict_DelItem(run->sent, address) < 0) {
                verdict = FAILED;
            }
        }
    }
    else if (PyErr_Occurred()) {
        verdict = FAILED;
    }
    Py_DECREF(address);
    return verdict;
}

static Verdict
take_delivery(Run *run, pn_delivery_t *delivery)
{
    pn_link_t *handle = pn.link(delivery);
    if (handle != run->handle) {
        if (end_run(run) != TAKEN) {
            return FAILED;
        }
        Verdict verdict = begin_run(run, handle);
        if (verdict != TAKEN) {
            return verdict;
        }
    }
    return run->incoming ? take_transfer(run, delivery) : take_acceptance(run, delivery);
}

/* Functions */

static PyObject *
take_usual(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    if (check_count("take_usual", given, 4) < 0) {
        return NULL;
    }
    Run run = {.links = arguments[0], .sent = arguments[1], .events = arguments[3]};
    run.transactional = arguments[2] == Py_True;
    if (!PyDict_CheckExact(run.links) || !PyDict_CheckExact(run.sent) || !PyList_CheckExact(run.events)) {
        PyErr_SetString(PyExc_TypeError, "take_usual(links: dict, sent: dict, transactional, events: list)");
        return NULL;
    }
    pn_event_t *event;
    int type = 0;
    Verdict verdict = TAKEN;
    while (verdict == TAKEN && (event = pn.peek(pn.events)) != NULL) {
        type = pn.type(event);
        verdict = type == pn.delivery_event ? take_delivery(&run, pn.event_delivery(event)) : LEFT;
        if (verdict == TAKEN) {
            pn.pop(pn.events);
            type = 0;
        }
    }
    if (end_run(&run) == FAILED || verdict == FAILED) {
        return NULL;
    }
    return PyLong_FromLong(type);
}

static PyObject *
accept(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    if (check_count("accept", given, 2) < 0) {
        return NULL;
    }
#ifndef NDEBUG
    pn_link_t *handle = pointer_of(PyObject_GetAttr(arguments[0], py.address));
    if (!handle) {
        return NULL;
    }
#endif
    PyObject *all = PySequence_Fast(arguments[1], "deliveries are a sequence");
    if (!all) {
        return NULL;
    }
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(all); index++) {
        PyObject *address = PySequence_Fast_GET_ITEM(all, index);
        if (address == Py_None) {
            continue;
        }
        pn_delivery_t *delivery = pointer_of(Py_NewRef(address));
        if (!delivery) {
            Py_DECREF(all);
            return NULL;
        }
#ifndef NDEBUG
        if (pn.link(delivery) != handle) { /* one that was settled has no link, or another one's */
            Py_DECREF(all);
            PyErr_SetString(PyExc_AssertionError, "not a live delivery of this link");
            return NULL;
        }
#endif
        pn.update(delivery, ACCEPTED);
        pn.settle(delivery);
    }
    Py_DECREF(all);
    Py_RETURN_NONE;
}

/* Add a delivery that was sent unsettled to `sent`, in the form that `take_acceptance` reads. */
static int
note_sent(PyObject *sent, pn_delivery_t *delivery, PyObject *link, PyObject *token, Py_ssize_t size)
{
    PyObject *address = PyLong_FromVoidPtr(delivery);
    PyObject *bytes = PyLong_FromSsize_t(size);
    PyObject *noted = bytes ? PyTuple_Pack(3, link, token, bytes) : NULL;
    int failed = address && noted ? PyDict_SetItem(sent, address, noted) : -1;
    Py_XDECREF(address);
    Py_XDECREF(bytes);
    Py_XDECREF(noted);
    return failed;
}

/* Send `messages`, and return their size in bytes; -1 with an exception. */
static Py_ssize_t
send_all(pn_link_t *handle, unsigned long number, PyObject *messages, PyObject *tokens, PyObject *link, PyObject *sent)
{
    Py_ssize_t total = 0;
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(messages); index++, number++) {
        PyObject *message = PySequence_Fast_GET_ITEM(messages, index);
        if (!PyBytes_CheckExact(message)) {
            PyErr_SetString(PyExc_TypeError, "a message is bytes");
            return -1;
        }
        char tag[TAG_BYTES] = {(char)(number >> 24), (char)(number >> 16), (char)(number >> 8), (char)number};
        pn_delivery_t *delivery = pn.delivery(handle, (pn_bytes_t){sizeof tag, tag}); /* it copies the tag */
        Py_ssize_t size = PyBytes_GET_SIZE(message);
        pn.send(handle, PyBytes_AS_STRING(message), (size_t)size);
        pn.advance(handle);
        if (!tokens) {
            pn.settle(delivery);
        }
        else if (note_sent(sent, delivery, link, PySequence_Fast_GET_ITEM(tokens, index), size) < 0) {
            return -1;
        }
        total += size;
    }
    return total;
}

static PyObject *
send_messages(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given)
{
    if (check_count("send", given, 5) < 0) {
        return NULL;
    }
    pn_link_t *handle = pointer_of(PyObject_GetAttr(arguments[0], py.address));
    unsigned long number = handle ? PyLong_AsUnsignedLongMask(arguments[1]) : 0;
    if (!handle || (number == (unsigned long)-1 && PyErr_Occurred())) {
        return NULL;
    }
    if (!PyDict_CheckExact(arguments[4])) {
        PyErr_SetString(PyExc_TypeError, "sent must be a dict");
        return NULL;
    }
    Py_ssize_t total = -1;
    int settled = arguments[3] == Py_None;
    PyObject *messages = PySequence_Fast(arguments[2], "messages are a sequence");
    PyObject *tokens = messages && !settled ? PySequence_Fast(arguments[3], "tokens are a sequence") : NULL;
    if (tokens && PySequence_Fast_GET_SIZE(tokens) < PySequence_Fast_GET_SIZE(messages)) {
        PyErr_SetString(PyExc_ValueError, "each message has a token");
    }
    else if (tokens || (messages && settled)) {
        total = send_all(handle, number, messages, tokens, arguments[0], arguments[4]);
    }
    Py_XDECREF(messages);
    Py_XDECREF(tokens);
    return total < 0 ? NULL : PyLong_FromSsize_t(total);
}

static PyMethodDef functions[] = {
    {"take_usual", (PyCFunction)(void (*)(void))take_usual, METH_FASTCALL, PyDoc_STR("See _native.pyi.")},
    {"accept", (PyCFunction)(void (*)(void))accept, METH_FASTCALL, PyDoc_STR("See _native.pyi.")},
    {"send", (PyCFunction)(void (*)(void))send_messages, METH_FASTCALL, PyDoc_STR("See _native.pyi.")},
    {"scan", (PyCFunction)(void (*)(void))scan, METH_FASTCALL, PyDoc_STR("See _native.pyi.")},
    {NULL, NULL, 0, NULL},
};

/* Module */

/* Take proton's functions, its collector and its number for a delivery's event. */
static int
look_up_proton(void)
{
    PyObject *function_at, *address, *events, *delivery_event;
    const Wanted wanted[] = {
        {"protocols.amqp.native", "function_at", &function_at},
        {"protocols.amqp.native", "address", &address},
        {"protocols.amqp.native", "EVENTS", &events}, /* the collector that all connections share */
        {"cproton", "PN_DELIVERY", &delivery_event},
    };
    static const struct {
        const char *name, *type;
        void *place;
    } functions_of_proton[] = {
        {"pn_collector_peek", "struct pn_event_t *(*)(struct pn_collector_t *)", &pn.peek},
        {"pn_collector_pop", "_Bool(*)(struct pn_collector_t *)", &pn.pop},
        {"pn_event_type", "pn_event_type_t(*)(struct pn_event_t *)", &pn.type},
        {"pn_event_delivery", "struct pn_delivery_t *(*)(struct pn_event_t *)", &pn.event_delivery},
        {"pn_delivery_link", "struct pn_link_t *(*)(struct pn_delivery_t *)", &pn.link},
        {"pn_delivery_readable", "_Bool(*)(struct pn_delivery_t *)", &pn.readable},
        {"pn_delivery_partial", "_Bool(*)(struct pn_delivery_t *)", &pn.partial},
        {"pn_delivery_pending", "size_t(*)(struct pn_delivery_t *)", &pn.pending},
        {"pn_delivery_settled", "_Bool(*)(struct pn_delivery_t *)", &pn.settled},
        {"pn_delivery_remote_state", "uint64_t(*)(struct pn_delivery_t *)", &pn.remote_state},
        {"pn_delivery_update", "void(*)(struct pn_delivery_t *, uint64_t)", &pn.update},
        {"pn_delivery_settle", "void(*)(struct pn_delivery_t *)", &pn.settle},
        {"pn_link_recv", "ssize_t(*)(struct pn_link_t *, char *, size_t)", &pn.recv},
        {"pn_link_advance", "_Bool(*)(struct pn_link_t *)", &pn.advance},
        {"pn_delivery", "struct pn_delivery_t *(*)(struct pn_link_t *, struct pn_bytes_t)", &pn.delivery},
        {"pn_link_send", "ssize_t(*)(struct pn_link_t *, char *, size_t)", &pn.send},
    };
    if (LOOK_UP(wanted) < 0) {
        return -1;
    }
    pn.delivery_event = (int)PyLong_AsLong(delivery_event);
    pn.events = pointer_of(PyObject_CallOneArg(address, events));
    for (size_t index = 0; index < sizeof functions_of_proton / sizeof functions_of_proton[0]; index++) {
        const char *name = functions_of_proton[index].name, *type = functions_of_proton[index].type;
        void *found = PyErr_Occurred() ? NULL : pointer_of(PyObject_CallFunction(function_at, "ss", name, type));
        memcpy(functions_of_proton[index].place, &found, sizeof found);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int
set_up(PyObject *module)
{
    static const Wanted wanted[] = {
        {"protocols.amqp.links", "Link", &py.link},
        {"protocols.amqp.events", "TransfersReceived", &py.transfers},
        {"protocols.amqp.events", "DeliveriesAccepted", &py.accepted},
    };
    static const Place places[] = {
        {&py.link, "attached", &at.attached},
        {&py.link, "incoming", &at.incoming},
        {&py.link, "partial", &at.partial},
        {&py.link, "credit", &at.credit},
        {&py.link, "limit", &at.limit},
        {&py.link, "held", &at.held},
        {&py.link, "held_bytes", &at.held_bytes},
        {&py.transfers, "link", &at.transfers.link},
        {&py.transfers, "deliveries", &at.transfers.deliveries},
        {&py.transfers, "messages", &at.transfers.messages},
        {&py.accepted, "link", &at.accepted.link},
        {&py.accepted, "deliveries", &at.accepted.deliveries},
    };
    py.address = PyUnicode_InternFromString("address");
#ifndef NDEBUG
    if (PyModule_AddIntConstant(module, "CHECKS_ADDRESSES", 1) < 0) {
        return -1;
    }
#else
    (void)module;
#endif
    return py.address && look_up_proton() == 0 && LOOK_UP(wanted) == 0 && FIND_FIELDS(places) == 0 ? 0 : -1;
}

NATIVE_MODULE("protocols.amqp._native", "Runs of deliveries in C.")
