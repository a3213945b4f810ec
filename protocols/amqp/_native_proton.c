/* Looks up proton's functions in the library that `cproton` has loaded, and checks their types. */
#include "protocols/amqp/_native.h"

struct Proton pn;

/* `cproton`'s foreign functions, and what `protocols.amqp.native` has. */
static struct {
    PyObject *ffi, *lib, *delivery_event, *address, *events;
} py;

void *
pointer_of(PyObject *address)
{
    void *found = PyLong_AsVoidPtr(address);
    if (!found && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "a null address");
    }
    return found;
}

/* The pointer that a cffi object is; NULL with an exception on failure. */
static void *
pointer_to(PyObject *object)
{
    PyObject *address = PyObject_CallOneArg(py.address, object);
    void *found = address ? pointer_of(address) : NULL;
    Py_XDECREF(address);
    return found;
}

/* Store the address of one of proton's functions in `place`, if it has this type according to cffi. */
static int
find_function(const char *name, const char *type, void *place)
{
    PyObject *pointer = PyObject_CallMethod(py.ffi, "addressof", "Os", py.lib, name);
    PyObject *found = pointer ? PyObject_CallMethod(py.ffi, "typeof", "O", pointer) : NULL;
    PyObject *cname = found ? PyObject_GetAttrString(found, "cname") : NULL;
    void *function = NULL;
    if (cname && PyUnicode_CompareWithASCIIString(cname, type)) {
        PyErr_Format(PyExc_ImportError, "proton's %s is %U, not %s", name, cname, type);
    }
    else if (cname) {
        function = pointer_to(pointer);
        memcpy(place, &function, sizeof function);
    }
    Py_XDECREF(pointer);
    Py_XDECREF(found);
    Py_XDECREF(cname);
    return function ? 0 : -1;
}

int
look_up_proton(void)
{
    static const Wanted wanted[] = {
        {"cproton", "ffi", &py.ffi},
        {"cproton", "lib", &py.lib},
        {"cproton", "PN_DELIVERY", &py.delivery_event},
        {"protocols.amqp.native", "address", &py.address},
        {"protocols.amqp.native", "EVENTS", &py.events}, /* the collector that all connections share */
    };
    static const struct {
        const char *name, *type;
        void *place;
    } functions[] = {
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
    pn.delivery_event = (int)PyLong_AsLong(py.delivery_event);
    pn.events = PyErr_Occurred() ? NULL : pointer_to(py.events);
    int failed = pn.events ? 0 : -1;
    for (size_t index = 0; !failed && index < sizeof functions / sizeof functions[0]; index++) {
        failed = find_function(functions[index].name, functions[index].type, functions[index].place);
    }
    return failed;
}
