/* AMQP messages to records, in C. */
#include "mapping/native.h"

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, refuse_when_switched_off},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mapping.amqp._native",
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
