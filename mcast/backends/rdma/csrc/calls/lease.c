/* The base class of a batch: messages leased from the memory that they arrived in.
 *
 * States: leased; released (`released`: no view is left, no new one is made); given back (`given_back`: the receives are
 * posted again, or free in RESET). A release ends the views, gives the receives back, and only then lets the memory go.
 * While a slice of a payload is in use (`window->exports`), it is refused and changes nothing.
 *
 * The lease owns its records, its views and one reference to the memory. Views are made of the window, not of the lease,
 * so that views which keep the memory alive do not keep the lease alive: a batch that is dropped is released by its
 * finalizer, in C. `guard` protects all fields below it, because two threads may release one batch at once. Python code
 * that may follow (the release of memory, the end of views) runs after the guard, never in it.
 *
 * Nobody waits for a lease, so nothing is woken: the receives that it gives back are posted at once. Not handled: a
 * message that is read while another thread releases its batch gets ValueError, and no view. */
#include "calls.h"

#include <structmember.h>

static PyObject *window_type, *messages_type, *release_name;

/* Exporter of the views of payloads, which counts them: not the lease itself, which keeps the views. */
struct window {
	PyObject_HEAD
	Py_buffer memory;
	Py_ssize_t exports; /* atomic */
	Py_ssize_t next_offset, next_length; /* of the view that is being made */
};

struct lease {
	PyObject_HEAD
	struct calls *owner;
	struct record_buffer buffer;
	uint32_t count; /* of messages in it */
	char released;	 /* atomic */
	struct guard guard; /* of all below but the region */
	char given_back; /* the receives: this is no more the lease of any */
	PyObject *views; /* NULL until there is one */
	Py_buffer memory;
	PyObject *region; /* instead of `memory`, where the CPU has no view: a DeviceRegion */
	struct window *window; /* NULL until a payload is looked at */
};

static int window_get_buffer(PyObject *object, Py_buffer *view, int flags)
{
	struct window *self = (struct window *)object;
	char *start = (char *)self->memory.buf + self->next_offset;

	if (PyBuffer_FillInfo(view, object, start, self->next_length, 1, flags))
		return -1;
	__atomic_add_fetch(&self->exports, 1, __ATOMIC_SEQ_CST);
	return 0;
}

static void window_release_buffer(PyObject *object, Py_buffer *view)
{
	__atomic_sub_fetch(&((struct window *)object)->exports, 1, __ATOMIC_SEQ_CST);
}

static void window_dealloc(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);

	PyBuffer_Release(&((struct window *)object)->memory);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static PyType_Slot window_slots[] = {
	{ Py_tp_dealloc, window_dealloc },
	{ Py_bf_getbuffer, window_get_buffer },
	{ Py_bf_releasebuffer, window_release_buffer },
	{ 0, NULL },
};

static PyType_Spec window_spec = {
	.name = "mcast.backends.rdma._calls.Window",
	.basicsize = sizeof(struct window),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = window_slots,
};

PyObject *lease_new(struct calls *self, struct record_buffer buffer, uint32_t count)
{
	struct lease *lease = (struct lease *)PyType_GenericAlloc((PyTypeObject *)known.batch, 0);

	if (!lease || (count && calls_open_memory(self, buffer.records[0].generation, &lease->memory, &lease->region))) {
		if (count)
			calls_give_back(self, buffer.records, count);
		Py_XDECREF((PyObject *)lease);
		calls_return_buffer(self, buffer);
		return NULL;
	}
	lease->owner = (struct calls *)Py_NewRef((PyObject *)self);
	lease->count = count;
	if (count)
		lease->buffer = buffer;
	else
		calls_return_buffer(self, buffer);
	return (PyObject *)lease;
}

enum { IN_USE, GIVEN_BACK, GIVEN_BACK_NOW };

/* Give the receives back, once. IN_USE: a slice of a payload is. GIVEN_BACK_NOW: the caller releases the memory, outside of
 * the guard. */
static int give_back(struct lease *self)
{
	if (self->window && __atomic_load_n(&self->window->exports, __ATOMIC_SEQ_CST))
		return IN_USE;
	if (self->given_back)
		return GIVEN_BACK;
	if (self->count)
		calls_give_back(self->owner, self->buffer.records, self->count);
	self->given_back = 1;
	return GIVEN_BACK_NOW;
}

/* Two threads that release one view at once would release its buffer twice, so this is done under the guard. 0: a view
 * is in use. */
static int end_views(struct lease *self)
{
	for (Py_ssize_t i = self->views ? PyList_Size(self->views) : 0; i > 0; i--) {
		PyObject *view = item_of(self->views, i - 1);
		PyObject *done = view ? PyObject_CallMethodObjArgs(view, release_name, NULL) : NULL;

		Py_XDECREF(view);
		if (!done) {
			PyErr_Clear();
			return 0;
		}
		Py_DECREF(done);
	}
	return 1;
}

/* Return 1 if the lease has ended. Steps that may run Python code are done last, without the guard. */
static inline __attribute__((always_inline)) int end_lease(struct lease *self)
{
	PyObject *views = NULL;
	int ended = GIVEN_BACK;

	BEGIN_GUARDED(self);
	if (!__atomic_load_n(&self->released, __ATOMIC_RELAXED)) {
		ended = IN_USE;
		if (end_views(self)) {
			views = self->views;
			self->views = NULL;
			ended = give_back(self);
			__atomic_store_n(&self->released, ended != IN_USE, __ATOMIC_RELAXED);
		}
	}
	END_GUARDED(self);
	Py_XDECREF(views);
	if (ended == GIVEN_BACK_NOW)
		PyBuffer_Release(&self->memory);
	return ended != IN_USE;
}

/* Batch._end: the contract says what a BufferError means. */
static PyObject *lease_end(PyObject *object, PyObject *unused)
{
	if (end_lease((struct lease *)object))
		Py_RETURN_NONE;
	PyErr_SetNone(PyExc_BufferError);
	return NULL;
}

/* Batch._release */
static PyObject *lease_give_back(PyObject *object, PyObject *unused)
{
	struct lease *self = (struct lease *)object;
	int ended;

	BEGIN_GUARDED(self);
	ended = give_back(self);
	END_GUARDED(self);
	if (ended == GIVEN_BACK_NOW)
		PyBuffer_Release(&self->memory);
	if (ended != IN_USE)
		Py_RETURN_NONE;
	PyErr_SetNone(PyExc_BufferError);
	return NULL;
}

static PyObject *lease_release(PyObject *object, PyObject *unused)
{
	if (!end_lease((struct lease *)object))
		return PyObject_CallFunctionObjArgs(known.release, object, NULL);
	Py_RETURN_NONE;
}

static PyObject *lease_enter(PyObject *object, PyObject *unused)
{
	return Py_NewRef(object);
}

/* Of a block that an exception has ended, the traceback may be what uses a payload. */
static PyObject *lease_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
	if (!count || args[0] == Py_None)
		return lease_release(object, NULL);
	end_lease((struct lease *)object);
	Py_RETURN_NONE;
}

static Py_ssize_t lease_length(PyObject *object)
{
	return ((struct lease *)object)->count;
}

/* 0: with the contract's error. */
static int require_lease(struct lease *self)
{
	PyObject *leased = PyObject_CallMethod((PyObject *)self, "_require_lease", NULL);

	Py_XDECREF(leased);
	return leased != NULL;
}

static int is_leased(struct lease *self)
{
	return !__atomic_load_n(&self->released, __ATOMIC_RELAXED) || require_lease(self);
}

/* Make the window, unless there is one. -1: an error. */
static int open_window(struct lease *self, PyObject *memory)
{
	struct window *window = (struct window *)PyType_GenericAlloc((PyTypeObject *)window_type, 0);
	int failed = !window || PyObject_GetBuffer(memory, &window->memory, PyBUF_SIMPLE);

	BEGIN_GUARDED(self);
	if (!failed && !self->window) {
		self->window = window;
		window = NULL;
	}
	END_GUARDED(self);
	Py_XDECREF((PyObject *)window);
	return failed ? -1 : 0;
}

static PyObject *view_of(struct lease *self, uint64_t offset, Py_ssize_t length)
{
	PyObject *memory, *view = NULL;
	int is_late, has_window; /* late: another thread has given the receives back meanwhile */

	BEGIN_GUARDED(self);
	is_late = self->given_back;
	memory = is_late ? NULL : Py_XNewRef(self->memory.obj);
	has_window = self->window != NULL;
	END_GUARDED(self);
	if (!memory && !is_late)
		return PyMemoryView_FromMemory((char *)"", 0, PyBUF_READ);
	if (!is_late && (has_window || !open_window(self, memory))) {
		BEGIN_GUARDED(self);
		is_late = self->given_back;
		if (!is_late) {
			self->window->next_offset = (Py_ssize_t)offset;
			self->window->next_length = length;
			view = PyMemoryView_FromObject((PyObject *)self->window);
		}
		END_GUARDED(self);
	}
	Py_XDECREF(memory);
	if (is_late && require_lease(self))
		PyErr_SetNone(PyExc_ValueError);
	return view;
}

static PyObject *message_at(struct lease *self, uint32_t place)
{
	const struct mcast_message *record = &self->buffer.records[place];

	return calls_make_message(self->owner, record, view_of(self, record->offset, record->length), self->region);
}

static PyObject *lease_message(PyObject *object, PyObject *index)
{
	struct lease *self = (struct lease *)object;
	Py_ssize_t place = PyLong_AsSsize_t(index);

	if (place >= 0 && place < self->count)
		return message_at(self, (uint32_t)place);
	if (!PyErr_Occurred())
		PyErr_SetObject(PyExc_IndexError, index); /* the contract has looked at it before */
	return NULL;
}

/* The view ends with the lease. 0, or -1 with an error. */
static int keep_view(struct lease *self, PyObject *view)
{
	int failed;

	if (!view)
		return -1;
	BEGIN_GUARDED(self);
	if (!self->views)
		self->views = PyList_New(0);
	failed = self->views ? PyList_Append(self->views, view) : -1;
	END_GUARDED(self);
	return failed;
}

/* Batch._keep */
static PyObject *lease_keep(PyObject *object, PyObject *view)
{
	return keep_view((struct lease *)object, view) ? NULL : Py_NewRef(view);
}

/* Keeps the lease: `for message in qp.recv(...)` has no other owner of it. */
struct messages {
	PyObject_HEAD
	struct lease *lease;
	uint32_t next;
};

static PyObject *lease_iterate(PyObject *object)
{
	struct messages *messages = (struct messages *)PyType_GenericAlloc((PyTypeObject *)messages_type, 0);

	if (messages)
		messages->lease = (struct lease *)Py_NewRef(object);
	return (PyObject *)messages;
}

/* The message at that place could not be made, and is the next one again. */
static void take_back(struct messages *self, uint32_t place)
{
	BEGIN_ALONE((PyObject *)self);
	if (self->next == place + 1)
		__atomic_store_n(&self->next, place, __ATOMIC_RELAXED);
	END_ALONE();
}

static PyObject *messages_next(PyObject *object)
{
	struct messages *self = (struct messages *)object;
	struct lease *lease = self->lease;
	PyObject *message;
	uint32_t place;

	if (__atomic_load_n(&self->next, __ATOMIC_RELAXED) == lease->count || !is_leased(lease))
		return NULL;
	BEGIN_ALONE(object);
	place = self->next;
	if (place < lease->count)
		__atomic_store_n(&self->next, place + 1, __ATOMIC_RELAXED);
	END_ALONE();
	if (place == lease->count)
		return NULL;
	message = message_at(lease, place);
	if (!message || keep_view(lease, PyTuple_GetItem(message, 0)))
		Py_CLEAR(message);
	if (!message)
		take_back(self, place);
	return message;
}

static void messages_dealloc(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);

	Py_XDECREF((PyObject *)((struct messages *)object)->lease);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static PyType_Slot messages_slots[] = {
	{ Py_tp_dealloc, messages_dealloc },
	{ Py_tp_iter, PyObject_SelfIter },
	{ Py_tp_iternext, messages_next },
	{ 0, NULL },
};

static PyType_Spec messages_spec = {
	.name = "mcast.backends.rdma._calls.Messages",
	.basicsize = sizeof(struct messages),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = messages_slots,
};

static PyObject *lease_lengths(PyObject *object, void *unused)
{
	struct lease *self = (struct lease *)object;
	PyObject *lengths = PyList_New(self->count);

	for (uint32_t i = 0; lengths && i < self->count; i++)
		PyList_SetItem(lengths, i, PyLong_FromUnsignedLong(self->buffer.records[i].length));
	return lengths;
}

static PyObject *lease_records(PyObject *object, void *unused)
{
	struct lease *self = (struct lease *)object;

	return PyBytes_FromStringAndSize((const char *)self->buffer.records,
					 (Py_ssize_t)(self->count * sizeof(*self->buffer.records)));
}

static PyObject *lease_memory(PyObject *object, void *unused)
{
	struct lease *self = (struct lease *)object;
	PyObject *view;

	if (!is_leased(self))
		return NULL;
	if (self->region)
		return PyObject_CallMethod(self->region, "no_view", NULL);
	view = view_of(self, 0, self->memory.len);
	if (keep_view(self, view))
		Py_CLEAR(view);
	return view;
}

static int are_alike(const struct mcast_message *one, const struct mcast_message *other)
{
	return one->length == other->length && one->src_qp == other->src_qp &&
	       !memcmp(one->source, other->source, sizeof(one->source));
}

/* Before which of the `count` messages those end that are like the first, and begin at equal distances: `step`. */
static uint32_t end_of_stretch(const struct mcast_message *messages, uint32_t count, uint64_t *step)
{
	uint32_t end = 1;

	*step = messages->length;
	if (count == 1 || messages[1].offset <= messages->offset || messages[1].offset - messages->offset < *step)
		return end;
	*step = messages[1].offset - messages->offset;
	while (end < count && messages[end].offset - messages[end - 1].offset == *step &&
	       are_alike(messages, &messages[end]))
		end++;
	if (end == 1)
		*step = messages->length;
	return end;
}

/* Batch._stretches */
static PyObject *lease_stretches(PyObject *object, PyObject *unused)
{
	struct lease *self = (struct lease *)object;
	const struct mcast_message *last = NULL;
	PyObject *found = PyList_New(0);

	for (uint32_t at = 0; found && at < self->count;) {
		const struct mcast_message *first = &self->buffer.records[at];
		uint64_t step;
		uint32_t count = end_of_stretch(first, self->count - at, &step);
		int is_new = !last || last->src_qp != first->src_qp ||
			     memcmp(last->source, first->source, sizeof(first->source));
		PyObject *one = Py_BuildValue("(IIKKIO)", at, count, (unsigned long long)first->offset,
					      (unsigned long long)step, first->length, is_new ? Py_True : Py_False);

		if (!one || PyList_Append(found, one))
			Py_CLEAR(found);
		Py_XDECREF(one);
		last = first;
		at += count;
	}
	return found;
}

/* A view still in use elsewhere keeps its buffers leased: lost receives, never wrong bytes. No Python code runs, because
 * what a signal's handler raised there would be lost. */
static void lease_finalize(PyObject *object)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	if (((struct lease *)object)->owner)
		end_lease((struct lease *)object);
	PyErr_Clear();
	PyErr_Restore(type, value, trace);
}

static void lease_dealloc(PyObject *object)
{
	struct lease *self = (struct lease *)object;
	PyTypeObject *type = Py_TYPE(object);

	PyBuffer_Release(&self->memory);
	Py_XDECREF(self->region);
	Py_XDECREF((PyObject *)self->window);
	if (self->owner)
		calls_return_buffer(self->owner, self->buffer);
	Py_XDECREF(self->views);
	Py_XDECREF((PyObject *)self->owner);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static PyMemberDef lease_members[] = {
	{ "_released", T_BOOL, offsetof(struct lease, released), 0, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef lease_methods[] = {
	{ "release", lease_release, METH_NOARGS, "Batch.release" },
	{ "__enter__", lease_enter, METH_NOARGS, NULL },
	{ "__exit__", (PyCFunction)(void (*)(void))lease_exit, METH_FASTCALL, NULL },
	{ "_message", lease_message, METH_O, "Batch._message" },
	{ "_release", lease_give_back, METH_NOARGS, "Batch._release" },
	{ "_keep", lease_keep, METH_O, "Batch._keep" },
	{ "_stretches", lease_stretches, METH_NOARGS, "Batch._stretches" },
	{ "_end", lease_end, METH_NOARGS, "Batch._end" },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef lease_getters[] = {
	{ "lengths", lease_lengths, NULL, "Batch.lengths", NULL },
	{ "memory", lease_memory, NULL, "Batch.memory", NULL },
	{ "records", lease_records, NULL, "Batch.records", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot lease_slots[] = {
	{ Py_tp_dealloc, lease_dealloc },
	{ Py_tp_finalize, lease_finalize },
	{ Py_tp_members, lease_members },
	{ Py_tp_methods, lease_methods },
	{ Py_tp_getset, lease_getters },
	{ Py_tp_iter, lease_iterate },
	{ Py_sq_length, lease_length },
	{ 0, NULL },
};

PyType_Spec lease_spec = {
	.name = "mcast.backends.rdma._calls.Lease",
	.basicsize = sizeof(struct lease),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = lease_slots,
};

int lease_make_types(void)
{
	window_type = PyType_FromSpec(&window_spec);
	messages_type = PyType_FromSpec(&messages_spec);
	release_name = PyUnicode_InternFromString("release");
	return window_type && messages_type && release_name ? 0 : -1;
}
