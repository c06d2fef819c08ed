/* The base class of the QP: what Python tells it, and its methods. */
#include "calls.h"

static PyObject *calls_arm(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	PyObject *memories, *sources;

	if (!PyArg_ParseTuple(args, "iO!O!", &self->event_fd, &PyDict_Type, &memories, &PySet_Type, &sources))
		return NULL;
	replace(&self->memories, Py_NewRef(memories));
	replace(&self->sources, Py_NewRef(sources));
	self->forks = mcast_forks;
	return PyLong_FromVoidPtr(&self->qp);
}

static PyObject *calls_aim(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	PyObject *destination, *old;
	unsigned long long serial;
	unsigned int qp_num, qkey, group_mtu;

	if (!PyArg_ParseTuple(args, "OKIII", &destination, &serial, &qp_num, &qkey, &group_mtu))
		return NULL;
	BEGIN_ALONE(object);
	self->qp_num = qp_num;
	self->qkey = qkey;
	self->group_mtu = group_mtu;
	self->serial = serial;
	old = self->destination;
	self->destination = Py_NewRef(destination);
	END_ALONE();
	Py_XDECREF(old);
	Py_RETURN_NONE;
}

static PyObject *calls_arrive(PyObject *object, PyObject *given)
{
	int on_device = PyObject_IsTrue(given);

	if (on_device < 0)
		return NULL;
	__atomic_store_n(&((struct calls *)object)->on_device, on_device, __ATOMIC_RELAXED);
	Py_RETURN_NONE;
}

static PyObject *calls_limit(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	double seconds;
	unsigned int limit;

	if (!PyArg_ParseTuple(args, "Id", &limit, &seconds))
		return NULL;
	__atomic_store_n(&self->limit, limit, __ATOMIC_RELAXED);
	__atomic_store_n(&self->limit_until, calls_coarse_now() + (int64_t)(seconds * 1e9), __ATOMIC_RELEASE);
	Py_RETURN_NONE;
}

static PyObject *calls_has_port_events(PyObject *object, PyObject *unused)
{
	struct calls *self = (struct calls *)object;
	int has = !is_usable(self);

	if (!has) {
		Py_BEGIN_ALLOW_THREADS /* another thread may be reading the device's events */
		has = mcast_has_port_events(self->qp);
		Py_END_ALLOW_THREADS
	}
	return PyBool_FromLong(has);
}

/* QueuePair.has_port_events: what was read from the device, and not from here. */
static PyObject *calls_holds_port_events(PyObject *object, void *unused)
{
	struct calls *self = (struct calls *)object;

	return PyBool_FromLong(is_usable(self) && mcast_holds_events(&self->qp->async));
}

static int calls_visit(PyObject *object, visitproc visit, void *arg)
{
	struct calls *self = (struct calls *)object;

	Py_VISIT(Py_TYPE(object));
	Py_VISIT(self->destination);
	Py_VISIT(self->memories);
	Py_VISIT(self->sources);
	return 0;
}

static void calls_dealloc(PyObject *object)
{
	struct calls *self = (struct calls *)object;
	PyTypeObject *type = Py_TYPE(object);

	PyObject_GC_UnTrack(object);
	PyMem_Free(self->spare.records);
	if (self->qp && self->forks == mcast_forks && mcast_is_closed(self->qp))
		mcast_free_qp(self->qp);
	Py_XDECREF(self->destination);
	Py_XDECREF(self->memories);
	Py_XDECREF(self->sources);
	for (int i = 0; i < CACHED_GIDS; i++) {
		Py_XDECREF(self->senders[i].gid);
		Py_XDECREF(self->groups[i].gid);
	}
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

static PyMethodDef calls_methods[] = {
	{ "send", FAST(calls_send), "QueuePair.send" },
	{ "send_one", FAST(calls_send_one), "QueuePair.send_one" },
	{ "recv", FAST(calls_recv), "QueuePair.recv" },
	{ "recv_one", FAST(calls_recv_one), "QueuePair.recv_one" },
	{ "_recv", calls_receive, METH_VARARGS, "QueuePair._recv" },
	{ "_post", calls_post, METH_VARARGS, "send a list to an address handle" },
	{ "_post_header_body", calls_post_header_body, METH_VARARGS, "the same with rows of two parts" },
	{ "_flush", calls_flush, METH_O, "QueuePair._flush" },
	{ "_has_port_events", calls_has_port_events, METH_NOARGS, "whether port_events finds something, or raises" },
	{ "_arm", calls_arm, METH_VARARGS, "the address of the place that the QP is to be made in" },
	{ "_aim", calls_aim, METH_VARARGS, "the address handle of a destination" },
	{ "_arrive", calls_arrive, METH_O, "whether messages arrive in another device's memory" },
	{ "_limit", calls_limit, METH_VARARGS, "the MTU, and how many seconds to believe it" },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef calls_getters[] = {
	{ "has_port_events", calls_holds_port_events, NULL, "QueuePair.has_port_events", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot calls_slots[] = {
	{ Py_tp_dealloc, calls_dealloc },
	{ Py_tp_traverse, calls_visit },
	{ Py_tp_methods, calls_methods },
	{ Py_tp_getset, calls_getters },
	{ 0, NULL },
};

PyType_Spec calls_spec = {
	.name = "mcast.backends.rdma._calls.Calls",
	.basicsize = sizeof(struct calls),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
	.slots = calls_slots,
};
