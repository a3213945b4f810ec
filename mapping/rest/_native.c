/* Records of HTTP bodies that have only a key and a value: the C implementation of incoming.py's Target.

   The Python code is the reference, and the tests check that both give the same records and the same errors. The
   entries are msgspec structs whose JSON is known to be well formed. Unusual entries (with further fields, a key with
   an escape, base64 without padding or malformed) are handed to Python, one at a time: `more` maps a whole entry. */
#include "protocols/native.h"

#include <stdint.h>

/* Looked up once, when the module is imported; lives as long as the process. */
static struct {
    PyObject *record, *unset, *json_key, *from_base64;
    PyObject *partition, *timestamp, *headers, *key_format, *value_format, *key, *value; /* names of fields */
} py;

/* The common arguments of all records of a body. */
typedef struct {
    PyObject *topic, *partition, *headers;
    PyObject *more; /* makes the record of an entry with further fields */
    int binary;
} Common;

typedef PyObject *(*Content)(PyObject *field, const Common *common, int is_key);

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
json_content(PyObject *field, const Common *Py_UNUSED(common), int is_key)
{
    Py_buffer view;
    if (PyObject_GetBuffer(field, &view, PyBUF_SIMPLE) < 0) {
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
text_content(PyObject *field, const Common *common, int Py_UNUSED(is_key))
{
    if (field == Py_None) {
        return Py_NewRef(Py_None);
    }
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(field, &size);
    if (!text) {
        return NULL;
    }
    if (!common->binary) {
        return PyBytes_FromStringAndSize(text, size);
    }
    PyObject *made = decoded((const unsigned char *)text, size);
    return made || PyErr_Occurred() ? made : PyObject_CallOneArg(py.from_base64, field);
}

/* Entries */

/* Whether a field of an entry is `wanted`; -1 with an error. */
static int
has(PyObject *entry, PyObject *name, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(entry, name);
    if (!found) {
        return -1;
    }
    int same = found == wanted;
    Py_DECREF(found);
    return same;
}

/* Whether an entry has only a key and a value; -1 with an error. */
static int
is_plain(PyObject *entry, int is_json)
{
    int plain = has(entry, py.partition, py.unset);
    if (plain > 0) {
        plain = has(entry, py.timestamp, Py_None);
    }
    if (plain > 0 && is_json) {
        plain = has(entry, py.key_format, Py_None);
        if (plain > 0) {
            plain = has(entry, py.value_format, Py_None);
        }
    }
    if (plain > 0) {
        PyObject *headers = PyObject_GetAttr(entry, py.headers);
        int full = headers ? PyObject_IsTrue(headers) : -1;
        Py_XDECREF(headers);
        plain = full < 0 ? -1 : !full;
    }
    return plain;
}

static PyObject *
content_of(PyObject *entry, int is_key, Content content, const Common *common)
{
    PyObject *field = PyObject_GetAttr(entry, is_key ? py.key : py.value);
    PyObject *made = field ? content(field, common, is_key) : NULL;
    Py_XDECREF(field);
    return made;
}

static PyObject *
plain_record(PyObject *entry, Content content, const Common *common)
{
    PyObject *key = content_of(entry, 1, content, common);
    PyObject *value = key ? content_of(entry, 0, content, common) : NULL;
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
other_record(PyObject *entry, Py_ssize_t index, const Common *common)
{
    PyObject *place = PyLong_FromSsize_t(index);
    if (!place) {
        return NULL;
    }
    PyObject *made = PyObject_CallFunctionObjArgs(common->more, place, entry, NULL);
    Py_DECREF(place);
    return made;
}

static PyObject *
records(PyObject *entries, Content content, const Common *common)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t index = 0; found && index < PyList_GET_SIZE(entries); index++) {
        PyObject *entry = Py_NewRef(PyList_GET_ITEM(entries, index)); /* `more` might change the list */
        int plain = is_plain(entry, content == json_content);
        PyObject *record = NULL;
        if (plain >= 0) {
            record = plain ? plain_record(entry, content, common) : other_record(entry, index, common);
        }
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
    return records(entries, json_content, &common);
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
    return records(entries, text_content, &common);
}

/* The module */

static int
look_up_all(PyObject *Py_UNUSED(module))
{
    static const struct {
        const char *name;
        PyObject **found;
    } names[] = {
        {"partition", &py.partition}, {"timestamp", &py.timestamp},       {"headers", &py.headers},
        {"key_format", &py.key_format}, {"value_format", &py.value_format}, {"key", &py.key},
        {"value", &py.value},
    };
    for (size_t index = 0; index < sizeof names / sizeof names[0]; index++) {
        *names[index].found = PyUnicode_InternFromString(names[index].name);
        if (!*names[index].found) {
            return -1;
        }
    }
    fill_sixths();
    return look_up("mapping.record", "Record", &py.record) || look_up("msgspec", "UNSET", &py.unset)
                   || look_up("mapping.rest.contents", "json_key", &py.json_key)
                   || look_up("mapping.rest.contents", "from_base64", &py.from_base64)
               ? -1
               : 0;
}

static PyMethodDef functions[] = {
    {"json_records", json_records, METH_VARARGS, PyDoc_STR("Records of entries in the json format; see incoming.py.")},
    {"text_records", text_records, METH_VARARGS, PyDoc_STR("Those of the text and binary formats; see incoming.py.")},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, refuse_when_switched_off},
    {Py_mod_exec, look_up_all},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mapping.rest._native",
    .m_doc = PyDoc_STR("Records of HTTP bodies, in C; incoming.py is the same in Python."),
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
