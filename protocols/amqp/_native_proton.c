/* Looks up proton's functions in the library that `cproton` has loaded, and checks their types. */
#include "protocols/amqp/_native.h"

struct Proton pn;

void *
pointer_of(PyObject *address)
{
    void *found = PyLong_AsVoidPtr(address);
    if (!found && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "a null address");
    }
    return found;
}

/* Store the address of one of proton's functions in `place`, if it has this type according to cffi. */
static int
find_function(PyObject *ffi, PyObject *lib, const char *name, const char *type, void *place)
{
    int failed = -1;
    PyObject *pointer = PyObject_CallMethod(ffi, "addressof", "Os", lib, name);
    PyObject *found = pointer ? PyObject_CallMethod(ffi, "typeof", "O", pointer) : NULL;
    PyObject *cname = found ? PyObject_GetAttrString(found, "cname") : NULL;
    PyObject *number = cname ? PyObject_CallMethod(ffi, "cast", "sO", "uintptr_t", pointer) : NULL;
    PyObject *address = number ? PyNumber_Long(number) : NULL;
    if (address && PyUnicode_CompareWithASCIIString(cname, type)) {
        PyErr_Format(PyExc_ImportError, "proton's %s is %U, not %s", name, cname, type);
    }
    else if (address) {
        void *function = pointer_of(address);
        memcpy(place, &function, sizeof function);
        failed = function ? 0 : -1;
    }
    Py_XDECREF(pointer);
    Py_XDECREF(found);
    Py_XDECREF(cname);
    Py_XDECREF(number);
    Py_XDECREF(address);
    return failed;
}

int
look_up_proton(void)
{
    static const struct {
        const char *name, *type;
        void *place;
    } wanted[] = {
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
    PyObject *cproton = PyImport_ImportModule("cproton");
    PyObject *ffi = cproton ? PyObject_GetAttrString(cproton, "ffi") : NULL;
    PyObject *lib = ffi ? PyObject_GetAttrString(cproton, "lib") : NULL;
    PyObject *type = lib ? PyObject_GetAttrString(lib, "PN_DELIVERY") : NULL;
    int failed = type ? 0 : -1;
    if (!failed) {
        pn.delivery_event = (int)PyLong_AsLong(type);
        failed = PyErr_Occurred() ? -1 : 0;
    }
    for (size_t index = 0; !failed && index < sizeof wanted / sizeof wanted[0]; index++) {
        failed = find_function(ffi, lib, wanted[index].name, wanted[index].type, wanted[index].place);
    }
    Py_XDECREF(cproton);
    Py_XDECREF(ffi);
    Py_XDECREF(lib);
    Py_XDECREF(type);
    return failed;
}

/* The collector that all connections share. */
int
look_up_events(void)
{
    PyObject *native = PyImport_ImportModule("protocols.amqp.native");
    PyObject *events = native ? PyObject_GetAttrString(native, "EVENTS") : NULL;
    PyObject *address = events ? PyObject_CallMethod(native, "address", "O", events) : NULL;
    pn.events = address ? pointer_of(address) : NULL;
    Py_XDECREF(native);
    Py_XDECREF(events);
    Py_XDECREF(address);
    return pn.events ? 0 : -1;
}
