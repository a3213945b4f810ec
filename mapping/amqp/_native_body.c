/* Mapping the body to the record's value and the header `amqp.body`. */
#include "mapping/amqp/_native.h"

#define DATA_LIMIT 32                  /* Data sections; a message with more is left to the reference */
#define NOTE_BYTES (2 * 15 + 1 + 20 + 1) /* hex of descriptor (10), constructor and length (4); slash; size; comma */

/* Write the bytes before the content in hex; called when they are not the shortest encoding. */
static char *
write_prefix(char *out, const Section *section, const uint8_t *content)
{
    out = write_hex(out, section->start, (size_t)(content - section->start));
    *out++ = '/';
    return out;
}

/* Return the value of the header `amqp.body` for an amqp-value that is not in the shortest encoding. */
static PyObject *
form_of(const char *kind, const Section *section, const uint8_t *content)
{
    char text[8 + NOTE_BYTES], *out = text;
    size_t size = strlen(kind);
    memcpy(out, kind, size);
    out = write_prefix(out + size, section, content);
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
    if (!body) { /* the reference raises the error again */
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

/* Map the Data sections from the first one to the message's end: the value is their concatenated content. */
static Verdict
take_data(Message *message, const Section *first, const uint8_t *end)
{
    char notes[5 + DATA_LIMIT * NOTE_BYTES] = "data:", *out = notes + 5;
    Section sections[DATA_LIMIT];
    const uint8_t *contents[DATA_LIMIT];
    size_t count = 0, size = 0;
    int shortest = 0;
    Section section = *first;
    for (;;) {
        if (section.code != DATA || !is_binary(section.value[0])) {
            return LEFT;
        }
        contents[count] = content_of(&section, &shortest);
        sections[count] = section;
        size_t part = (size_t)(section.end - contents[count]);
        out = shortest ? out : write_prefix(out, &section, contents[count]);
        out += snprintf(out, 21, "%zu,", part);
        size += part;
        count++;
        if (section.end == end) {
            break;
        }
        if (count == DATA_LIMIT || read_section(section.end, end, &section) != TAKEN) {
            return LEFT;
        }
    }
    message->value = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (!message->value) {
        return FAILED;
    }
    char *at = PyBytes_AS_STRING(message->value);
    for (size_t index = 0; index < count; index++) {
        size_t part = (size_t)(sections[index].end - contents[index]);
        memcpy(at, contents[index], part);
        at += part;
    }
    if (count == 1 && shortest) { /* the usual form needs no header */
        return TAKEN;
    }
    return put(message, py.body, PyBytes_FromStringAndSize(notes, out - notes - 1)); /* without the last comma */
}

/* Map the body, which starts at `section` and ends with the message. */
Verdict
take_body(Message *message, const Section *section, const uint8_t *end)
{
    uint8_t constructor = section->value[0];
    int shortest, text = is_string(constructor);
    if (section->code == DATA) {
        return take_data(message, section, end);
    }
    if (section->end != end) {
        return LEFT;
    }
    if (section->code == VALUE && constructor == 0x40 && section->value - section->start == 3) {
        message->value = Py_NewRef(Py_None);
        return put(message, py.body, Py_NewRef(py.null_form));
    }
    if (constructor >= 0xC0) {
        return section->code == VALUE || section->code == SEQUENCE ? take_compound(message, section) : LEFT;
    }
    if (section->code != VALUE || !(text || is_binary(constructor))) {
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
    if (shortest) {
        return put(message, py.body, Py_NewRef(text ? py.text_form : py.binary_form));
    }
    return put(message, py.body, form_of(text ? "v:str:" : "v:bin:", section, content));
}
