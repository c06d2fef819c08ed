/* The calls that are made once a message or once a batch, without a Python frame: two base classes, `Calls` of the QP
 * and `Lease` of its batches. What is not plainly in order goes to the contract's own methods in Python, which know
 * every rule and every error; here it is only decided that none of them applies.
 *
 * A call that has to wait first tries a few times with the GIL, then spins, then sleeps in ../completions.h, both without
 * the GIL; signals.h wakes the sleep of the main thread. The GIL guards `struct calls` and `struct lease`, or BEGIN_ALONE
 * and BEGIN_GUARDED where there is none; below, the lock of the QP guards all. No code here holds that lock while it
 * runs Python code or waits for the GIL.
 *
 * Files include this alone, and call only those above them: arguments, signals; record_buffer, message; lease; send,
 * receive, events; queue_pair; module. */
#ifndef MCAST_CALLS_H
#define MCAST_CALLS_H

#include "signals.h"

#include "../qp.h"

enum { CACHED_GIDS = 64 };

/* The records of the messages of a batch. */
struct record_buffer {
	struct mcast_message *records;
	uint32_t size;
};

struct known_gid {
	uint8_t raw[16];
	PyObject *gid;
};

/* The base of the QP. */
struct calls {
	PyObject_HEAD /* the objects that it refers to may refer to it: a region that messages arrive in */
	struct mcast_qp *qp; /* NULL: not made yet */
	unsigned forks;
	int event_fd;

	PyObject *destination; /* the one that the next four are for */
	uint64_t serial;       /* of its address handle */
	uint32_t qp_num, qkey;
	uint32_t group_mtu; /* guard G-MTU: what is longer is for the contract to refuse */

	uint32_t limit; /* of a payload, in bytes; atomic, as are the next two */
	int64_t limit_until;
	int on_device; /* messages arrive in the memory of a device */

	struct record_buffer spare; /* of the last batch that is gone, for the next */

	PyObject *memories; /* generation -> the buffer that payloads arrive in, or a DeviceRegion */
	PyObject *sources;  /* GIDs the QP has sent from */
	struct known_gid senders[CACHED_GIDS], groups[CACHED_GIDS]; /* by the last byte */
};

/* Objects from Python: types, and the contract's own methods. */
extern struct known {
	PyObject *message, *gid, *batch;
	PyObject *send, *send_one, *recv, *recv_one, *release;
} known;

/* Between the two no other thread is in such a part for the same object, up to where a thread may wait: for another
 * object's part, for the GIL that it has released, in Python code. With a GIL that is so everywhere, and they are
 * nothing. A part is left by its end alone. */
#ifdef Py_GIL_DISABLED
#define BEGIN_ALONE(object) Py_BEGIN_CRITICAL_SECTION(object)
#define END_ALONE() Py_END_CRITICAL_SECTION()
#else
#define BEGIN_ALONE(object) {
#define END_ALONE() }
#endif

/* Between the two no other thread is in such a part for the same object, whatever waits in there; so no Python code may
 * run in there. */
#ifdef Py_GIL_DISABLED
struct guard {
	PyMutex mutex;
};
#define BEGIN_GUARDED(object) PyMutex_Lock(&(object)->guard.mutex)
#define END_GUARDED(object) PyMutex_Unlock(&(object)->guard.mutex)
#else
struct guard {
};
/* The GIL keeps others out, unless what is allocated in there begins a garbage collection, as before Python 3.12. */
#define BEGIN_GUARDED(object) { int collects = PyGC_Disable()
#define END_GUARDED(object) if (collects) PyGC_Enable(); }
#endif

/* A new reference, which another thread that changes the container cannot take away; NULL: there is none. */
static inline PyObject *item_of(PyObject *list, Py_ssize_t place)
{
#ifdef Py_GIL_DISABLED
	return PyList_GetItemRef(list, place);
#else
	return Py_XNewRef(PyList_GetItem(list, place));
#endif
}

static inline PyObject *value_of(PyObject *dict, PyObject *key)
{
#ifdef Py_GIL_DISABLED
	PyObject *value;

	PyDict_GetItemRef(dict, key, &value);
	return value;
#else
	return Py_XNewRef(PyDict_GetItemWithError(dict, key));
#endif
}

/* Take the reference to `with`. */
static inline void replace(PyObject **place, PyObject *with)
{
	PyObject *old = *place;

	*place = with;
	Py_XDECREF(old);
}

/* Ask after the last Python code that may run: any may close the QP. */
static inline int is_usable(const struct calls *self)
{
	return self->qp && self->forks == mcast_forks && !mcast_is_closed(self->qp);
}

/* --- arguments.c --- */

/* Know the three types, and the methods of the contract's two classes. -1: with an error. */
int calls_know(PyObject *queue_pair, PyObject *batch, const struct known *types);

/* Call a method of the contract with the arguments that came. */
PyObject *calls_fall_back(PyObject *method, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names);

/* Sorts the arguments into `out` by the names of the parameters; 0 when they do not fit. */
int calls_sort_arguments(PyObject *const *args, Py_ssize_t count, PyObject *names, const char *const *parameters,
			 int wanted, PyObject **out);

/* Nanoseconds, -1 for never; 0 when the object is no time, with an error only if the contract is not to be asked. */
int calls_read_timeout(PyObject *timeout, int64_t *out);
PyObject *calls_refuse_timeout(PyObject *given);
int64_t calls_deadline(int64_t timeout);

/* Nanoseconds on CLOCK_MONOTONIC_COARSE. */
int64_t calls_coarse_now(void);

/* Raise what the result of a call says: `posted` of its `count` messages were posted. NULL. */
PyObject *calls_fail(struct calls *self, const char *call, int result, uint32_t posted, uint32_t count);

/* Until when calls on the QP look before they sleep. */
int64_t calls_spin_until(const struct calls *self);

/* --- record_buffer.c --- */

/* Keep the room for the next batch, or free it. */
void calls_return_buffer(struct calls *self, struct record_buffer buffer);

/* Post the receives of these messages again. */
void calls_give_back(struct calls *self, const struct mcast_message *messages, uint32_t count);

/* --- message.c --- */

/* The buffer that messages of that generation arrive in, or the region, new; 0, or -1 with an error. */
int calls_open_memory(struct calls *self, uint32_t generation, Py_buffer *out, PyObject **region);

/* Takes the reference to `payload`. `region`: where the payload is, if that is on a device. */
PyObject *calls_make_message(struct calls *self, const struct mcast_message *from, PyObject *payload,
			     PyObject *region);

/* With a payload of its own: those bytes, or (NULL) those of the memory that they arrived in. */
PyObject *calls_copy_message(struct calls *self, const struct mcast_message *from, const uint8_t *copy);

/* --- lease.c --- */

extern PyType_Spec lease_spec;
int lease_make_types(void);

/* A batch of the messages in the buffer, which it takes. Without one the messages are lost, their receives are not. */
PyObject *lease_new(struct calls *self, struct record_buffer buffer, uint32_t count);

/* --- queue_pair.c --- */

extern PyType_Spec calls_spec;

/* --- send.c --- */

PyObject *calls_send(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *calls_send_one(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *calls_post(PyObject *object, PyObject *args);
PyObject *calls_post_header_body(PyObject *object, PyObject *args);
PyObject *calls_flush(PyObject *object, PyObject *given);

/* --- receive.c --- */

PyObject *calls_recv(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *calls_recv_one(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names);
PyObject *calls_receive(PyObject *object, PyObject *args);

/* --- events.c --- */

PyObject *calls_wait_event(PyObject *module, PyObject *args);

#endif
