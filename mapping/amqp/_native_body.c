/* Mapping the body to the record's value and the header `amqp.body`. */
#include "mapping/amqp/_native.h"

#define FORM_BYTES (6 + 2 * 15 + 1 + 20 + 1) /* kind; hex of descriptor (10), constructor and length (4); slash; size */

/* Return the header `amqp.body` of a section that is not in the shortest encoding. */
static PyObject *
form_of(const char *kind, const Section *section, const uint8_t *content)
{
    char text[FORM_BYTES];
    size_t size = strlen(kind);
    memcpy(text, kind, size);
    char *out = write_hex(text + size, section->start, (size_t)(content - section->start));
    *out++ = '/';
    if (section->code == DATA) {
        out += snprintf(out, 21, "%zu", (size_t)(section->end - content));
    }
    return PyBytes_FromStringAndSize(text, out - text);
}

/* Return the start of a binary's or string's content, and whether the bytes before it are the shortest encoding. */
static const uint8_t *
content_of(const Section *section, int *shortest)
{
    int small = section->value[0] < 0xB0;
    const uint8_t *content = section->value + (small ? 2 : 5);
    *shortest = section->value - section->start == 3 && (small || section->end - content > 255);
    return content;
}

/* Add the header `content-type` for JSON made from AMQP values, unless the message has one. */
static Verdict
put_json_type(Message *message)
{
    PyObject *name = property_name(CONTENT_TYPE);
    for (Py_ssize_t index = 0; index < message->count; index++) {
        if (PyTuple_GET_ITEM(message->headers[index], 0) == name) {
            return TAKEN;
        }
    }
    return put(message, name, Py_NewRef(py.json));
}

/* Map a map, a list or a sequence with the Python code, `mapping.amqp.body`. */
static Verdict
take_compound(Message *message, const Section *section)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(message->data);
    PyObject *body = PyObject_CallFunction(py.to_value, "O[(innn)]", message->data, section->code,
                                           (Py_ssize_t)(section->start - data), (Py_ssize_t)(section->value - data),
                                           (Py_ssize_t)(section->end - data));
    if (!body || (PyObject *)Py_TYPE(body) != py.stored_body) { /* the reference raises the error again */
        Py_XDECREF(body);
        PyErr_Clear();
        return LEFT;
    }
    Verdict verdict = TAKEN;
    message->value = Py_NewRef(field(body, fields_at.value));
    if (field(body, fields_at.exact) != Py_None) {
        message->exact = message->exact_body = 1;
    }
    if (field(body, fields_at.form) != Py_None) {
        verdict = put(message, py.body, Py_NewRef(field(body, fields_at.form)));
    }
    if (verdict == TAKEN && field(body, fields_at.is_json) == Py_True) {
        verdict = put_json_type(message);
    }
    Py_DECREF(body);
    return verdict;
}

/* Map the body, one section with which the message ends; a message with more is left to the reference. */
Verdict
take_body(Message *message, const Section *section, const uint8_t *end)
{
    uint8_t constructor = section->value[0];
    int shortest, text = is_string(constructor), data = section->code == DATA;
    if (section->end != end || !(data || section->code == VALUE || section->code == SEQUENCE)) {
        return LEFT;
    }
    if (section->code == VALUE && constructor == 0x40 && section->value - section->start == 3) {
        message->value = Py_NewRef(Py_None);
        return put(message, py.body, Py_NewRef(py.null_form));
    }
    if (constructor >= 0xC0) {
        return data ? LEFT : take_compound(message, section);
    }
    if (section->code == SEQUENCE || !(is_binary(constructor) || (text && !data))) {
        return LEFT;
    }
    const uint8_t *content = content_of(section, &shortest);
    size_t size = (size_t)(section->end - content);
    if (text && !is_utf8(content, size)) {
        return LEFT;
    }
    message->value = bytes_of(content, size);
    if (!message->value) {
        return FAILED;
    }
    if (!shortest) {
        return put(message, py.body, form_of(data ? "data:" : text ? "v:str:" : "v:bin:", section, content));
    }
    return data ? TAKEN : put(message, py.body, Py_NewRef(text ? py.text_form : py.binary_form));
}
