/* A received message as Python sees it. */
#include "calls.h"

enum { MESSAGE_FIELDS = 12 };

static PyObject *gid_of(struct calls *self, struct known_gid *cache, const uint8_t *raw)
{
	struct known_gid *one = &cache[raw[15] % CACHED_GIDS];
	PyObject *gid = NULL, *old = NULL;

	BEGIN_ALONE((PyObject *)self);
	if (one->gid && !memcmp(one->raw, raw, 16))
		gid = Py_NewRef(one->gid);
	END_ALONE();
	if (gid)
		return gid;
	gid = PyObject_CallFunction(known.gid, "y#", raw, (Py_ssize_t)16);
	if (!gid)
		return NULL;
	BEGIN_ALONE((PyObject *)self);
	old = one->gid;
	one->gid = Py_NewRef(gid);
	memcpy(one->raw, raw, 16);
	END_ALONE();
	Py_XDECREF(old);
	return gid;
}

/* The place of a message in the memory of another device; None for a message in the memory of the provider. */
static PyObject *place_of(PyObject *region, const struct mcast_message *from)
{
	return region ? PyObject_CallMethod(region, "at", "KI", (unsigned long long)from->offset, from->length) :
			Py_NewRef(Py_None);
}

PyObject *calls_make_message(struct calls *self, const struct mcast_message *from, PyObject *payload,
			     PyObject *region)
{
	PyObject *source = gid_of(self, self->senders, from->source), *message = NULL;
	int own = 0, all = 1;

	if (payload && source && from->own_qp_num)
		own = PySet_Contains(self->sources, source);
	if (payload && source && own >= 0)
		message = PyType_GenericAlloc((PyTypeObject *)known.message, MESSAGE_FIELDS);
	if (!message) {
		Py_XDECREF(payload);
		Py_XDECREF(source);
		return NULL;
	}
	PyObject *const fields[MESSAGE_FIELDS] = {
		payload,
		source,
		PyLong_FromUnsignedLong(from->src_qp),
		gid_of(self, self->groups, from->group),
		from->has_imm ? PyLong_FromUnsignedLong(from->imm) : Py_NewRef(Py_None),
		PyBool_FromLong(own),
		PyLong_FromUnsignedLong(from->src_lid),
		PyLong_FromUnsignedLong(from->sl),
		PyLong_FromUnsignedLong(from->path_bits),
		place_of(region, from),
		self->qp->init.timestamps ? PyLong_FromUnsignedLongLong(from->timestamp) : Py_NewRef(Py_None),
		Py_NewRef(Py_None), /* number: known to an endpoint alone */
	};
	for (Py_ssize_t i = 0; i < MESSAGE_FIELDS; i++) {
		all &= fields[i] != NULL;
		PyTuple_SetItem(message, i, fields[i]);
	}
	if (!all)
		Py_CLEAR(message);
	return message;
}

int calls_open_memory(struct calls *self, uint32_t generation, Py_buffer *out, PyObject **region)
{
	PyObject *key = PyLong_FromUnsignedLong(generation), *memory;
	int failed;

	if (!key)
		return -1;
	memory = value_of(self->memories, key);
	if (!memory && !PyErr_Occurred())
		PyErr_SetObject(PyExc_KeyError, key);
	Py_DECREF(key);
	if (memory && !PyObject_CheckBuffer(memory)) {
		*region = memory;
		return 0;
	}
	failed = memory ? PyObject_GetBuffer(memory, out, PyBUF_SIMPLE) : -1;
	Py_XDECREF(memory);
	return failed;
}

PyObject *calls_copy_message(struct calls *self, const struct mcast_message *from, const uint8_t *copy)
{
	PyObject *payload = NULL, *view = NULL, *region = NULL, *message;
	Py_buffer memory;

	if (copy) {
		payload = PyBytes_FromStringAndSize((const char *)copy, from->length);
	} else if (!calls_open_memory(self, from->generation, &memory, &region)) {
		if (region) { /* a thread that waited when another changed where messages arrive */
			payload = PyBytes_FromStringAndSize(NULL, 0);
		} else {
			payload = PyBytes_FromStringAndSize((const char *)memory.buf + from->offset, from->length);
			PyBuffer_Release(&memory);
		}
	}
	if (payload) {
		view = PyMemoryView_FromObject(payload);
		Py_DECREF(payload);
	}
	message = view ? calls_make_message(self, from, view, region) : NULL;
	Py_XDECREF(region);
	return message;
}
