/* Records of HTTP bodies that have only a key and a value: the C implementation of incoming.py's Target.

   The Python code is the reference, and the tests check that both give the same records and the same errors. The
   entries are msgspec structs whose JSON is known to be well formed. Unusual entries (with further fields, a key with
   an escape, base64 without padding or malformed) are handed to Python, one at a time: `more` maps a whole entry. */
#include "protocols/native.h"

#include <stdint.h>

/* Looked up once, when the module is imported; lives as long as the process. */
static struct {
    PyObject *record, *unset, *json_key, *from_base64;
} py;

/* The common arguments of all records of a body. */
typedef struct {
    PyObject *topic, *partition, *headers;
    PyObject *more; /* makes the record of an entry with further fields */
    int binary;
} Common;

/* The two types of entries, the places of their fields, and the function that makes the bytes of a key or a value. */
typedef struct {
    PyObject *type;
    Py_ssize_t partition, timestamp, headers, key, value;
    Py_ssize_t key_format, value_format; /* 0: it has none */
    PyObject *(*content)(PyObject *from, const Common *common, int is_key);
} Entries;

/* JSON */

static inline int
is_space(char one)
{
    return one == ' ' || one == '\n' || one == '\r' || one == '\t';
}

/* Return the JSON text without insignificant space. */
static PyObject *
compact(const char *text, Py_ssize_t size)
{
    Py_ssize_t at = 0;
    while (at < size && !is_space(text[at])) {
        at++;
    }
    if (at == size) {
        return PyBytes_FromStringAndSize(text, size);
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, size);
    if (!made) {
        return NULL;
    }
    char *out = PyBytes_AS_STRING(made);
    int in_string = 0;
    for (at = 0; at < size; at++) {
        char one = text[at];
        if (!in_string && is_space(one)) {
            continue;
        }
        *out++ = one;
        if (one == '"') {
            in_string = !in_string;
        } else if (one == '\\' && at + 1 < size) {
            *out++ = text[++at];
        }
    }
    Py_ssize_t left = out - PyBytes_AS_STRING(made);
    if (left != size) {
        _PyBytes_Resize(&made, left);
    }
    return made;
}

static PyObject *
json_content(PyObject *from, const Common *Py_UNUSED(common), int is_key)
{
    Py_buffer view;
    if (PyObject_GetBuffer(from, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const char *text = view.buf;
    Py_ssize_t size = view.len;
    PyObject *made;
    if (size == 4 && memcmp(text, "null", 4) == 0) {
        made = Py_NewRef(Py_None);
    } else if (!is_key || size < 2 || text[0] != '"') {
        made = compact(text, size);
    } else if (!memchr(text, '\\', (size_t)size)) {
        made = PyBytes_FromStringAndSize(text + 1, size - 2);
    } else {
        PyObject *bytes = PyBytes_FromStringAndSize(text, size);
        made = bytes ? PyObject_CallOneArg(py.json_key, bytes) : NULL;
        Py_XDECREF(bytes);
    }
    PyBuffer_Release(&view);
    return made;
}

/* Text, and base64 */

#define NO_SIXTH 64

static uint8_t sixths[256]; /* the six bits of each base64 letter, or NO_SIXTH */

static void
fill_sixths(void)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    memset(sixths, NO_SIXTH, sizeof sixths);
    for (uint8_t value = 0; value < 64; value++) {
        sixths[(unsigned char)letters[value]] = value;
    }
}

/* Decode valid, padded base64; NULL without an exception if it is not. */
static PyObject *
decoded(const unsigned char *text, Py_ssize_t size)
{
    if (size % 4) {
        return NULL;
    }
    Py_ssize_t padding = size ? (text[size - 1] == '=') + (text[size - 1] == '=' && text[size - 2] == '=') : 0;
    Py_ssize_t letters = size - padding;
    PyObject *made = PyBytes_FromStringAndSize(NULL, size / 4 * 3 - padding);
    if (!made) {
        return NULL;
    }
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(made);
    Py_ssize_t at = 0;
    uint8_t seen = 0;
    for (; at + 4 <= letters; at += 4, out += 3) {
        uint8_t a = sixths[text[at]], b = sixths[text[at + 1]], c = sixths[text[at + 2]], d = sixths[text[at + 3]];
        seen |= a | b | c | d;
        out[0] = (unsigned char)(a << 2 | b >> 4);
        out[1] = (unsigned char)(b << 4 | c >> 2);
        out[2] = (unsigned char)(c << 6 | d);
    }
    if (padding) {
        uint8_t a = sixths[text[at]], b = sixths[text[at + 1]], c = padding == 1 ? sixths[text[at + 2]] : 0;
        seen |= a | b | c;
        if (padding == 1 ? c & 3 : b & 15) {
            seen |= NO_SIXTH; /* non-zero unused bits: leave it to Python */
        }
        *out++ = (unsigned char)(a << 2 | b >> 4);
        if (padding == 1) {
            *out++ = (unsigned char)(b << 4 | c >> 2);
        }
    }
    if (seen & NO_SIXTH) {
        Py_CLEAR(made);
    }
    return made;
}

static PyObject *
text_content(PyObject *from, const Common *common, int Py_UNUSED(is_key))
{
    if (from == Py_None) {
        return Py_NewRef(Py_None);
    }
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(from, &size);
    if (!text) {
        return NULL;
    }
    if (!common->binary) {
        return PyBytes_FromStringAndSize(text, size);
    }
    PyObject *made = decoded((const unsigned char *)text, size);
    return made || PyErr_Occurred() ? made : PyObject_CallOneArg(py.from_base64, from);
}

/* Entries */

static Entries json_entries = {.content = json_content}, text_entries = {.content = text_content};

/* Whether an entry has only a key and a value. */
static int
is_plain(PyObject *entry, const Entries *kind)
{
    if ((PyObject *)Py_TYPE(entry) != kind->type || field(entry, kind->partition) != py.unset
        || field(entry, kind->timestamp) != Py_None) {
        return 0;
    }
    if (kind->key_format
        && (field(entry, kind->key_format) != Py_None || field(entry, kind->value_format) != Py_None)) {
        return 0;
    }
    PyObject *headers = field(entry, kind->headers);
    return PyTuple_Check(headers) && PyTuple_GET_SIZE(headers) == 0;
}

static PyObject *
plain_record(PyObject *entry, const Entries *kind, const Common *common)
{
    PyObject *key = kind->content(field(entry, kind->key), common, 1);
    PyObject *value = key ? kind->content(field(entry, kind->value), common, 0) : NULL;
    PyObject *made = NULL;
    if (value) {
        PyObject *fields[] = {common->topic, key, value, common->headers, Py_None, common->partition};
        made = PyObject_Vectorcall(py.record, fields, 6, NULL);
    }
    Py_XDECREF(key);
    Py_XDECREF(value);
    return made;
}

static PyObject *
records(PyObject *entries, const Entries *kind, const Common *common)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t index = 0; found && index < PyList_GET_SIZE(entries); index++) {
        PyObject *entry = Py_NewRef(PyList_GET_ITEM(entries, index)); /* `more` might change the list */
        PyObject *record = is_plain(entry, kind) ? plain_record(entry, kind, common)
                                                 : PyObject_CallFunction(common->more, "nO", index, entry);
        if (!record || PyList_Append(found, record) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(record);
        Py_DECREF(entry);
    }
    return found;
}

static PyObject *
json_records(PyObject *Py_UNUSED(module), PyObject *args)
{
    Common common = {0};
    PyObject *entries;
    if (!PyArg_ParseTuple(args, "O!OOOO:json_records", &PyList_Type, &entries, &common.topic, &common.partition,
                          &common.headers, &common.more)) {
        return NULL;
    }
    return records(entries, &json_entries, &common);
}

static PyObject *
text_records(PyObject *Py_UNUSED(module), PyObject *args)
{
    Common common = {0};
    PyObject *entries;
    if (!PyArg_ParseTuple(args, "O!OOOOp:text_records", &PyList_Type, &entries, &common.topic, &common.partition,
                          &common.headers, &common.more, &common.binary)) {
        return NULL;
    }
    return records(entries, &text_entries, &common);
}

/* The module */

static int
set_up(PyObject *Py_UNUSED(module))
{
    static const Wanted wanted[] = {
        {"mapping.record", "Record", &py.record},
        {"msgspec", "UNSET", &py.unset},
        {"mapping.rest.contents", "json_key", &py.json_key},
        {"mapping.rest.contents", "from_base64", &py.from_base64},
        {"protocols.rest.requests", "JsonRecord", &json_entries.type},
        {"protocols.rest.requests", "TextRecord", &text_entries.type},
    };
    static const Place places[] = {
        {&json_entries.type, "partition", &json_entries.partition},
        {&json_entries.type, "timestamp", &json_entries.timestamp},
        {&json_entries.type, "headers", &json_entries.headers},
        {&json_entries.type, "key", &json_entries.key},
        {&json_entries.type, "value", &json_entries.value},
        {&json_entries.type, "key_format", &json_entries.key_format},
        {&json_entries.type, "value_format", &json_entries.value_format},
        {&text_entries.type, "partition", &text_entries.partition},
        {&text_entries.type, "timestamp", &text_entries.timestamp},
        {&text_entries.type, "headers", &text_entries.headers},
        {&text_entries.type, "key", &text_entries.key},
        {&text_entries.type, "value", &text_entries.value},
    };
    fill_sixths();
    return LOOK_UP(wanted) == 0 && FIND_FIELDS(places) == 0 ? 0 : -1;
}

static PyMethodDef functions[] = {
    {"json_records", json_records, METH_VARARGS, PyDoc_STR("Records of entries in the json format; see incoming.py.")},
    {"text_records", text_records, METH_VARARGS, PyDoc_STR("Those of the text and binary formats; see incoming.py.")},
    {NULL, NULL, 0, NULL},
};

NATIVE_MODULE("mapping.rest._native", "Records of HTTP bodies, in C; incoming.py is the same in Python.")
