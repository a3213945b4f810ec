/* The body: the record's value, and the header that says how the body had it. */
#include "mapping/amqp/_native.h"

/* The value of the header `amqp.body`; `prefix` is what stands before the content where it is not the shortest form. */
static PyObject *
form_of(const char *kind, const Section *section, const uint8_t *content, int with_size)
{
    char text[8 + 2 * 15 + 1 + 20], *out = text; /* a descriptor of ten bytes, a constructor and four of length */
    size_t size = strlen(kind);
    memcpy(out, kind, size);
    out = write_hex(out + size, section->start, (size_t)(content - section->start));
    *out++ = '/';
    if (with_size) {
        out += snprintf(out, 20, "%zu", (size_t)(section->end - content));
    }
    return PyBytes_FromStringAndSize(text, out - text);
}

/* The header `content-type` for JSON of our making, if there is none. */
static Verdict
put_json_type(Message *message)
{
    PyObject *name = py.properties[CONTENT_TYPE];
    for (Py_ssize_t index = 0; index < message->count; index++) {
        if (PyTuple_GET_ITEM(message->headers[index], 0) == name) {
            return TAKEN;
        }
    }
    return put(message, name, Py_NewRef(py.json));
}

/* A map, a list or a sequence: what becomes of it is said in Python, `mapping.amqp.body`. */
static Verdict
take_compound(Message *message, const Section *section)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(message->data);
    PyObject *body = PyObject_CallFunction(py.to_value, "O[(innn)]", message->data, section->code,
                                           (Py_ssize_t)(section->start - data), (Py_ssize_t)(section->value - data),
                                           (Py_ssize_t)(section->end - data));
    if (!body) { /* the reference says what is wrong with it */
        PyErr_Clear();
        return LEFT;
    }
    PyObject *form = PyObject_GetAttrString(body, "form");
    PyObject *exact = PyObject_GetAttrString(body, "exact");
    PyObject *is_json = PyObject_GetAttrString(body, "is_json");
    message->value = PyObject_GetAttrString(body, "value");
    Verdict verdict = form && exact && is_json && message->value ? TAKEN : FAILED;
    if (verdict == TAKEN && exact != Py_None) {
        message->exact = message->exact_body = 1;
    }
    if (verdict == TAKEN && form != Py_None) {
        verdict = put(message, py.body, Py_NewRef(form));
    }
    if (verdict == TAKEN && is_json == Py_True) {
        verdict = put_json_type(message);
    }
    Py_DECREF(body);
    Py_XDECREF(form);
    Py_XDECREF(exact);
    Py_XDECREF(is_json);
    return verdict;
}

/* The record's value, and the header that says how the body had it. */
Verdict
take_body(Message *message, const Section *section)
{
    uint8_t constructor = section->value[0];
    int usual = section->value - section->start == 3; /* the descriptor's form */
    int small = constructor == 0xA0 || constructor == 0xA1, text = is_string(constructor);
    if (section->code == VALUE && constructor == 0x40 && usual) {
        message->value = Py_NewRef(Py_None);
        return put(message, py.body, Py_NewRef(py.null_form));
    }
    if (section->code != DATA && constructor >= 0xC0) {
        return section->code == VALUE || section->code == SEQUENCE ? take_compound(message, section) : LEFT;
    }
    if (!(text && section->code == VALUE) && !(is_binary(constructor) && (section->code == VALUE || section->code == DATA))) {
        return LEFT;
    }
    const uint8_t *content = section->value + (small ? 2 : 5);
    size_t size = (size_t)(section->end - content);
    if (text && !is_utf8(content, size)) {
        return LEFT;
    }
    message->value = bytes_of(content, size);
    if (!message->value) {
        return FAILED;
    }
    int shortest = usual && (small || size > 255);
    if (section->code == DATA) {
        return shortest ? TAKEN : put(message, py.body, form_of("data:", section, content, 1));
    }
    if (shortest) {
        return put(message, py.body, Py_NewRef(text ? py.text_form : py.binary_form));
    }
    return put(message, py.body, form_of(text ? "v:str:" : "v:bin:", section, content, 0));
}
