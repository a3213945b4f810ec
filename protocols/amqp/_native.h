/* proton's functions that `protocols.amqp._native` calls; `_native_proton.c` looks them up. */
#ifndef TRIVIUM_PROTOCOLS_AMQP_NATIVE_H
#define TRIVIUM_PROTOCOLS_AMQP_NATIVE_H

#include "protocols/native.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* As proton's headers declare them; the structures are opaque here. */
typedef struct pn_collector_t pn_collector_t;
typedef struct pn_event_t pn_event_t;
typedef struct pn_delivery_t pn_delivery_t;
typedef struct pn_link_t pn_link_t;
typedef struct {
    size_t size;
    const char *start;
} pn_bytes_t;

struct Proton {
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
};
extern struct Proton pn;

/* The pointer to one of proton's objects from its address as an int; NULL with an exception on failure. */
void *pointer_of(PyObject *address);

int look_up_proton(void); /* for the module's set-up */

#endif
